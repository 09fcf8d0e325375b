"""Yield and resume of one job on this host: the protocol between the lease book and the job's ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.sidecar import orders
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.ipc.messages import Arrived, Resumed, Yielded
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank, Resume, Saving, Stop
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns import checkpoint_stop as saving
from cadenza.sidecar.agent.turns import unleased_ranks
from cadenza.sidecar.stop_step import Cancel, Commit, Plan, Raise, plan_stop

log = logging.getLogger(__name__)

RETRY_S = 15.0
"""How long a job whose stop failed is left alone."""
STEPS_SPACING_S = 0.05
"""Least time between two messages that only tell of a multi-node job's progress."""
REMOTE_EXTRA_S = 5.0
"""How much longer an agent waits for the service's word on a multi-node stop than the service's time-out."""


@dataclass
class StopCoordinator:
    """Carries out orders; every method runs in the event loop's thread and returns at once."""

    host: Host
    free_memory: Callable[[], int]
    """Bytes of host memory that can be taken now."""
    driver: DriverController | None = None
    """Takes over where ranks cannot stop by themselves; see ``driver.endings`` for how it comes back."""

    # --- yield ---------------------------------------------------------------------------------------------

    def stop(self, lease: Lease, origin: str, timeout_s: float, terms: Saving | None = None) -> str:
        """Ask a holder to yield, or with ``terms`` to save a checkpoint; return why that cannot be, else nothing."""
        run = self.host.run(lease.key)
        if lease.state != "held":
            return f"its lease is {lease.state}"
        if run.resume is not None:
            return "it is still taking its state back"
        if why := run.why_not_ready(lease, self.host.clock.monotonic()):
            return why
        if terms is not None and (missing := run.unattached(lease)):
            return missing
        if terms is not None and not run.saves:
            return "not all its ranks can save a checkpoint: see client.checkpoint()"
        self.host.leases.stop(lease, self.host.clock.now())
        now, remote = self.host.clock.monotonic(), lease.hosts > 1
        run.stop = Stop(self.host.next_order(), origin, now, timeout_s, remote=remote, seen_at=now, saving=terms)
        log.info("stop JOBID=%s by=%s order=%d", lease.key, origin, run.stop.order)
        if run.unattached(lease):
            self._freeze(lease, run.stop)
        else:
            self.tick(lease)
        return ""

    def _freeze(self, lease: Lease, stop: Stop) -> None:
        """Hand a stop to the driver path."""
        stop.committed, stop.boundary_s = True, self.host.clock.monotonic() - stop.began
        if self.driver is not None:
            self.driver.freeze(lease)

    def tick(self, lease: Lease) -> None:
        """Move a stop under way on, by what the ranks' pages and messages say."""
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None:
            unleased_ranks.gather(self, lease, run)
            return
        if stop.committed:
            saving.tick(self, lease, stop)
            return
        now = self.host.clock.monotonic()
        seen = tuple(rank.progress for rank in run.ranks.values())
        if seen != stop.seen:
            stop.seen, stop.seen_at = seen, now
        plan = plan_stop(
            seen,
            stop=stop.step,
            waited_s=now - stop.began,
            timeout_s=stop.timeout_s + REMOTE_EXTRA_S * stop.remote,
            quiet_s=now - stop.seen_at,
        )
        if stop.remote:
            self._follow_remote(lease, stop, plan)
        else:
            self._follow(lease, stop, plan)

    def _follow(self, lease: Lease, stop: Stop, plan: Plan) -> None:
        """Do what the plan for a job of this host alone says."""
        run = self.host.run(lease.key)
        if isinstance(plan, Raise):
            self.stop_at(lease, plan.step)
        elif isinstance(plan, Cancel) and plan.kind == "refused" and stop.saving is None and run.may_freeze(lease):
            log.info("left to the driver JOBID=%s: %s", lease.key, plan.reason)
            self._freeze(lease, stop)
        elif isinstance(plan, Cancel):
            self.cancel(lease, plan.kind, plan.reason)
        elif isinstance(plan, Commit) and (short := self._short_of_memory(run)):
            self.cancel(lease, "refused", short)
        elif isinstance(plan, Commit):
            self._commit(run, stop)

    def _follow_remote(self, lease: Lease, stop: Stop, plan: Plan) -> None:
        """Multi-node: bring the ranks of this host together, and leave the rest to the service."""
        if isinstance(plan, Cancel) and plan.kind == "timeout":
            self.cancel(lease, plan.kind, plan.reason)
            return
        if isinstance(plan, Raise) and stop.asked:
            self.stop_at(lease, plan.step)
        refused = plan.reason if isinstance(plan, Cancel) else ""
        if isinstance(plan, Commit):
            refused = self._short_of_memory(self.host.run(lease.key))
        self._tell_steps(lease, stop, stop.standing(plan), refused)

    def _tell_steps(self, lease: Lease, stop: Stop, standing: tuple[int, bool], refused: str) -> None:
        """Tell the service how far this host is, when that changed; mere progress not too often."""
        now = self.host.clock.monotonic()
        news = (*standing, refused)
        if news == stop.told:
            return
        if stop.told and news[1:] == stop.told[1:] and now - stop.told_at < STEPS_SPACING_S:
            return
        stop.told, stop.told_at = news, now
        self.host.upward.append(
            orders.Steps(
                v=orders.VERSION,
                host=self.host.name,
                job=lease.job,
                restart=lease.restart,
                highest=standing[0],
                arrived=standing[1],
                refused=refused,
            )
        )

    def asked(self, lease: Lease, step: int) -> None:
        """Multi-node: the service names the stop step."""
        run = self.host.run(lease.key)
        if run.stop is not None:
            run.stop.asked = max(run.stop.asked, step)
            self.stop_at(lease, step)

    def stop_at(self, lease: Lease, step: int) -> None:
        """Tell all ranks the stop step; one that waits below it goes on."""
        run = self.host.run(lease.key)
        if run.stop is None or run.stop.committed or step <= run.stop.step:
            return
        run.stop.step = step
        for rank in run.ranks.values():
            self._tell_stop(rank, run.stop)

    def _tell_stop(self, rank: Rank, stop: Stop) -> None:
        """Write the stop to one rank's page and say it on its socket."""
        if rank.arrived is not None and rank.arrived < stop.step:
            rank.arrived = None
        rank.page.order(stop.order, stop.step, stop.purpose)
        self.host.outbox.post(rank.session, "stop", order=stop.order, step=stop.step)

    def _short_of_memory(self, run: JobRun) -> str:
        """Return why the host cannot take the state of a job that has arrived; empty when it can."""
        needed = sum(rank.bytes for rank in run.ranks.values())
        stops = [other.stop for other in self.host.jobs.values() if other.stop is not None]
        promised = sum(stop.bytes for stop in stops if stop.committed)
        free = self.free_memory() - promised
        if not needed or needed * self.host.settings.memory_margin <= free:
            return ""
        return (
            f"host memory: its state takes {needed >> 20} MB and {max(free, 0) >> 20} MB are free "
            f"(margin {self.host.settings.memory_margin:g})"
        )

    def commit(self, lease: Lease) -> None:
        """Multi-node: the service says that all hosts have arrived."""
        run = self.host.run(lease.key)
        if run.stop is not None and not run.stop.committed:
            self._commit(run, run.stop)

    def _commit(self, run: JobRun, stop: Stop) -> None:
        """Let all ranks move their state out; from here on there is no way back but a resume."""
        stop.committed = True
        stop.boundary_s = self.host.clock.monotonic() - stop.began
        stop.bytes = sum(rank.bytes for rank in run.ranks.values())
        for rank in run.ranks.values():
            self.host.outbox.post(rank.session, "commit", order=stop.order)

    def cancel(self, lease: Lease, kind: str, reason: str) -> None:
        """Withdraw a stop; the job keeps its lease and is left alone for a while."""
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None or stop.committed:
            return
        self.end_stop(lease, run, kind, reason)
        run.note = reason
        run.retry_at = self.host.clock.monotonic() + RETRY_S
        if lease.occupying:
            self.host.leases.keep(lease, self.host.clock.now())
        for rank in run.ranks.values():
            rank.arrived, rank.refused = None, ""
            rank.page.order(stop.order, 0)
            self.host.outbox.post(rank.session, "cancel", order=stop.order, reason=reason)
        self.resume(lease, run)
        log.info("stop withdrawn JOBID=%s %s: %s", lease.key, kind, reason)

    def arrived(self, lease: Lease, rank: Rank, message: Arrived) -> None:
        """Note that a rank stands at a boundary; one that comes too late is sent on."""
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None or message.order != stop.order or stop.committed:
            log.debug("late arrival JOBID=%s rank=%d", lease.key, rank.hello.rank)
            self.host.outbox.post(rank.session, "cancel", order=message.order, reason="this stop is over")
            return
        rank.bytes, rank.refused = message.bytes, message.refused
        if message.step < stop.step:
            self._tell_stop(rank, stop)
            return
        rank.arrived = message.step
        self.tick(lease)

    def yielded(self, lease: Lease, rank: Rank, message: Yielded) -> None:
        """Note that a rank's GPU memory is free; the lease goes when all have said so."""
        run = self.host.run(lease.key)
        rank.out, rank.arrived = not message.error, None
        if message.error:
            log.warning("yield failed JOBID=%s rank=%d: %s", lease.key, rank.hello.rank, message.error)
        stop = run.stop
        if run.driver:
            return
        if stop is not None and stop.committed:
            stop.copy_s = max(stop.copy_s, message.copy_s)
            if message.resident:
                run.note = f"rank {rank.hello.rank} keeps on the GPU: {', '.join(message.resident)}"
            if message.error:
                self.undo(lease, run, message.error)
            else:
                self.settle(lease)
        elif lease.state == "held":
            self.resume(lease, run)

    def joined(self, lease: Lease, rank: Rank) -> None:
        """Bring a rank that has just attached, perhaps not for the first time, to where its job is."""
        run = self.host.run(lease.key)
        if not rank.hello.again:
            self._begins(lease, run)
        said_out = rank.hello.state == "yielded"
        rank.out = said_out or not (lease.occupying or rank.hello.in_step)
        if not rank.out:
            self.gone_from_resume(lease, rank.pid)
        stop = run.stop
        if run.driver:
            return
        if stop is None:
            if lease.occupying:
                self.resume(lease, run)
        elif not stop.committed:
            if stop.step:
                self._tell_stop(rank, stop)
        elif said_out:
            self.settle(lease)
        else:
            self.undo(lease, run, f"rank {rank.hello.rank} lost its connection and went on")

    def _begins(self, lease: Lease, run: JobRun) -> None:
        """Forget what the client before it could not do, and a stop at a step that only that one counted."""
        self.cancel(lease, "refused", "its process attached anew")
        run.retry_at = 0.0

    def undo(self, lease: Lease, run: JobRun, reason: str) -> None:
        """End a stop that failed half way: those who moved out come back, the job keeps its lease."""
        saving.send_on(self, run, reason)
        self.end_stop(lease, run, "refused", reason)
        run.note = reason
        run.retry_at = self.host.clock.monotonic() + RETRY_S
        if lease.occupying:
            self.host.leases.keep(lease, self.host.clock.now())
        for rank in run.ranks.values():
            rank.page.order(0, 0)
        self.resume(lease, run)

    def settle(self, lease: Lease) -> None:
        """Take the lease when every rank that is left has moved its state out."""
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None or not stop.committed or run.driver:
            return
        if stop.saving is not None:
            saving.settle(self, lease, stop)
            return
        if not run.ranks:
            self.undo(lease, run, "all its processes ended while it yielded")
            return
        if not all(rank.out for rank in run.ranks.values()):
            return
        if self.driver is not None and self.driver.wanted_always and run.may_freeze(lease):
            self.driver.freeze(lease)
        else:
            self.release(lease, run, stop)

    def release(self, lease: Lease, run: JobRun, stop: Stop) -> None:
        """Take the lease of a job that uses its GPUs no more."""
        for rank in run.ranks.values():
            rank.page.order(stop.order, 0)
        self.end_stop(lease, run, "yield", run.note)
        if lease.occupying:
            self.host.ended_stretch(self.host.leases.release(lease, self.host.clock.now()))
        else:
            self.host.leases.set_aside(lease, self.host.clock.now())
        log.info(
            "yielded JOBID=%s gpus=%s boundary_s=%.3f copy_s=%.3f",
            lease.key, lease.gpus, stop.boundary_s, stop.copy_s,
        )  # fmt: skip

    def end_stop(self, lease: Lease, run: JobRun, kind: str, note: str) -> None:
        """Report a stop that is over."""
        stop, run.stop = run.stop, None
        if stop is not None:
            self.report_stop(lease, run, stop, kind, note)

    def report_stop(self, lease: Lease, run: JobRun, stop: Stop, kind: str, note: str) -> None:
        """Report how a stop went so far."""
        now = self.host.clock.monotonic()
        waited = stop.boundary_s if stop.committed else now - stop.began
        self.switched(lease, run, kind, (waited, stop.copy_s, now - stop.began), stop.bytes, note)

    def switched(
        self, lease: Lease, run: JobRun, kind: str, seconds: tuple[float, float, float], size: int, note: str
    ) -> None:
        """Tell the service how long a switch took: boundary, copy, total."""
        self.host.upward.append(
            orders.Switched(
                v=orders.VERSION,
                host=self.host.name,
                job=lease.job,
                restart=lease.restart,
                kind=kind,
                at_s=self.host.clock.now(),
                boundary_s=seconds[0],
                copy_s=seconds[1],
                total_s=seconds[2],
                bytes=size,
                iteration_p99_s=run.telemetry().iteration_p99_s,
                note=note,
            )
        )

    # --- resume --------------------------------------------------------------------------------------------

    def grant(self, lease: Lease) -> None:
        """Give a job its lease: waiting SPANK plugins and ranks hear of it once it is on disk."""
        self.host.leases.grant(lease, self.host.clock.now())
        run = self.host.run(lease.key)
        run.preferred_until = 0.0
        log.info("lease granted JOBID=%s gpus=%s managed=%s", lease.key, lease.gpus, lease.managed)
        for waiter in run.waiters:
            self.host.outbox.post(waiter.session, "lease", state="granted")
        run.waiters.clear()
        self.resume(lease, run)

    def resume(self, lease: Lease, run: JobRun) -> None:
        """Tell all ranks of a holder that are out, and have not been told yet, to take their state back.

        What the driver has of a job comes back first; it calls this again then.
        """
        if not lease.occupying:
            return
        if lease.frozen and self.driver is not None:
            self.driver.thaw(lease)
            return
        told = run.resume.pending if run.resume else set()
        out = {pid for pid, rank in run.ranks.items() if rank.out and rank.session is not None} - told
        if not out:
            return
        number = self.host.next_order()
        if run.resume is None:
            run.resume = Resume(self.host.clock.monotonic(), set())
        run.resume.pending |= out
        for pid in out:
            rank = run.ranks[pid]
            rank.page.order(number, 0)
            self.host.outbox.post(rank.session, "resume", order=number)
        log.info("resume JOBID=%s ranks=%d", lease.key, len(out))

    def resumed(self, lease: Lease, rank: Rank, message: Resumed) -> None:
        """Note that a rank has its state back."""
        run = self.host.run(lease.key)
        rank.out = False
        if run.resume is not None:
            run.resume.copy_s = max(run.resume.copy_s, message.copy_s)
            self.gone_from_resume(lease, rank.pid)

    def gone_from_resume(self, lease: Lease, pid: int) -> None:
        """Strike a rank off the resume under way, and report the resume when it was the last."""
        run = self.host.run(lease.key)
        resume = run.resume
        if resume is None:
            return
        resume.pending.discard(pid)
        if not resume.pending:
            run.resume = None
            total = self.host.clock.monotonic() - resume.began
            self.switched(lease, run, "resume", (0.0, resume.copy_s, total), 0, "")
