"""Freezing and thawing one job through the driver, as a pure state machine: events in, commands out.

All processes are locked before any is checkpointed, and all are restored before any is unlocked; otherwise ranks that
communicate wait for each other inside the driver (NVIDIA/cuda-checkpoint, issue 30). A failed restore cannot be
repeated (issue 44), so free memory is checked first. There are three ends: all processes run, all are checkpointed, or
the job is *lost* and must be requeued.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from msgspec.structs import replace

from cadenza.sidecar.agent.driver.events import (
    Answered,
    Command,
    Ended,
    Event,
    HelperLost,
    Inspect,
    Inspected,
    Operate,
    Restart,
    Thaw,
    Tick,
)
from cadenza.sidecar.agent.driver.protocol import Operation
from cadenza.sidecar.agent.leases.lease_table import GpuProcess

MAX_TRIES = 3
"""Attempts at an operation that may be repeated, and helpers that a job may use up."""
GPU_MARGIN_BYTES = 256 << 20
"""Most free memory that a restore needs on a GPU beyond the processes' former memory: contexts differ a little. Where
less was free while they ran, as much is enough: a job that had filled its GPU would never come back otherwise."""
MAX_LEFT_BYTES = 64 << 20
"""GPU memory that NVML may report of a process after its checkpoint."""
INSPECT_INTERVAL_S = 2.0
"""Time between two inspections while a restore waits for GPU memory."""
TRANSITIONS: tuple[tuple[str, Operation, str], ...] = (
    ("running", "lock", "locked"),
    ("locked", "checkpoint", "checkpointed"),
    ("checkpointed", "restore", "locked"),
    ("locked", "unlock", "running"),
)
"""State of a process, operation of the driver, next state. After a failed operation the state is *unknown*, after a
failed restore *failed*; the operation *state* asks the driver."""
_NEXT: Mapping[str, str] = {operation: after for _, operation, after in TRANSITIONS}


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds; a copy may take ``answer_s`` plus its size at ``copy_bytes_s``."""

    lock_s: float = 10.0
    answer_s: float = 60.0
    memory_wait_s: float = 60.0
    copy_bytes_s: float = 0.25e9


@dataclass
class Member:
    """One process; ``due`` is the time at which the operation under way should be back."""

    target: GpuProcess
    state: str = "running"
    """Running, locked, checkpointed, failed or unknown."""
    busy: Operation | None = None
    due: float = inf
    copied: bool = False
    """A checkpoint of it was begun and not undone: if its state is unknown, it may be checkpointed."""
    tries: int = 0

    @property
    def away(self) -> bool:
        """True if its GPU state may be in host memory, so that no process of the job may be unlocked."""
        return self.state == "checkpointed" or self.copied

    @property
    def nbytes(self) -> int:
        """Its memory on all GPUs."""
        return sum(size for _, size in self.target.gpu_bytes)


