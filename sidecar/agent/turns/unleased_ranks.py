"""Ranks that run without a lease: the agent had forgotten their job, and gave its GPUs away before they came back.

Told one by one to sit out, each would stop at a boundary of its own and leave the others waiting for it in a
collective, with all that they have on their GPUs. So they train on until a stop brings them to one boundary. Until
they are out, nobody else gets a GPU of theirs; who holds it already keeps it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cadenza.sidecar.agent.jobs.job_run import Stop

if TYPE_CHECKING:
    from cadenza.sidecar.agent.jobs.host_state import Host
    from cadenza.sidecar.agent.jobs.job_run import JobRun
    from cadenza.sidecar.agent.leases.lease_table import Lease
    from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)


def on_gpus_of(host: Host, lease: Lease) -> bool:
    """Whether ranks of another job run without a lease on a GPU that this job would get."""
    others = (other for other in host.leases if other is not lease and other.overlaps(lease))
    return any((run := host.jobs.get(other.key)) is not None and run.strays(other) for other in others)


def gather(coordinator: StopCoordinator, lease: Lease, run: JobRun) -> None:
    """Begin to stop ranks that run without a lease, once all of them are here; of several hosts nobody here can."""
    if not run.strays(lease):
        return
    host = coordinator.host
    now = host.clock.monotonic()
    apart = lease.hosts > 1 or any(rank.out for rank in run.ranks.values())
    if apart or run.unattached(lease) or run.why_not_ready(lease, now):
        run.note = run.note or f"{_lost(host, lease)}; it trains on without until it gets them"
        return
    note = f"{_lost(host, lease)}; all its ranks stop at one boundary"
    log.warning("runs without a lease JOBID=%s: %s", lease.key, note)
    run.note = note
    run.stop = Stop(host.next_order(), "stray", now, host.settings.yield_timeout_s, seen_at=now)
    coordinator.tick(lease)


def _lost(host: Host, lease: Lease) -> str:
    """Say what happened to the job's GPUs."""
    holders = ", ".join(str(other.key) for other in host.leases.blockers(lease))
    return f"its lease was lost, and its GPUs went to {f'job {holders}' if holders else 'nobody yet'}"
