"""What becomes of a job's lease, its ranks and the service's books when the driver path is done with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.sidecar.agent.jobs.job_run import JobRun, Stop
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)


@dataclass
class Endings:
    """Ends stops and resumes that the driver carried out, in the coordinator's name."""

    coordinator: StopCoordinator

    def frozen(self, lease: Lease, seconds: float, nbytes: int, note: str) -> None:
        """Take the lease of a job that the driver has checkpointed; ranks at a boundary go on when CUDA does."""
        host = self.coordinator.host
        run = host.run(lease.key)
        run.note = note or f"checkpointed by the driver: {nbytes >> 20} MB in {seconds:.1f} s"
        if run.stop is None:  # it had its lease back, and the GPUs had no room
            host.leases.stop(lease, host.clock.now())
            run.stop = Stop(0, "driver", host.clock.monotonic(), 0.0, committed=True)
        run.stop.copy_s += seconds
        self._send_on(run, run.stop, run.note)
        self.coordinator.release(lease, run, run.stop)

    def not_frozen(self, lease: Lease, reason: str, retry_s: float) -> None:
        """Let a job run on that the driver could not checkpoint, unless its ranks have moved out by themselves."""
        host = self.coordinator.host
        run = host.run(lease.key)
        stop = run.stop
        if stop is None:
            return
        if run.ranks and all(rank.out for rank in run.ranks.values()):
            run.note = f"its CUDA contexts stay on the GPU: {reason}"
            self.coordinator.release(lease, run, stop)
            return
        self._send_on(run, stop, reason)
        self.coordinator.undo(lease, run, reason)
        run.retry_at = host.clock.monotonic() + retry_s
        log.info("stop withdrawn JOBID=%s driver: %s", lease.key, reason)

    def thawed(self, lease: Lease, seconds: float) -> None:
        """Go on with a job that the driver has restored."""
        run = self.coordinator.host.run(lease.key)
        run.note = ""
        self.coordinator.switched(lease, run, "resume", (0.0, seconds, seconds), 0, "restored by the driver")
        self.coordinator.resume(lease, run)

    def lost(self, lease: Lease, reason: str) -> None:
        """Report a job that cannot go on; it keeps its lease, because it may still have something of the GPUs."""
        host = self.coordinator.host
        run = host.run(lease.key)
        run.note = run.driver
        log.error("lost JOBID=%s: %s", lease.key, reason)
        if run.stop is not None:
            self.coordinator.end_stop(lease, run, "lost", reason)
            host.leases.keep(lease, host.clock.now())
        else:
            self.coordinator.switched(lease, run, "lost", (0.0, 0.0, 0.0), 0, reason)

    def _send_on(self, run: JobRun, stop: Stop, reason: str) -> None:
        """Send on the ranks that stand at a boundary for this stop."""
        for rank in run.ranks.values():
            if not rank.out:
                rank.arrived, rank.refused = None, ""
                self.coordinator.host.outbox.post(rank.session, "cancel", order=stop.order, reason=reason)
