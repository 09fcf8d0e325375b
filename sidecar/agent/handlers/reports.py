"""Reports to the service: at each change, at most 20 a second, and as a heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease

SPACING_S = 0.05

Notable: TypeAlias = tuple[object, ...]


@dataclass
class Reporter:
    """Decides when a report is due.

    ``memory`` returns total and free host memory in MB, ``telemetry`` the last sample of a job, ``tuned``
    what was set on it in the place of Slurm's own limits, ``lacks`` what this host cannot do, ``prefetched`` what it
    has read for jobs to come.
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
        """Return a report when something changed or the heartbeat is due, else None."""
        now = self.host.clock.monotonic()
        if now - self._sent_at < SPACING_S:
            return None
        report = self._report()
        notable = _notable(report)
        if notable == self._last and now - self._sent_at < self.host.settings.heartbeat_s:
            return None
        self._last, self._sent_at = notable, now
        return report

    def _report(self) -> orders.Report:
        """Return everything that the agent knows."""
        total, free = self.memory()
        return orders.Report(
            v=orders.VERSION,
            host=self.host.name,
            version=self.version,
            memory_mb=total,
            memory_free_mb=free,
            rotating=self.host.rotating(),
            leases=tuple(self._lease(lease) for lease in self.host.leases),
            lacks=self.lacks(),
            prefetched=self.prefetched(),
        )

    def _lease(self, lease: Lease) -> orders.LeaseReport:
        """Return what the service may know of one job, with what was measured of it."""
        measured, tuned = self.telemetry(lease.key), self.tuned(lease.key)
        return msgspec.structs.replace(self.host.lease_report(lease), telemetry=measured, tuned=tuned)


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
