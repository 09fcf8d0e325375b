"""Ends of a stop: the lease ends, the stop is withdrawn before its commit, or it fails after it and the job runs on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.policies.core.model import MAX_REFUSALS
from cadenza.policies.core.text import printable
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun
from cadenza.sidecar.agent.jobs.stop_states import CheckpointStop, Stop
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns.away_saves import AwaySaves
from cadenza.sidecar.agent.turns.resumes import Resumes
from cadenza.sidecar.bounds import MAX_TEXT

log = logging.getLogger(__name__)

TOLD_SURVEY_S = 0.01
"""A look at a rank's state that takes longer at the boundary is told with the yield: the GPU waits for it."""
RETRIES_S = (15.0, 60.0, 300.0, 1800.0)
"""Pause after a stop that failed, and after the second, third and each further one in a row, before the job is asked
again: a stop that fails late costs seconds of its GPUs' time."""
TURNS = frozenset({"service", "turn", "exclusive"})
"""Causes of a yield by which another job is to have the GPUs."""


@dataclass
class StopEnds:
    """Ends stops, each with its report to the service and to the job's output."""

    host: Host
    resumes: Resumes
    saves: AwaySaves

    def release(self, lease: Lease, run: JobRun, stop: Stop, event: str) -> None:
        """Take the lease of a job that uses its GPUs no more."""
        stop.move(event)
        run.stop, run.refusals = None, 0
        for rank in run.ranks.values():
            rank.page.order(stop.order, 0)
        surveyed = f"its state was found in {stop.survey_s * 1e3:.1f} ms" if stop.survey_s >= TOLD_SURVEY_S else ""
        self.report(lease, stop, "yield", "; ".join(filter(None, (run.note, surveyed))))
        stretch = stop.end(self.host.leases, lease, self.host.clock.now())
        if stretch is not None:
            self.host.report_stretch(stretch)
        log.info(
            "yielded JOBID=%s gpus=%s boundary_s=%.3f survey_s=%.3f copy_s=%.3f",
            lease.key, lease.gpus, stop.boundary_s, stop.survey_s, stop.copy_s,
        )  # fmt: skip
        self.saves.before_suspend(lease, run)

    def withdraw(self, lease: Lease, kind: str, reason: str, *, counts: bool = True) -> None:
        """End a stop before its commit; the job runs on and is left alone for a while.

        That ``counts`` as refused, unless the ranks came to no boundary at which a checkpoint can be saved.
        """
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None or stop.committed:
            return
        passed = run.passed
        run.refusals += counts and not passed
        reason = f"no save point: {passed} ({reason})" if passed else reason
        stop.move("withdraw")
        self.send_on(run, stop, reason)
        self._end_failed(lease, run, stop, kind, reason)
        log.info("stop withdrawn JOBID=%s %s: %s", lease.key, kind, reason)

    def run_on(self, lease: Lease, run: JobRun, event: str, reason: str) -> None:
        """End a stop that was committed: ranks that moved out come back, and the job keeps its lease."""
        stop = run.stop
        if stop is None:
            return
        stop.move(event)
        if isinstance(stop, CheckpointStop):
            self.send_on(run, stop, reason)
        if event == "go on":  # its checkpoint was complete and is reported: nothing failed
            run.stop, run.note = None, reason
            stop.give_back(self.host.leases, lease, self.host.clock.now())
            log.info("goes on JOBID=%s: %s", lease.key, reason)
            return
        for rank in run.ranks.values():
            rank.page.order(0, 0)
        self._end_failed(lease, run, stop, "refused", reason)
        log.warning("stop failed JOBID=%s refusals=%d: %s", lease.key, run.refusals, reason)

    def go_on(self, lease: Lease, reason: str) -> None:
        """Let a job that stands after its checkpoint train on; any other is not affected."""
        run = self.host.run(lease.key)
        if run.checkpointed:
            self.run_on(lease, run, "go on", reason)

    def send_on(self, run: JobRun, stop: Stop, reason: str, *, staying: bool = False) -> None:
        """Tell ranks at a boundary, or on their way to it, that this stop is over; ``staying``: unless they are out."""
        for rank in run.ranks.values():
            if staying and rank.out:
                continue
            rank.arrived, rank.refused = None, ""
            rank.page.order(stop.order, 0)
            self.host.outbox.post(rank.session, "cancel", order=stop.order, reason=reason)

    def _end_failed(self, lease: Lease, run: JobRun, stop: Stop, kind: str, reason: str) -> None:
        """Report a stop that failed, to the job's output too, and let the job run."""
        self.report(lease, stop, kind, reason)
        run.stop, run.note = None, reason
        now, pause_s = self.host.clock.monotonic(), RETRIES_S[min(max(run.refusals, 1), len(RETRIES_S)) - 1]
        if isinstance(stop, CheckpointStop):
            run.save_retry_at = now + RETRIES_S[0]
            run.retry_at = max(run.retry_at, run.save_retry_at)
        else:
            run.retry_at = now + pause_s
            self._tell_owner(run, stop, reason, pause_s)
        stop.give_back(self.host.leases, lease, self.host.clock.now())
        self.resumes.resume(lease)

    def _tell_owner(self, run: JobRun, stop: Stop, reason: str, pause_s: float) -> None:
        """Have one rank write to the job's output why it keeps its GPUs although its turn is over."""
        rank = min(run.connected, key=lambda rank: rank.hello.rank, default=None)
        if rank is None or stop.origin not in TURNS:
            return
        more = " From now on it counts as one that cannot be stopped." if run.refusals == MAX_REFUSALS else ""
        text = f"this job keeps its GPUs although others wait: {reason} (next try in {pause_s:.0f} s).{more}"
        self.host.outbox.post(rank.session, "note", text=printable(text, MAX_TEXT))

    def report(self, lease: Lease, stop: Stop, kind: str, note: str) -> None:
        """Report the times of a stop so far."""
        total = self.host.clock.monotonic() - stop.began
        self.host.report_switch(lease, kind, (stop.boundary_s or total, stop.copy_s, total), stop.bytes, note)
