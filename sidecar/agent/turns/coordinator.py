"""The stop coordinator: carries a job's turn from the order to stop to its next resume, on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.policies.core.text import printable
from cadenza.sidecar import orders
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.ipc.messages import Arrived, Checkpointed, Yielded
from cadenza.sidecar.agent.jobs.host_state import MEMORY_MARGIN, Host
from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank, Resume
from cadenza.sidecar.agent.jobs.stop_states import AwayStop, CheckpointStop, Stop, UnleasedStop, YieldStop
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.telemetry.gpu_watch import NO_LOOK, GpuWatch, Look
from cadenza.sidecar.agent.turns import gpu_room
from cadenza.sidecar.agent.turns.away_saves import FAILED_HOLD_S, FAILED_SAVE_S, AwaySaves
from cadenza.sidecar.agent.turns.gpu_room import may_keep
from cadenza.sidecar.agent.turns.resumes import Resumes
from cadenza.sidecar.agent.turns.stop_ends import RETRIES_S, TURNS, StopEnds
from cadenza.sidecar.bounds import MAX_NUMBER, MAX_TEXT
from cadenza.sidecar.stop_step import Cancel, Commit, Plan, Raise

log = logging.getLogger(__name__)

MEASURE_S = 1.0
"""Longest wait for the driver's look at the ranks' memory before they move it out, in seconds."""
LEAVE_S = 5.0
"""Longest time until the driver must see that a job has left its GPUs, after all its ranks say so."""
STEPS_SPACING_S = 0.05
"""Least time between two messages that only report a multi-node job's progress."""


