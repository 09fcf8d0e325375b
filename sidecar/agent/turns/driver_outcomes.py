"""What becomes of a job's lease, its ranks and the service's books when the driver path is done with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.sidecar.agent.jobs.job_run import JobRun, Stop
from cadenza.sidecar.agent.leases.lease_table import Entry
from cadenza.sidecar.agent.turns.coordinator import Conductor

log = logging.getLogger(__name__)


@dataclass
class Endings:
    """Ends stops and resumes that the driver carried out, in the conductor's name."""

    conductor: Conductor

    def frozen(self, entry: Entry, seconds: float, nbytes: int, note: str) -> None:
        """Take the lease of a job that the driver has checkpointed; ranks at a boundary go on when CUDA does."""
        host = self.conductor.host
        run = host.run(entry.key)
        run.note = note or f"checkpointed by the driver: {nbytes >> 20} MB in {seconds:.1f} s"
        if run.stop is None:  # it had its lease back, and the GPUs had no room
            host.book.stop(entry, host.clock.now())
            run.stop = Stop(0, "driver", host.clock.monotonic(), 0.0, committed=True)
        run.stop.copy_s += seconds
        self._send_on(run, run.stop, run.note)
        self.conductor.release(entry, run, run.stop)

    def not_frozen(self, entry: Entry, reason: str, retry_s: float) -> None:
        """Let a job run on that the driver could not checkpoint, unless its ranks have moved out by themselves."""
        host = self.conductor.host
        run = host.run(entry.key)
        stop = run.stop
        if stop is None:
            return
        if run.ranks and all(rank.out for rank in run.ranks.values()):
            run.note = f"its CUDA contexts stay on the GPU: {reason}"
            self.conductor.release(entry, run, stop)
            return
        self._send_on(run, stop, reason)
        self.conductor.undo(entry, run, reason)
        run.retry_at = host.clock.monotonic() + retry_s
        log.info("stop withdrawn JOBID=%s driver: %s", entry.key, reason)

    def thawed(self, entry: Entry, seconds: float) -> None:
        """Go on with a job that the driver has restored."""
        run = self.conductor.host.run(entry.key)
        run.note = ""
        self.conductor.switched(entry, run, "resume", (0.0, seconds, seconds), 0, "restored by the driver")
        self.conductor.resume(entry, run)

    def lost(self, entry: Entry, reason: str) -> None:
        """Report a job that cannot go on; it keeps its lease, because it may still have something of the GPUs."""
        host = self.conductor.host
        run = host.run(entry.key)
        run.note = run.driver
        log.error("lost JOBID=%s: %s", entry.key, reason)
        if run.stop is not None:
            self.conductor.end_stop(entry, run, "lost", reason)
            host.book.keep(entry, host.clock.now())
        else:
            self.conductor.switched(entry, run, "lost", (0.0, 0.0, 0.0), 0, reason)

    def _send_on(self, run: JobRun, stop: Stop, reason: str) -> None:
        """Send on the ranks that stand at a boundary for this stop."""
        for rank in run.ranks.values():
            if not rank.out:
                rank.arrived, rank.refused = None, ""
                self.conductor.host.outbox.post(rank.session, "cancel", order=stop.order, reason=reason)
