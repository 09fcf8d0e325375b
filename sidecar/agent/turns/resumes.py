"""The way back: a job gets its lease, and its ranks take their state back, all of them or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.ipc.messages import Resumed
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank, Resume
from cadenza.sidecar.agent.jobs.stop_states import Stop, YieldStop
from cadenza.sidecar.agent.leases.lease_table import Lease

log = logging.getLogger(__name__)


@dataclass
class Resumes:
    """Grants leases, and carries the resume of a holder's ranks from the order to their last answer."""

    host: Host
    driver: DriverController
    leave_gpus: Callable[[Lease, JobRun, Stop], None]
    """Ends the lease of a job whose ranks are out again; the stop coordinator's."""

    def grant(self, lease: Lease) -> None:
        """Give a job its lease: waiting SPANK plugins and ranks hear of it once it is on disk."""
        self.host.leases.grant(lease, self.host.clock.now())
        run = self.host.run(lease.key)
        run.preferred_until = 0.0
        self.host.taken = [taken for taken in self.host.taken if not (taken.early and taken.job == lease.job)]
        log.info("lease granted JOBID=%s gpus=%s managed=%s", lease.key, lease.gpus, lease.managed)
        # Slurm has started the job: its tasks wait in slurm_spank_task_init_privileged, before their exec.
        for waiter in run.waiters:
            self.host.outbox.post(waiter.session, "lease", state="granted")
        run.waiters.clear()
        self.resume(lease)

    def resume(self, lease: Lease) -> None:
        """Tell all ranks of a holder that are out, and have not been told yet, to take their state back.

        Processes that the driver path has frozen come back first; ``thawed`` calls this again then.
        """
        if not lease.occupying:
            return
        if lease.frozen:
            self.driver.thaw(lease)
            return
        run = self.host.run(lease.key)
        pending = run.resume.pending | run.resume.standing.keys() if run.resume else set()
        out = {pid for pid, rank in run.ranks.items() if rank.out and rank.session is not None} - pending
        if not out:
            return
        number = self.host.next_order()
        if run.resume is None:
            run.resume = Resume(self.host.clock.monotonic(), set(), together=run.may_resume_together(lease))
        run.resume.pending |= out
        for pid in out:
            rank = run.ranks[pid]
            rank.page.order(number, 0)
            self.host.outbox.post(rank.session, "resume", order=number, together=run.resume.together)
        log.info("resume JOBID=%s ranks=%d", lease.key, len(out))

    def resumed(self, lease: Lease, rank: Rank, message: Resumed) -> None:
        """Record that a rank has its state back; ``standing``: it runs on when the others have theirs."""
        run = self.host.run(lease.key)
        resume = run.resume
        if resume is not None:
            resume.copy_s = max(resume.copy_s, message.copy_s)
        if message.standing and resume is None:
            self.host.outbox.post(rank.session, "commit", order=message.order)
        elif message.standing and resume is not None:
            resume.leave(rank.pid)
            resume.standing[rank.pid] = message.order
            self.settle(lease, run, resume)
        else:
            rank.out, rank.failed, run.stuck = False, "", ""
            self.left(lease, rank.pid)

    def answered(self, lease: Lease, run: JobRun, rank: Rank) -> None:
        """Go on with a holder's rank that is out because its resume was withdrawn or the order is lost, or is not."""
        resume = run.resume
        if resume is not None:
            resume.leave(rank.pid)
        if resume is None or (rank.out and not resume.refused):
            self.resume(lease)
        else:
            self.settle(lease, run, resume)

    def left(self, lease: Lease, pid: int) -> None:
        """Take a rank out of the resume under way."""
        run = self.host.run(lease.key)
        if run.resume is not None:
            run.resume.leave(pid)
            self.settle(lease, run, run.resume)

    def settle(self, lease: Lease, run: JobRun, resume: Resume) -> None:
        """End a resume that all ranks have answered: the job runs, or gives its lease back as after a yield.

        It gives it back if the state of a rank cannot come back and no rank runs; ranks that stand move theirs out
        again before.
        """
        now = self.host.clock.monotonic()
        # A rank that runs waits in a collective for the others, which therefore try again.
        gives_back = bool(resume.refused) and lease.state == "held" and run.all_out_here(lease)
        # 1. Ranks that stand run on together, or move out again.
        for pid, order in (*resume.standing.items(),) if gives_back or not resume.pending else ():
            rank, rank.out = run.ranks[pid], gives_back
            resume.leave(pid)
            if gives_back:
                resume.pending.add(pid)
                self.host.outbox.post(rank.session, "cancel", order=order, reason=run.note)
            else:
                self.host.outbox.post(rank.session, "commit", order=order)
        if resume.pending:
            return
        # 2. All have answered.
        run.resume = None
        if gives_back:
            self.host.leases.stop(lease, self.host.clock.now())
            run.stop = YieldStop(0, resume.refused, now, 0.0, state="offloading")
            self.leave_gpus(lease, run, run.stop)
            return
        if not resume.refused:
            self.host.report_switch(lease, "resume", (0.0, resume.copy_s, now - resume.began))
        self.resume(lease)