@dataclass
class StopCoordinator:
    """Carries out orders; every method runs in the event loop's thread and returns at once.

    Messages only record facts. ``advance`` draws the conclusions, in each pass of the event loop.
    """

    host: Host
    free_memory: Callable[[], int]
    """Returns the bytes of host memory that can be taken now."""
    driver: DriverController
    """Takes over where ranks cannot stop by themselves; see *results of the driver path* below."""
    gpus: GpuWatch | None = None
    """Names the processes on the GPUs, where there is a driver."""

    def __post_init__(self) -> None:
        self.driver.ends = self
        self.saves = AwaySaves(self.host)
        self.resumes = Resumes(self.host, self.driver, self._leave_gpus)
        self.ends = StopEnds(self.host, self.resumes, self.saves)

    def stop(
        self,
        lease: Lease,
        origin: str,
        timeout_s: float,
        checkpoint: tuple[float, float] | None = None,
        goal: str = "",
    ) -> str | None:
        """Ask a holder to yield, or to save a checkpoint; return the reason if that is refused.

        ``checkpoint`` has the longest times for saving, and for the requeue after it; ``goal`` says what the job does
        then, for its own output.
        """
        run, now = self.host.run(lease.key), self.host.clock.monotonic()
        if lease.state != "held":
            return f"its lease is {lease.state}"
        if run.resume is not None:
            return "it is still taking its state back"
        if reason := run.unsavable_reason(lease, now) if checkpoint else run.not_ready_reason(lease, now):
            return reason
        if checkpoint and run.unrestored:
            return f"{run.unrestored}: it is not moved again"
        if checkpoint and not run.can_checkpoint:
            return "not all its ranks can save a checkpoint: see client.checkpoint()"
        self.host.leases.stop(lease, self.host.clock.now())
        number, multi_node = self.host.next_order(), lease.hosts > 1
        if checkpoint:
            save_s, hold_s = checkpoint
            patience_s = max(timeout_s, run.save_point_s)
            run.stop = CheckpointStop(
                number, origin, now, patience_s, multi_node=multi_node, save_s=save_s, hold_s=hold_s, goal=goal
            )
        else:
            run.stop = YieldStop(number, origin, now, timeout_s, multi_node=multi_node)
        log.info("stop JOBID=%s by=%s order=%d", lease.key, origin, number)
        if run.unattached_reason(lease):
            self._freeze(lease, run.stop)
        return None

    def advance(self, lease: Lease) -> None:
        """Move a job's turn on, from the order to stop to the end of its lease; called in each pass of the event loop.

        The next turn begins where the arbiter finds the GPUs free: see ``Resumes``.
        """
        run = self.host.run(lease.key)
        # 1. Ranks that run without a lease get a stop of their own; a job that is out saves if its GPUs have failed.
        if run.stop is None and run.runs_unleased(lease):
            self._stop_unleased(lease, run)
        self.saves.if_gpus_failed(lease, run)
        stop = run.stop
        if stop is None or stop.state == "freezing":
            return
        # 2. The ranks train on until all of them stand at one boundary.
        if not stop.committed:
            self._align(lease, run, stop)
        # 3. Moving out, saving, or the requeue after it, may take too long; all processes may end.
        elif expiry := stop.on_timeout(self.host.clock.monotonic()):
            run.refusals += isinstance(stop, YieldStop)
            self.ends.run_on(lease, run, *expiry)
        elif not run.ranks and not run.checkpointed:
            self.ends.run_on(lease, run, "fail", f"all its processes ended while {stop.state}")
        # 4. All have saved their part: the job stands still for its requeue.
        elif isinstance(stop, CheckpointStop):
            if stop.saved_at is None and run.ranks.keys() <= stop.saved_pids:
                stop.move("all saved")
                stop.saved_at = run.saved_at = self.host.clock.monotonic()
                run.file_system = self.host.file_system_of(run, stop.paths)
                self.ends.report(lease, stop, "checkpoint", run.note)
                if run.followed:
                    self.host.upward.append(self.host.files(lease, stop.paths))
                log.info("checkpoint JOBID=%s save_s=%.3f bytes=%d", lease.key, stop.copy_s, stop.bytes)
        # 5. All have moved their state out: the lease ends, after the driver path took the rest where that is wanted.
        elif all(rank.out for rank in run.ranks.values()):
            self._leave_gpus(lease, run, stop)

    def _leave_gpus(self, lease: Lease, run: JobRun, stop: Stop) -> None:
        """Take the lease of a job whose ranks are out once the driver sees that too; otherwise the job keeps it."""
        if self.driver.wanted_always and run.may_freeze(lease):
            self._freeze(lease, stop)
            return
        # 1. What the driver shows that they keep, and if another job can use the rest.
        now, busy, useless = self.host.clock.monotonic(), "", ""
        kept = dict.fromkeys(lease.gpus, run.left_bytes // max(len(lease.gpus), 1))
        stop.out_at = now if stop.out_at is None else stop.out_at
        if self.gpus is not None and self.gpus.names_processes(lease.gpus):
            pids = membership.pids_of(lease)
            looked = self.gpus.busy(lease.gpus, {pid: may_keep(run.ranks.get(pid)) for pid in pids}, stop.out_at)
            busy = "the driver has not answered" if looked is None else looked
            kept = {gpu: self.gpus.last.bytes_of((gpu,), pids) for gpu in lease.gpus}
            useless = "" if busy else self._useless(lease, run, stop, kept)
        # 2. The lease ends, or the job keeps it.
        if useless:
            self.ends.run_on(lease, run, "fail", useless)
        elif not busy:
            stop.bytes = max(stop.bytes, sum(rank.moved for rank in run.ranks.values()))
            needs, run.out_at = self._needs(lease, run), stop.out_at
            lease.gpu_bytes = tuple(needs[gpu] for gpu in lease.gpus) if needs else ()
            lease.left_bytes = tuple(kept[gpu] for gpu in lease.gpus)
            self.ends.release(lease, run, stop, "all offloaded")
            if stop.origin == "failed":
                refusal = self.saves.save(lease, FAILED_SAVE_S, FAILED_HOLD_S, "failed")
                run.note = f"{run.note}; {refusal}" if refusal else run.note
        elif now - stop.out_at > LEAVE_S:
            run.refusals += 1
            self.ends.run_on(lease, run, "fail", f"its ranks say that they have yielded, but {busy}")

    def _needs(self, lease: Lease, run: JobRun) -> dict[int, int]:
        """Return the memory of each GPU that a job needs to go on, by its ranks' word; nothing if they have no GPU."""
        look = self.gpus.last if self.gpus is not None else NO_LOOK
        needs = dict.fromkeys(lease.gpus, 0)
        for rank in run.ranks.values():
            for sizes in (rank.needed, rank.regrown):
                for gpu, size in look.by_gpu(lease.gpus, rank.pid, sizes).items():
                    needs[gpu] = min(needs[gpu] + size, MAX_NUMBER)
        return needs if any(needs.values()) else {}

    def _useless(self, lease: Lease, run: JobRun, stop: Stop, kept: dict[int, int]) -> str:
        """Note what a job keeps while it is out; return why no job that waits can use the rest, else ""."""
        if self.gpus is None or stop.origin not in TURNS:
            return ""
        run.kept, run.kept_at = kept, self.host.clock.monotonic()
        return gpu_room.useless(lease, kept, self.gpus.last, self.host.leases, self.host.named)

    def _align(self, lease: Lease, run: JobRun, stop: Stop) -> None:
        """Bring all ranks to one boundary, and commit the stop there."""
        # 1. The ranks' progress decides on one stop step for all of them.
        progress = tuple(rank.progress for rank in run.ranks.values())
        plan = stop.plan(progress, self.host.clock.monotonic(), in_step=run.in_step)
        if isinstance(plan, Commit) and not self._measured(lease, stop):
            return
        shortage = self._memory_shortage(run) if isinstance(plan, Commit) else None
        useless = self._useless_move(lease, run, stop) if isinstance(plan, Commit) and not shortage else ""
        if isinstance(plan, Raise) and (stop.service_step or not stop.multi_node):
            self.raise_stop_step(lease, plan.step)
        # 2. A job on several hosts is led by the service, which learns this host's progress and sends the commit.
        if stop.multi_node and not (isinstance(plan, Cancel) and plan.kind == "timeout"):
            self._report_steps(lease, stop, plan, shortage or useless)
        # 3. A job whose ranks refuse is handed to the driver path, if that may help; any other runs on.
        elif isinstance(plan, Cancel) and plan.kind == "refused" and stop.driver_may_help and run.may_freeze(lease):
            log.info("left to the driver JOBID=%s: %s", lease.key, plan.reason)
            self._freeze(lease, stop)
        elif isinstance(plan, Cancel):
            self.ends.withdraw(lease, plan.kind, plan.reason)
        # 4. All have arrived: they move their state out or save it, if the host has memory for it, and it helps anyone.
        elif shortage:
            self.ends.withdraw(lease, "refused", shortage)
        elif useless and run.may_freeze(lease):
            log.info("left to the driver JOBID=%s: %s", lease.key, useless)
            self._freeze(lease, stop)
        elif useless:
            self.ends.withdraw(lease, "refused", useless, counts=False)
        elif isinstance(plan, Commit):
            self.commit(lease)

    # --- steps of a stop -----------------------------------------------------------------------------------

    def _stop_unleased(self, lease: Lease, run: JobRun) -> None:
        """Begin to stop ranks that run without a lease, once all of them are here; on several hosts nothing can."""
        now = self.host.clock.monotonic()
        holders = ", ".join(str(other.key) for other in self.host.leases.blockers(lease))
        loss = f"its lease was lost, and its GPUs went to {f'job {holders}' if holders else 'no other job yet'}"
        apart = lease.hosts > 1 or any(rank.out for rank in run.ranks.values())
        if apart or run.unattached_reason(lease) or run.not_ready_reason(lease, now):
            run.note = run.note or f"{loss}; it trains on without until it gets them"
            return
        run.note = f"{loss}; all its ranks stop at one boundary"
        log.warning("runs without a lease JOBID=%s: %s", lease.key, run.note)
        run.stop = UnleasedStop(self.host.next_order(), "unleased", now, self.host.facts.yield_timeout_s)

    def raise_stop_step(self, lease: Lease, step: int, *, by_service: bool = False) -> None:
        """Tell all ranks to stop at a later boundary; a rank that stands at an earlier one goes on."""
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None:
            return
        if by_service:
            stop.service_step = max(stop.service_step, step)
        if not stop.committed and step > stop.step:
            stop.move("raise stop step")
            stop.step = step
            for rank in run.ranks.values():
                self._tell_stop_step(rank, stop)

    def _tell_stop_step(self, rank: Rank, stop: Stop) -> None:
        """Write the stop step to one rank's page and send it on its socket."""
        if rank.arrived is not None and rank.arrived < stop.step:
            rank.arrived = None
        rank.page.order(stop.order, stop.step, stop.purpose)
        self.host.outbox.post(rank.session, "stop", order=stop.order, step=stop.step)

    def _report_steps(self, lease: Lease, stop: Stop, plan: Plan, shortage: str | None) -> None:
        """Tell the service the progress of this host if it changed; mere steps at most 20 times a second."""
        now = self.host.clock.monotonic()
        highest, arrived = stop.host_progress(plan)
        refused = shortage or (plan.reason if isinstance(plan, Cancel) else "")
        news = (highest, arrived, refused)
        if news == stop.sent or (stop.sent and news[1:] == stop.sent[1:] and now - stop.sent_at < STEPS_SPACING_S):
            return
        stop.sent, stop.sent_at = news, now
        self.host.upward.append(
            orders.Steps(
                v=orders.VERSION,
                host=self.host.name,
                job=lease.job,
                restart=lease.restart,
                highest=highest,
                arrived=arrived,
                refused=printable(refused, MAX_TEXT),
            )
        )

    def _memory_shortage(self, run: JobRun) -> str | None:
        """Return the reason if the host cannot take the state of a job that has arrived."""
        needed = sum(rank.bytes for rank in run.ranks.values())
        stops = [other.stop for other in self.host.jobs.values() if other.stop is not None]
        # Copies that are under way are not in the kernel's figure yet.
        free = self.free_memory() - sum(stop.bytes for stop in stops if stop.committed)
        if not needed or needed * MEMORY_MARGIN <= free:
            return None
        return (
            f"host memory: its state takes {needed >> 20} MB and {max(free, 0) >> 20} MB are free "
            f"(margin {MEMORY_MARGIN:g})"
        )

    def _measured(self, lease: Lease, stop: Stop) -> bool:
        """Return True once the driver has shown the memory of the ranks at their boundary, where it names processes."""
        if isinstance(stop, CheckpointStop) or self.gpus is None or not self.gpus.names_processes(lease.gpus):
            return True
        late = self.host.clock.monotonic() - stop.arrived_at > MEASURE_S
        return self.gpus.looked_since(stop.arrived_at, lease.gpus) or late

    def _look(self, lease: Lease, stop: Stop) -> Look | None:
        """Return the driver's look at the ranks since all stand at their boundary; None without."""
        if self.gpus is None or not self.gpus.names_processes(lease.gpus):
            return None
        return self.gpus.last if self.gpus.last.since_s(lease.gpus) > stop.arrived_at else None

    def _useless_move(self, lease: Lease, run: JobRun, stop: Stop) -> str:
        """Return why no job that waits could use what a yield of the ranks, which have arrived, would free; else ""."""
        look = self._look(lease, stop)
        if look is None or isinstance(stop, CheckpointStop) or (self.driver.wanted_always and run.may_freeze(lease)):
            return ""
        return self._useless(lease, run, stop, gpu_room.kept_by(lease, run, look))

    def commit(self, lease: Lease) -> None:
        """Let all ranks move their state out, or save it; from here on only a resume leads back.

        The driver's look since all stand at the boundary tells the memory of each rank that is not torch's.
        """
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None or stop.committed:
            return
        look = self._look(lease, stop)
        for rank in run.ranks.values():
            rank.beyond = look.beyond(lease.gpus, rank.pid, rank.held) if look else None
        stop.on_all_arrived(self.host.clock.monotonic())
        stop.bytes = sum(rank.bytes for rank in run.ranks.values())
        goal = stop.goal if isinstance(stop, CheckpointStop) else ""
        for rank in run.ranks.values():
            self.host.outbox.post(rank.session, "commit", order=stop.order, goal=goal)

    def _freeze(self, lease: Lease, stop: Stop) -> None:
        """Hand a stop to the driver path."""
        if not stop.committed:
            stop.boundary_s = self.host.clock.monotonic() - stop.began
        stop.move("hand to driver")
        self.driver.freeze(lease)

    # --- messages of the ranks -----------------------------------------------------------------------------

    def arrived(self, lease: Lease, rank: Rank, message: Arrived) -> None:
        """Record that a rank stands at a boundary; a rank that comes too late is sent on."""
        stop = self.host.run(lease.key).stop
        if stop is not None and message.order == stop.order and stop.state == "offloading" and not rank.out:
            self.host.outbox.post(rank.session, "commit", order=stop.order)  # an exception in its wait has lost it
            return
        if stop is None or message.order != stop.order or stop.committed:
            log.debug("late arrival JOBID=%s rank=%d", lease.key, rank.hello.rank)
            self.host.outbox.post(rank.session, "cancel", order=message.order, reason="this stop is over")
            return
        rank.bytes, rank.refused = message.bytes, message.refused
        rank.held, rank.stays = message.held_bytes, message.stays_bytes
        if rank.arrived is None:
            stop.arrived_at = self.host.clock.monotonic()
            if self.gpus is not None:
                # The switch waits for NVML's look, so that this one begins while other ranks still come.
                self.gpus.ask(lease.gpus)
        if message.step < stop.step:
            self._tell_stop_step(rank, stop)
        else:
            rank.arrived = message.step

    def yielded(self, lease: Lease, rank: Rank, message: Yielded) -> None:
        """Record that a rank's GPU memory is free, or that the move failed."""
        run = self.host.run(lease.key)
        stop = run.stop
        rank.out, rank.arrived, rank.on_disk = not message.error, None, False
        if message.bytes:  # a rank that says again that it is out has moved nothing since
            rank.moved, rank.left = message.bytes, message.left
            rank.needed, rank.regrown = message.needed_bytes, message.regrown_bytes
        if message.error:
            log.warning("yield failed JOBID=%s rank=%d: %s", lease.key, rank.hello.rank, printable(message.error))
        if run.driver:
            return
        if stop is not None and stop.committed:
            stop.copy_s = max(stop.copy_s, message.copy_s)
            stop.survey_s = max(stop.survey_s, message.survey_s)
            if message.resident:
                run.note = f"rank {rank.hello.rank} keeps on the GPU: {', '.join(message.resident)}"
            if message.error:
                run.refusals += 1
                self.ends.run_on(lease, run, "fail", message.error)
        elif lease.state == "held" and (message.no_room or message.failed):
            self._not_restored(lease, run, rank, message)
        elif lease.state == "held":
            self.resumes.answered(lease, run, rank)

    def _not_restored(self, lease: Lease, run: JobRun, rank: Rank, message: Yielded) -> None:
        """Note that a rank's state cannot come back to its GPU; see ``Resumes.settle`` for the job.

        A GPU that fails once more while other ranks have theirs back makes the job lost.
        """
        # 1. Say what is wrong: who has the memory of a GPU that is full, or the error of one that fails.
        repeated, rank.failed = bool(rank.failed), message.failed
        if message.failed:
            run.note = f"rank {rank.hello.rank} cannot use its GPU: {message.failed}"
            run.no_room, run.no_room_until = run.note, self.host.clock.monotonic() + FAILED_HOLD_S
        else:
            look, pids, named = self.gpus and self.gpus.last, membership.pids_of(lease), self.host.named
            others = "; ".join(filter(None, (look.keepers(gpu, pids, named) for gpu in lease.gpus))) if look else ""
            reason = f"{message.no_room}{f' ({others})' if others else ''}"
            run.note = f"rank {rank.hello.rank} waits for room on its GPU: {reason}"
        log.warning("not restored JOBID=%s gpus=%s: %s", lease.key, lease.gpus, run.note)
        # 2. The resume of all ranks has failed, once the others have answered.
        if repeated and message.failed and not run.all_out_here(lease):
            run.stuck = run.note
        if run.resume is None:
            run.resume = Resume(self.host.clock.monotonic(), set())
        run.resume.refused = "no room" if not message.failed else "failed again" if repeated else "failed"
        self.resumes.left(lease, rank.pid)

    def checkpointed(self, lease: Lease, rank: Rank, message: Checkpointed) -> None:
        """Record that a rank has saved its part; if one could not, the stop is over and the job runs on."""
        run = self.host.run(lease.key)
        stop = run.stop
        if not isinstance(stop, CheckpointStop) or message.order != stop.order or not stop.committed:
            self.host.outbox.post(rank.session, "cancel", order=message.order, reason="this stop is over")
            return
        if message.failure:
            reason = f"rank {rank.hello.rank} could not save a checkpoint: {message.failure}"
            self.ends.run_on(lease, run, "fail", reason)
            return
        stop.saved_pids.add(rank.pid)
        stop.paths = (*dict.fromkeys((*stop.paths, *message.paths)),)
        stop.saved_step = message.step
        stop.copy_s = max(stop.copy_s, message.seconds)
        stop.bytes = max(stop.bytes, message.bytes)
        run.note = f"checkpoint of step {message.step}: {', '.join(stop.paths)}"
        stop.lost_s = max(stop.lost_s, message.lost_s)
        if message.lost_s:
            run.note += f"; {message.lost_s:.0f} s of training since then are repeated"

    def joined(self, lease: Lease, rank: Rank) -> None:
        """Bring a rank that has just attached, perhaps not for the first time, to the state of its job."""
        run = self.host.run(lease.key)
        if not rank.hello.again:  # a new client: forget the failures of the one before, and a stop by its steps
            self.ends.withdraw(lease, "refused", "its process attached anew")
            run.retry_at = run.save_retry_at = 0.0
            run.kept = {}
        reported_out = rank.hello.state == "yielded"
        rank.out = reported_out or not (lease.occupying or rank.hello.in_step)
        if not rank.out:
            self.resumes.left(lease, rank.pid)
        stop = run.stop
        if run.driver:
            return
        if stop is None:
            self.resumes.resume(lease)
        elif not stop.committed:
            if stop.step:
                self._tell_stop_step(rank, stop)
        elif not reported_out or isinstance(stop, AwayStop):
            run.refusals += isinstance(stop, YieldStop)
            self.ends.run_on(lease, run, "fail", f"rank {rank.hello.rank} lost its connection and went on")

    # --- results of the driver path ------------------------------------------------------------------------

    def frozen(self, lease: Lease, seconds: float, nbytes: int, note: str) -> None:
        """Take the lease of a job that the driver has checkpointed; ranks at a boundary go on when CUDA does."""
        run = self.host.run(lease.key)
        run.note = note or f"checkpointed by the driver: {nbytes >> 20} MB in {seconds:.1f} s"
        if run.stop is None:  # it had its lease back, and the GPUs had no room
            self.host.leases.stop(lease, self.host.clock.now())
            run.stop = YieldStop(0, "driver", self.host.clock.monotonic(), 0.0, state="freezing")
        run.stop.copy_s += seconds
        self.ends.send_on(run, run.stop, run.note, staying=True)
        self.ends.release(lease, run, run.stop, "all checkpointed by driver")

    def not_frozen(self, lease: Lease, reason: str, retry_s: float) -> None:
        """Let a job run on that the driver could not checkpoint, unless its ranks have moved out by themselves."""
        run = self.host.run(lease.key)
        stop = run.stop
        if stop is None:
            return
        if run.ranks and all(rank.out for rank in run.ranks.values()):
            run.note = f"its CUDA contexts stay on the GPU: {reason}"
            self.ends.release(lease, run, stop, "all offloaded")
            return
        self.ends.send_on(run, stop, reason, staying=True)
        run.refusals += retry_s >= RETRIES_S[0]
        self.ends.run_on(lease, run, "fail", reason)
        now = self.host.clock.monotonic()
        run.retry_at = max(run.retry_at, now + retry_s) if retry_s >= RETRIES_S[0] else now + retry_s

    def thawed(self, lease: Lease, seconds: float) -> None:
        """Go on with a job that the driver has restored."""
        self.host.run(lease.key).note = ""
        self.host.report_switch(lease, "resume", (0.0, seconds, seconds), note="restored by the driver")
        self.resumes.resume(lease)

    def lost(self, lease: Lease, reason: str) -> None:
        """Report a job that cannot go on; it keeps its lease, because it may still use memory of the GPUs."""
        run = self.host.run(lease.key)
        stop, run.stop, run.note = run.stop, None, run.driver or ""
        log.error("lost JOBID=%s: %s", lease.key, reason)
        if stop is None:
            self.host.report_switch(lease, "lost", note=reason)
            return
        stop.move("lose")
        self.ends.report(lease, stop, "lost", reason)
        stop.give_back(self.host.leases, lease, self.host.clock.now())
