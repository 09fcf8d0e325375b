"""A stop for a checkpoint, once all ranks stand: they save, and stand until a requeue, a word or the time is up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.sidecar.agent.ipc.messages import Checkpointed
    from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank, Stop
    from cadenza.sidecar.agent.leases.lease_table import Lease
    from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)


def checkpointed(coordinator: StopCoordinator, lease: Lease, rank: Rank, message: Checkpointed) -> None:
    """Note what a rank has saved; when one could not, the stop is over for all and the job runs on."""
    run = coordinator.host.run(lease.key)
    stop = run.stop
    if stop is None or stop.saving is None or message.order != stop.order or not stop.committed:
        coordinator.host.outbox.post(rank.session, "cancel", order=message.order, reason="this stop is over")
        return
    if message.error:
        coordinator.undo(lease, run, f"rank {rank.hello.rank} could not save a checkpoint: {message.error}")
        return
    stop.saving.done.add(rank.pid)
    stop.saving.path = stop.saving.path or message.path
    stop.copy_s = max(stop.copy_s, message.seconds)
    stop.bytes = max(stop.bytes, message.bytes)
    run.note = f"checkpoint of step {message.step}" + (f": {message.path}" if message.path else "")
    settle(coordinator, lease, stop)


def settle(coordinator: StopCoordinator, lease: Lease, stop: Stop) -> None:
    """Report the checkpoint when every rank that is left has saved; a job without ranks is only forgotten."""
    run, saving = coordinator.host.run(lease.key), stop.saving
    if saving is None or saving.done_at is not None:
        return
    if not run.ranks:
        coordinator.undo(lease, run, "all its processes ended while it saved")
    elif run.ranks.keys() <= saving.done:
        saving.done_at = coordinator.host.clock.monotonic()
        coordinator.report_stop(lease, run, stop, "checkpoint", run.note)
        if run.followed and saving.path:
            coordinator.host.upward.append(coordinator.host.files(lease, (saving.path,)))
        log.info("checkpoint JOBID=%s save_s=%.3f bytes=%d", lease.key, stop.copy_s, stop.bytes)


def tick(coordinator: StopCoordinator, lease: Lease, stop: Stop) -> None:
    """Send the ranks on when saving, or the requeue after it, takes too long."""
    saving = stop.saving
    if saving is None:
        return
    run, now = coordinator.host.run(lease.key), coordinator.host.clock.monotonic()
    if saving.done_at is not None:
        if now - saving.done_at > saving.hold_s:
            go_on(coordinator, lease, f"not requeued within {saving.hold_s:g} s of its checkpoint")
    elif now - stop.began - stop.boundary_s > saving.save_s:
        coordinator.undo(lease, run, f"its checkpoint was not complete after {saving.save_s:g} s")


def go_on(coordinator: StopCoordinator, lease: Lease, reason: str) -> None:
    """Let a job that stands after its checkpoint train on; any other is not affected."""
    run = coordinator.host.run(lease.key)
    if not run.saved:
        return
    send_on(coordinator, run, reason)
    run.stop, run.note = None, reason
    coordinator.host.leases.keep(lease, coordinator.host.clock.now())
    log.info("goes on JOBID=%s: %s", lease.key, reason)


def send_on(coordinator: StopCoordinator, run: JobRun, reason: str) -> None:
    """Tell ranks that stand for a checkpoint, or are about to, that this stop is over."""
    stop = run.stop
    if stop is None or stop.saving is None:
        return
    for rank in run.ranks.values():
        rank.arrived = None
        rank.page.order(stop.order, 0)
        coordinator.host.outbox.post(rank.session, "cancel", order=stop.order, reason=reason)