@dataclass
class Machine:
    """One job; ``advance`` takes an event and returns commands. Times are monotonic seconds."""

    limits: Limits = field(default_factory=Limits)
    goal: Literal["frozen", "running"] = "frozen"
    members: dict[int, Member] = field(default_factory=dict)
    reason: str = ""
    """Reason why it does not freeze, or why it is lost."""
    shortage: str = ""
    """Memory that a restore waits for."""
    undoing: bool = False
    """It must run again because it could not be frozen, not because it has its lease."""
    refused: bool = False
    """The reason will not go away soon."""
    lost: bool = False
    resting: bool = False
    """All are checkpointed and no other process of the job was on the GPUs: the lease may end."""
    inspected: bool = False
    """The first inspection has come back."""
    inspection_due: float | None = None
    """Time at which the inspection under way should be back; None if there is none."""
    next_inspection: float = -inf
    wait_until: float | None = None
    """End of the wait for GPU memory; None before the first shortage."""
    enough: bool = False
    """The last inspection found enough free memory, and nothing has happened since."""
    losses: int = 0

    @classmethod
    def recovered(cls, targets: Iterable[GpuProcess], *, resting: bool, limits: Limits) -> Machine:
        """Return the machine of a job that an earlier agent worked on; the driver will report the states."""
        members = {one.pid: Member(one, "unknown", copied=True) for one in targets}
        goal: Literal["frozen", "running"] = "frozen" if resting else "running"
        return cls(limits, goal, members, resting=resting, inspected=True)

    @property
    def outcome(self) -> Literal["", "frozen", "running", "lost"]:
        """The end that it came to; empty while work is under way."""
        if self.lost:
            return "lost"
        idle = all(one.busy is None for one in self.members.values())
        if self.goal == "frozen":
            return "frozen" if self.resting and idle and self._all("checkpointed") else ""
        return "running" if idle and self._all("running") else ""

    @property
    def stage(self) -> str:
        """Description of the work under way."""
        number = f"{len(self.members)} process{'es' if len(self.members) != 1 else ''}"
        if self.goal == "running" or self.lost:
            work = "restoring" if self._any_away() else "unlocking"
            return f"{work} {number}" + (f": {reason}" if (reason := self.shortage or self.reason) else "")
        if not self.inspected:
            return "looking for its processes"
        return f"{'checkpointing' if self._any_away() else 'locking'} {number}"

    def advance(self, event: Event, now: float) -> list[Command]:
        """Take in an event and return the commands that follow from it."""
        commands: list[Command] = []
        match event:
            case Answered():
                self._answered(event)
            case Inspected():
                self._use(event, now)
            case HelperLost():
                self._helper_lost(event)
            case Ended():  # a job that loses a process is not worth freezing
                if self.members.pop(event.pid, None) is not None and not self.resting:
                    self._back(f"pid {event.pid} ended before the job was frozen")
            case Thaw():
                self.goal, self.resting, self.undoing, self.enough = "running", False, False, False
                self.reason = self.shortage = ""
                self.wait_until, self.inspection_due, self.next_inspection = None, None, -inf
            case Tick():
                commands = self._late(now)
        return commands or self._plan(now)

    # --- events --------------------------------------------------------------------------------------------

    def _answered(self, event: Answered) -> None:
        """Record the result of an operation; a late one is ignored."""
        member = self.members.get(event.pid)
        if member is None or member.busy != event.operation:
            return
        member.busy, member.due = None, inf
        if event.error:
            self._failed(member, event)
            return
        member.state = _NEXT.get(event.operation, event.state)
        member.copied = member.state == "checkpointed"
        if event.operation != "state":
            member.tries = 0
        if member.state == "failed":
            self._lose(f"the driver has given up on pid {event.pid}")

    def _failed(self, member: Member, event: Answered) -> None:
        """Deal with an operation that failed."""
        reason = f"{event.operation} of pid {event.pid}: {event.error}"
        member.state = "unknown"
        # A restore that has failed leaves the process spoiled (NVIDIA/cuda-checkpoint, issue 44): there is no second
        # try.
        if event.operation == "restore":
            member.state = "failed"
            self._lose(reason)
        elif event.operation in {"lock", "checkpoint"}:
            self._back(reason)
        else:
            member.tries += 1
            if member.tries >= MAX_TRIES:
                self._lose(reason)

    def _use(self, event: Inspected, now: float) -> None:
        """Use an inspection for its purpose: the first one, the last before the lease ends, or one for a restore."""
        if self.inspection_due is None:
            return
        self.inspection_due = None
        if self.goal == "running":
            self._compare_memory(event, now)
        elif not self.inspected:
            self.inspected = True
            if event.refused or not event.processes:
                self.refused = bool(event.refused)
                self._back(event.refused or "no process of the job is on its GPUs")
            else:
                spare = tuple(event.free.items())
                self.members = {one.pid: Member(replace(one, spare_bytes=spare)) for one in event.processes}
        elif reason := event.refused or self._newcomer(event) or self._leftover(event):
            self._back(reason)
        else:
            self.resting = True

    def _compare_memory(self, event: Inspected, now: float) -> None:
        """Compare free GPU memory with the needs of a restore; after too long a wait give up.

        If no process of the job is on the GPUs then, the lease ends and the job waits for its next turn.
        """
        shortage = event.refused or self._shortage(event.free) or ""
        self.enough, self.shortage = not shortage, shortage
        if self.enough:
            return
        self.next_inspection = now + INSPECT_INTERVAL_S
        if self.wait_until is None:
            self.wait_until = now + self.limits.memory_wait_s
        elif now < self.wait_until:
            return
        elif (newcomer := self._newcomer(event)) or not self._all("checkpointed"):
            self._lose(f"{shortage}; {newcomer}" if newcomer else shortage)
        else:
            self.goal, self.resting, self.reason, self.shortage = "frozen", True, shortage, ""

    def _newcomer(self, event: Inspected) -> str | None:
        """Name a process of the job that is on its GPUs and was not there at the first inspection."""
        pid = next((one.pid for one in event.processes if one.pid not in self.members), None)
        return None if pid is None else f"pid {pid} of the job came to its GPUs later"

    def _leftover(self, event: Inspected) -> str | None:
        """Name a process that still has GPU memory although the driver calls it checkpointed."""
        sizes = {one.pid: sum(size for _, size in one.gpu_bytes) for one in event.processes}
        pid = next((pid for pid, size in sizes.items() if size > MAX_LEFT_BYTES), None)
        return None if pid is None else f"pid {pid} still has {sizes[pid] >> 20} MB on its GPUs after its checkpoint"

    def _shortage(self, free: Mapping[int, int]) -> str | None:
        """Name a GPU without enough free memory for the processes that must come back to it."""
        needed: dict[int, int] = {}
        spare: dict[int, int] = {}
        for one in self.members.values():
            spare |= dict(one.target.spare_bytes)
            for gpu, size in one.target.gpu_bytes if one.away else ():
                needed[gpu] = needed.get(gpu, 0) + size
        for gpu, size in needed.items():
            if gpu not in free:
                return f"free memory of GPU {gpu} is not known"
            wanted = size + min(GPU_MARGIN_BYTES, spare.get(gpu, GPU_MARGIN_BYTES))
            if free[gpu] < wanted:
                return f"GPU {gpu} has {free[gpu] >> 20} MB free and a restore wants {wanted >> 20} MB"
        return None

    def _helper_lost(self, event: HelperLost) -> None:
        """Forget the requests under way; the next helper reports the states."""
        disturbed = self.inspection_due is not None
        self.inspection_due, self.enough = None, False
        for one in self.members.values():
            if one.busy is not None or one.state == "locked":  # a helper that leaves unlocks
                one.state, one.busy, one.due = "unknown", None, inf
                disturbed = True
        if not disturbed:
            return
        self.losses += 1
        if not self.resting:
            self._back(event.reason)
        if self.losses >= MAX_TRIES and self.members:
            self._lose(event.reason)

    def _late(self, now: float) -> list[Command]:
        """Deal with requests that should be back by now."""
        if self.lost:
            return []
        if self.inspection_due is not None and now >= self.inspection_due:
            self.inspection_due = inf
            return [Restart("an inspection of the GPUs did not come back")]
        late = next((one for one in self.members.values() if now >= one.due), None)
        if late is None:
            return []
        reason = f"{late.busy} of pid {late.target.pid} did not come back"
        # A lock waits for work on the GPU, such as a collective with a rank that is locked already.
        if late.busy == "lock" and self.goal == "frozen":
            late.due = now + self.limits.answer_s  # it comes back when the others are unlocked
            self._back(reason)
            return []
        for one in self.members.values():
            one.due = inf
        return [Restart(reason)]

    def _back(self, reason: str) -> None:
        """Give up freezing: all must run again."""
        if self.goal == "frozen":
            self.goal, self.reason, self.undoing, self.enough = "running", reason, True, False
            self.inspection_due = None

    def _lose(self, reason: str) -> None:
        """Give up the job; locked processes are unlocked, so that they can end."""
        if not self.lost:
            self.lost, self.reason = True, reason

    # --- commands ------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> list[Command]:
        """Return the commands that can be carried out now."""
        if self.lost:
            return self._let_go(now)
        return self._ask(now) or (self._freezing(now) if self.goal == "frozen" else self._thawing(now))

    def _ask(self, now: float) -> list[Command]:
        """Ask for every unknown state; locked processes that are safe to unlock are unlocked at the same time."""
        unknown = [one for one in self.members.values() if one.state == "unknown" and one.busy is None]
        commands = [self._operate(one, "state", now) for one in unknown if one.tries < MAX_TRIES]
        if commands and self.goal == "running" and not self._any_away():
            commands += self._unlocks(now)
        return commands

    def _freezing(self, now: float) -> list[Command]:
        """Lock all, then checkpoint all, then make sure that no other process came."""
        members = list(self.members.values())
        if self.resting:
            if all(one.state in {"checkpointed", "unknown"} for one in members):
                return []
            self._lose("other software brought it back without its lease")  # it is not ours to stop again
            return self._let_go(now)
        if any(one.busy is not None for one in members):
            return []
        # A lock waits for the process's work on the GPU, and that may wait in a collective for another process: so all
        # are locked at once, and none is checkpointed before all are (cuCheckpointProcessLock).
        if running := [one for one in members if one.state == "running"]:
            return [self._operate(one, "lock", now) for one in running]
        if locked := [one for one in members if one.state == "locked"]:
            return [self._operate(one, "checkpoint", now) for one in locked]
        return self._inspect(now)

    def _thawing(self, now: float) -> list[Command]:
        """Restore all once there is memory for all, then unlock all."""
        if not self._any_away():
            return self._unlocks(now)
        members = self.members.values()
        # A restored process stays locked until its unlock; one that ran now would wait for those that are away.
        if any(one.busy is not None or one.state == "unknown" for one in members):
            return []
        if not self.enough:
            return self._inspect(now) if now >= self.next_inspection else []
        self.enough = False
        return [self._operate(one, "restore", now) for one in members if one.state == "checkpointed"]

    def _let_go(self, now: float) -> list[Command]:
        """Unlock the locked processes of a lost job without waiting for any."""
        unknown = [one for one in self.members.values() if one.state == "unknown" and one.busy is None]
        asked: list[Command] = [self._operate(one, "state", now) for one in unknown if one.tries < MAX_TRIES]
        return asked + self._unlocks(now)

    def _unlocks(self, now: float) -> list[Command]:
        """Unlock all locked processes."""
        locked = [one for one in self.members.values() if one.state == "locked" and one.busy is None]
        return [self._operate(one, "unlock", now) for one in locked if one.tries < MAX_TRIES]

    def _operate(self, member: Member, operation: Operation, now: float) -> Command:
        """Return a command for a process, and record that it is under way."""
        allowed = self.limits.answer_s
        if operation == "lock":
            allowed = 2 * self.limits.lock_s
        elif operation in {"checkpoint", "restore"}:
            allowed += member.nbytes / self.limits.copy_bytes_s
        member.copied |= operation == "checkpoint"
        member.busy, member.due = operation, now + allowed
        return Operate(member.target.pid, operation)

    def _inspect(self, now: float) -> list[Command]:
        """Return the command for an inspection, unless one is under way."""
        if self.inspection_due is not None:
            return []
        self.inspection_due = now + self.limits.answer_s
        return [Inspect()]

    def _all(self, state: str) -> bool:
        return all(one.state == state for one in self.members.values())

    def _any_away(self) -> bool:
        return any(one.away for one in self.members.values())
