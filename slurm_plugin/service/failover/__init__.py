"""Failover: the store's lock, the watchdog, and the release of our jobs."""
