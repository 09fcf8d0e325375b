"""Jobs that are out: checkpoints from host memory, and the move of their state from there to a disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.sidecar.agent.ipc.messages import Spilled
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import Eviction, JobRun, Rank
from cadenza.sidecar.agent.jobs.stop_states import AwayStop
from cadenza.sidecar.agent.leases.lease_table import Lease

log = logging.getLogger(__name__)

SAVE_S = 900.0
"""Longest time for a checkpoint from host memory that no move waits for, in seconds."""
FAILED_SAVE_S = 900.0
FAILED_HOLD_S = 60.0
"""Longest times for the checkpoint of a job whose GPU fails, and for the requeue after it, in seconds; without a
requeue it tries its GPUs again."""


@dataclass
class AwaySaves:
    """Orders to jobs whose state is in host memory, and their answers; see ``AwayStop`` for the states."""

    host: Host

    def save(self, lease: Lease, save_s: float, hold_s: float, origin: str = "service", goal: str = "") -> str | None:
        """Have a job that has yielded save a checkpoint without its GPUs; return the reason if that is refused.

        ``save_s`` and ``hold_s`` are the longest times for saving and for the requeue then; ``goal`` says what the job
        does after it, for its own output.
        """
        run, now = self.host.run(lease.key), self.host.clock.monotonic()
        if lease.state != "yielded" or run.stop is not None:
            return f"its lease is {lease.state}"
        if reason := run.unsavable_reason(lease, now):
            return reason
        if lease.frozen or not run.can_checkpoint_away or not all(rank.out for rank in run.ranks.values()):
            return "not all its ranks can save a checkpoint from host memory: see client.checkpoint()"
        stop = AwayStop(self.host.next_order(), origin, now, 0.0, save_s=save_s, hold_s=hold_s, goal=goal)
        run.stop = stop
        for rank in run.ranks.values():
            self.host.outbox.post(rank.session, "save", order=stop.order, goal=goal)
        log.info("save JOBID=%s order=%d", lease.key, stop.order)
        return None

    def if_gpus_failed(self, lease: Lease, run: JobRun) -> None:
        """Have a job that is out save a checkpoint from host memory when the driver says that a GPU of it has failed.

        That happens once: a rank keeps the reason until its state is back. The ranks of several hosts save together.
        """
        out = lease.state == "yielded" and run.stop is None and lease.hosts == 1 and run.can_checkpoint_away
        faults = self.host.gpu_faults() if out and not any(rank.failed for rank in run.ranks.values()) else {}
        failed = [gpu for gpu in lease.gpus if gpu in faults]
        if failed and self.save(lease, FAILED_SAVE_S, FAILED_HOLD_S, "failed") is None:
            run.note = f"GPU {failed[0]} has failed: {faults[failed[0]]}"
            for rank in run.ranks.values():
                rank.failed = run.note

    def before_suspend(self, lease: Lease, run: JobRun) -> None:
        """Have a job that has just yielded save a checkpoint if its last one is old; Slurm suspends it after that."""
        # Slurm's preemption kills a suspended job without a signal (slurm.conf(5), PreemptMode), and with it the steps
        # since then. The ranks of several hosts stand at one boundary, but would have to save together.
        period_s = self.host.settings.agent.save_before_suspend_s
        fresh = run.saved_at is not None and self.host.clock.monotonic() - run.saved_at < period_s
        if period_s and not fresh and lease.state == "yielded" and lease.hosts == 1:
            self.save(lease, SAVE_S, 0.0, "preemption")

    def spill(self, lease: Lease, reason: str) -> None:
        """Have the ranks of a job that is out move their state from host memory to their disk."""
        run, number = self.host.run(lease.key), self.host.next_order()
        run.eviction = Eviction(reason, self.host.clock.monotonic(), set(run.ranks))
        for rank in run.ranks.values():
            self.host.outbox.post(rank.session, "spill", order=number)
        log.warning("spill JOBID=%s order=%d: %s", lease.key, number, reason)

    def spilled(self, lease: Lease, rank: Rank, message: Spilled) -> None:
        """Record that a rank's state is on disk; one that could not move it is not asked again."""
        run = self.host.run(lease.key)
        if run.eviction is None or rank.pid not in run.eviction.spilling:
            return
        rank.on_disk, result = True, f"its state is on disk: {run.eviction.reason}"
        if message.error:
            result = f"rank {rank.hello.rank} could not move its state to disk: {message.error}"
            run.spilled_from_mb = 0
        run.note = result
        log.info("spilled JOBID=%s rank=%d seconds=%.1f: %s", lease.key, rank.hello.rank, message.seconds, result)
        run.eviction.spilling.discard(rank.pid)
        if not run.eviction.spilling:
            run.eviction = None
