"""The agent: one root daemon per host that passes orders, keeps leases and samples telemetry."""
