"""The driver path of the agent: one machine a job, between the leases, the stop coordinator and the helper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.driver import events, trial_record
from cadenza.sidecar.agent.driver.channel import Channel, Lost
from cadenza.sidecar.agent.driver.machine import Limits, Machine
from cadenza.sidecar.agent.driver.protocol import Call, Called, InspectCall, Inspection, Operation
from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.jobs.host_state import MEMORY_MARGIN, Host
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import GpuProcess, Lease

log = logging.getLogger(__name__)

RETRY_S = 15.0
RETRY_REFUSED_S = 300.0
RETRY_ABSENT_S = 2.0
"""Pause after a job could not be frozen: in general, if it must be left alone, and if no process of it is on its GPUs
yet."""
SWEEP_S = 1.0
"""Time between two searches for ended processes."""


class Outcomes(Protocol):
    """Receives the outcomes; the lease is its own."""

    def frozen(self, lease: Lease, seconds: float, nbytes: int, note: str) -> None:
        """Take the lease: all is in host memory. ``note`` is the reason if the job had the lease in vain."""
        ...

    def not_frozen(self, lease: Lease, reason: str, retry_s: float) -> None:
        """Let the job run on as before."""
        ...

    def thawed(self, lease: Lease, seconds: float) -> None:
        """Record that the job runs again, with its lease."""
        ...

    def lost(self, lease: Lease, reason: str) -> None:
        """Record that the job cannot go on; it keeps its lease until it ends or is requeued."""
        ...


@dataclass
class _Freeze:
    """One job that the driver path works on; monotonic time in seconds."""

    machine: Machine
    began: float
    inspection: int = 0
    """Number of the last inspection that was requested."""
    reported: str = ""
    """Outcome that the coordinator knows."""


@dataclass
class DriverController:
    """Carries out the machines' commands; lives in the event loop's thread and never waits.

    ``free_memory`` returns the free bytes of host memory.
    """

    host: Host
    free_memory: Callable[[], int]
    channel: Channel
    limits: Limits = field(default_factory=Limits)
    ends: Outcomes | None = None
    _jobs: dict[JobKey, _Freeze] = field(default_factory=dict)
    _asked: dict[int, tuple[JobKey, GpuProcess | None, Operation]] = field(default_factory=dict)
    """Job, process and operation by number of the request; an inspection has no process."""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _next_sweep: float = 0.0
    _objection: str | None = None
    """Reason against stopping jobs by this driver, which has to pass a trial; None before the first look."""

    @property
    def wanted(self) -> bool:
        """True if a helper has work, now or perhaps soon."""
        return self.host.settings.agent.driver_checkpoint != "off" or bool(self._jobs)

    @property
    def wanted_always(self) -> bool:
        """True if jobs that moved their state out by themselves are checkpointed as well."""
        return self.host.settings.agent.driver_checkpoint == "always"

    def recover(self) -> None:
        """Take over the jobs that an earlier agent worked on; the driver reports the state of each process."""
        for lease in self.host.leases:
            lease.frozen = tuple(one for one in lease.frozen if start_ticks(one.pid) == one.start_ticks)
            if lease.frozen:
                machine = Machine.recovered(lease.frozen, resting=not lease.occupying, limits=self.limits)
                self._begin(lease, machine)
                log.info("driver path: recovered JOBID=%s processes=%d", lease.key, len(lease.frozen))

    def freeze(self, lease: Lease) -> None:
        """Stop a job whose lease is *stopping*."""
        self._begin(lease, Machine(self.limits))

    def thaw(self, lease: Lease) -> None:
        """Bring back a job that has its lease, unless it is already on its way."""
        job = self._jobs.get(lease.key)
        if job is not None and job.reported == "frozen":
            job.reported, job.began = "", self.host.clock.monotonic()
            self._advance(lease, job, events.Thaw())

    def _begin(self, lease: Lease, machine: Machine) -> None:
        job = self._jobs[lease.key] = _Freeze(machine, self.host.clock.monotonic())
        job.reported = "frozen" if machine.resting else ""
        self._advance(lease, job, events.Tick())

    # --- the loop ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take in answers and the passing of time."""
        for answer in self.channel.receive():
            self._take(answer)
        if self.wanted and (lost := self.channel.keep_up()):
            self._take(lost)
        now = self.host.clock.monotonic()
        sweeping = now >= self._next_sweep
        if sweeping:
            self._next_sweep = now + SWEEP_S
        if self.channel.ready and (sweeping or self._objection is None):
            self._look_at_trial()
        for key, job in tuple(self._jobs.items()):
            lease = self.host.leases.get(key)
            if lease is None:
                self._forget(key, job)
                continue
            with self.host.supervise(key, "its stop by the driver"):
                self._move_on(lease, job, sweeping=sweeping)
        # Each job's run shows its readiness for this path, and the work on it.
        usable = self.host.settings.agent.driver_checkpoint != "off" and self.channel.ready and self._objection == ""
        for lease in self.host.leases:
            run, own = self.host.run(lease.key), self._jobs.get(lease.key)
            # A lock waits for collectives with processes on other hosts, whose drivers this agent cannot call.
            run.freezable = usable and lease.hosts == 1
            run.driver = _work(own)
            run.lost = own.machine.reason if own is not None and own.machine.lost else ""

    def _look_at_trial(self) -> None:
        """Look at the record of the trial; jobs that are frozen come back whatever it says."""
        objection = trial_record.objection(self.channel.lock.parent, self.channel.driver)
        if objection and objection != self._objection:
            log.warning("driver path: off: %s", objection)
        self._objection = objection

    def _move_on(self, lease: Lease, job: _Freeze, *, sweeping: bool) -> None:
        """Take in the passing of time for one job, and the ends of its processes."""
        targets = [member.target for member in job.machine.members.values()]
        for target in targets if sweeping else ():
            # Pids are used again: only the start time tells that this is still the process which was locked.
            if start_ticks(target.pid) != target.start_ticks:
                self._advance(lease, job, events.Ended(target.pid))
        self._advance(lease, job, events.Tick())

    def _forget(self, key: JobKey, job: _Freeze) -> None:
        """Forget a job that has left; its locked processes are unlocked, so that they can end."""
        del self._jobs[key]
        for member in job.machine.members.values():
            if member.state == "locked" and member.busy is None:
                self._call(key, member.target, "unlock")

    @property
    def lack(self) -> str:
        """The reason why this path is on and cannot be used; otherwise empty."""
        mode = self.host.settings.agent.driver_checkpoint
        problem = self._objection if self.channel.ready else self.channel.problem
        return f"driver_checkpoint = {mode}: {problem}" if mode != "off" and problem else ""

    def flush(self) -> None:
        """Send the helper its requests, now that the leases are on disk."""
        if lost := self.channel.flush():
            self._take(lost)

    def close(self) -> None:
        """Leave; the helper unlocks locked processes."""
        self.channel.close()

    # --- between machine and helper ------------------------------------------------------------------------

    def _take(self, answer: Inspection | Called | Lost) -> None:
        """Give an answer to the machine that asked; the loss of the helper concerns all."""
        if isinstance(answer, Lost):
            self._asked.clear()
            for key, job in tuple(self._jobs.items()):
                self._to(key, job, events.HelperLost(answer.reason))
            return
        asked = self._asked.pop(answer.id, None)
        if asked is None:
            return
        key, target, operation = asked
        asker = self._jobs.get(key)
        if asker is None:  # its job has left; a process that was locked too late may still have to end
            if target is not None and operation in {"lock", "restore"} and not getattr(answer, "error", ""):
                self._call(key, target, "unlock")
        elif isinstance(answer, Inspection):
            refused = answer.refused
            if not refused and not asker.machine.inspected:
                refused = self._memory_shortage(answer) or ""
            if answer.id == asker.inspection:
                self._to(key, asker, events.Inspected(answer.processes, dict(answer.free), refused))
        elif target is not None:
            answered = events.Answered(target.pid, operation, answer.state, answer.error)
            self._to(key, asker, events.Ended(target.pid) if answer.gone else answered)

    def _to(self, key: JobKey, job: _Freeze, event: events.Event) -> None:
        lease = self.host.leases.get(key)
        if lease is not None:
            self._advance(lease, job, event)

    def _memory_shortage(self, inspection: Inspection) -> str | None:
        """Return the reason if the host, or the job's limit, cannot take the GPUs' memory."""
        needed = sum(size for one in inspection.processes for _, size in one.gpu_bytes)
        stops = [run.stop for run in self.host.jobs.values() if run.stop is not None and run.stop.committed]
        free = self.free_memory() - sum(stop.bytes for stop in stops)
        takes = f"its GPU memory takes {needed >> 20} MB (margin {MEMORY_MARGIN:g})"
        if needed * MEMORY_MARGIN > free:
            return f"host memory: {takes} and {max(free, 0) >> 20} MB are free"
        # The driver copies into the process itself, so the copy counts against the job's limit.
        if inspection.headroom is not None and needed * MEMORY_MARGIN > inspection.headroom:
            return f"host memory: {takes} and the job's limit leaves {max(inspection.headroom, 0) >> 20} MB"
        return None

    def _advance(self, lease: Lease, job: _Freeze, event: events.Event) -> None:
        """Move a machine on, carry out its commands, and report its outcome."""
        commands = job.machine.advance(event, self.host.clock.monotonic())
        self._record_targets(lease, job.machine)
        self.host.run(lease.key).driver = _work(job)
        for command in commands:
            if isinstance(command, events.Operate):
                self._call(lease.key, job.machine.members[command.pid].target, command.operation)
            elif isinstance(command, events.Inspect):
                job.inspection = self._number(lease.key, None, "state")
                pids = tuple(sorted(membership.pids_of(lease)))
                self.channel.ask(InspectCall(job.inspection, lease.uid, lease.gpus, pids))
            else:
                self._take(self.channel.end(command.reason))
                return
        self._report(lease, job)

    def _record_targets(self, lease: Lease, machine: Machine) -> None:
        """Record the processes, so that they are on disk before any operation on them."""
        targets = tuple(one.target for one in machine.members.values())
        if machine.outcome == "running":
            targets = ()
        if targets == lease.frozen:
            return
        stop = self.host.run(lease.key).stop
        if stop is not None and not lease.frozen:
            stop.bytes += sum(one.nbytes for one in machine.members.values())
        lease.frozen = targets
        self.host.leases.touch()

    def _call(self, key: JobKey, target: GpuProcess, operation: Operation) -> None:
        number = self._number(key, target, operation)
        timeout_ms = int(self.limits.lock_s * 1000) if operation == "lock" else 0
        self.channel.ask(Call(number, operation, target.pid, target.start_ticks, timeout_ms))

    def _number(self, key: JobKey, target: GpuProcess | None, operation: Operation) -> int:
        number = next(self._numbers)
        self._asked[number] = (key, target, operation)
        return number

    def _report(self, lease: Lease, job: _Freeze) -> None:
        """Report an outcome to the coordinator, once."""
        outcome = job.machine.outcome
        if outcome in {"", job.reported} or self.ends is None:
            return
        job.reported = outcome
        seconds = self.host.clock.monotonic() - job.began
        reason = job.machine.reason
        log.info("driver path: %s JOBID=%s in %.3f s %s", outcome, lease.key, seconds, reason)
        if outcome == "running":
            del self._jobs[lease.key]
            self.host.run(lease.key).driver = None
        if outcome == "frozen":
            self.ends.frozen(lease, seconds, sum(one.nbytes for one in job.machine.members.values()), reason)
        elif outcome == "lost":
            self.ends.lost(lease, reason)
        elif job.machine.undoing:
            pause_s = RETRY_S if job.machine.members else RETRY_ABSENT_S
            self.ends.not_frozen(lease, reason, RETRY_REFUSED_S if job.machine.refused else pause_s)
        else:
            self.ends.thawed(lease, seconds)


def _work(job: _Freeze | None) -> str | None:
    """Return a description of the work on a job; None if nothing keeps it from being asked to yield."""
    if job is None or job.machine.outcome == "frozen":
        return None
    if job.machine.lost:
        return f"lost in the driver path, requeue it (scontrol requeue): {job.machine.reason}"
    return f"the driver path works on it: {job.machine.stage}"
