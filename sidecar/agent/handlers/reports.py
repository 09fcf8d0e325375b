"""Reports to the service: at each change, at most 20 a second, and as a heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.jobs.host_state import Host

MIN_INTERVAL_S = 0.05

Notable: TypeAlias = tuple[object, ...]


@dataclass
class Reporter:
    """Decides when a report is due.

    ``memory`` returns total and free host memory in MB, ``telemetry`` a job's last sample, ``tuned`` its limits in
    force if they are not Slurm's own, ``lacks`` the settings that this host cannot follow, ``prefetched`` the results
    of prefetches for jobs to come.
    """

    host: Host
    version: str
    memory: Callable[[], tuple[int, int]]
    telemetry: Callable[[JobKey], orders.JobTelemetry | None]
    tuned: Callable[[JobKey], orders.InForce | None]
    lacks: Callable[[], tuple[str, ...]]
    prefetched: Callable[[], tuple[orders.Prefetched, ...]]
    _last: Notable = ()
    _sent_at: float = float("-inf")

    def due(self) -> orders.Report | None:
        """Return a report if something changed or the heartbeat is due, else None."""
        now = self.host.clock.monotonic()
        if now - self._sent_at < MIN_INTERVAL_S:
            return None
        report = self._report()
        notable = _notable(report)
        if notable == self._last and now - self._sent_at < self.host.settings.heartbeat_s:
            return None
        self._last, self._sent_at = notable, now
        return report

    def _report(self) -> orders.Report:
        """Return the state of this host and its jobs."""
        total, free = self.memory()
        return orders.Report(
            v=orders.VERSION,
            host=self.host.name,
            version=self.version,
            memory_mb=total,
            memory_free_mb=free,
            rotating=self.host.rotating(),
            leases=tuple(
                msgspec.structs.replace(
                    self.host.lease_report(lease), telemetry=self.telemetry(lease.key), tuned=self.tuned(lease.key)
                )
                for lease in self.host.leases
            ),
            lacks=self.lacks(),
            prefetched=self.prefetched(),
        )


def _notable(report: orders.Report) -> Notable:
    """Return the part of a report whose change is worth sending at once."""
    return (
        report.rotating,
        report.prefetched,
        *(
            (one.job, one.restart, one.state, one.ready, one.ranks, one.managed, one.gpus, one.note, one.requeue_owner,
             one.checkpoints, one.saved, one.lost, one.tuned, one.pack)
            for one in report.leases
        ),
    )
