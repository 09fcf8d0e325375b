"""Freezing and thawing one job through the driver, as a pure state machine: events in, commands out.

All processes are locked before any is checkpointed, and all are restored before any is unlocked; otherwise ranks
that communicate wait for each other inside the driver (NVIDIA/cuda-checkpoint, issue 30). A failed restore cannot
be repeated (issue 44), so free memory is looked at first. Every way ends in one of three: all processes run,
all are checkpointed, or the job is *lost*: it must be requeued.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from cadenza.sidecar.agent.driver.events import (
    Answered,
    Command,
    Ended,
    Event,
    HelperLost,
    LookAt,
    Operate,
    Restart,
    Seen,
    Thaw,
    Tick,
)
from cadenza.sidecar.agent.driver.protocol import Operation
from cadenza.sidecar.agent.leases.lease_table import GpuProcess

TRIES = 3
"""How often an operation that may be repeated is tried, and how many helpers a job may use up."""
GPU_MARGIN_BYTES = 256 << 20
"""Free memory that a restore wants on each GPU beyond what the processes had there: contexts differ a little."""
LOOK_EVERY_S = 2.0
"""How often free GPU memory is looked at while a restore waits for it."""
AFTER: Mapping[str, str] = {"lock": "locked", "checkpoint": "checkpointed", "restore": "locked", "unlock": "running"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds; a copy may take ``answer_s`` and as long as ``copy_bytes_s`` makes it."""

    lock_s: float = 10.0
    answer_s: float = 60.0
    memory_wait_s: float = 60.0
    copy_bytes_s: float = 0.25e9


@dataclass
class Member:
    """One process as far as it is known; ``due`` is when the operation under way should be back."""

    target: GpuProcess
    state: str = "running"
    """running, locked, checkpointed, failed or unknown"""
    busy: Operation | None = None
    due: float = inf
    copied: bool = False
    """A checkpoint of it was begun and not undone: when its state is unknown, it may be checkpointed."""
    tries: int = 0

    @property
    def away(self) -> bool:
        """Whether its GPU state may be in host memory, so that nobody of the job may be unlocked."""
        return self.state == "checkpointed" or self.copied

    @property
    def nbytes(self) -> int:
        """What it has on all GPUs."""
        return sum(size for _, size in self.target.gpu_bytes)


@dataclass
class Machine:
    """One job; ``advance`` takes an event and returns what to do. Times are monotonic seconds."""

    limits: Limits = field(default_factory=Limits)
    goal: Literal["frozen", "running"] = "frozen"
    members: dict[int, Member] = field(default_factory=dict)
    reason: str = ""
    """Why it does not freeze, or why it is lost."""
    shortage: str = ""
    """What a restore waits for."""
    undoing: bool = False
    """It is to run again because it could not be frozen, not because it has its lease."""
    refused: bool = False
    """The reason will not go away soon."""
    lost: bool = False
    resting: bool = False
    """All are checkpointed and nobody else of the job was on the GPUs: the lease may go."""
    found: bool = False
    """The first look has come back."""
    look_due: float | None = None
    """When the look under way should be back; None when there is none."""
    next_look: float = -inf
    wait_until: float | None = None
    """When waiting for GPU memory ends; None before the first shortage."""
    enough: bool = False
    """The last look saw enough free memory, and nothing has happened since."""
    losses: int = 0

    @classmethod
    def recovered(cls, targets: Iterable[GpuProcess], *, resting: bool, limits: Limits) -> Machine:
        """Return the machine of a job that an earlier agent had in hand; the driver will say how far."""
        members = {one.pid: Member(one, "unknown", copied=True) for one in targets}
        goal: Literal["frozen", "running"] = "frozen" if resting else "running"
        return cls(limits, goal, members, resting=resting, found=True)

    @property
    def outcome(self) -> Literal["", "frozen", "running", "lost"]:
        """How it ended; empty while something is under way."""
        if self.lost:
            return "lost"
        idle = all(one.busy is None for one in self.members.values())
        if self.goal == "frozen":
            return "frozen" if self.resting and idle and self._all("checkpointed") else ""
        return "running" if idle and self._all("running") else ""

    @property
    def stage(self) -> str:
        """What is being done, for people."""
        number = f"{len(self.members)} process{'es' if len(self.members) != 1 else ''}"
        if self.goal == "running" or self.lost:
            what = "restoring" if any(one.away for one in self.members.values()) else "unlocking"
            return f"{what} {number}" + (f": {why}" if (why := self.shortage or self.reason) else "")
        if not self.found:
            return "looking for its processes"
        return f"{'checkpointing' if any(one.away for one in self.members.values()) else 'locking'} {number}"

    def advance(self, event: Event, now: float) -> list[Command]:
        """Take in an event and return the commands that follow from it."""
        commands: list[Command] = []
        match event:
            case Answered():
                self._answered(event)
            case Seen():
                self._seen(event, now)
            case HelperLost():
                self._helper_lost(event)
            case Ended():
                self._ended(event)
            case Thaw():
                self._thaw()
            case Tick():
                commands = self._late(now)
        return commands or self._plan(now)

    # --- events --------------------------------------------------------------------------------------------

    def _answered(self, event: Answered) -> None:
        """Note how an operation went; one that nobody waits for any more is ignored."""
        member = self.members.get(event.pid)
        if member is None or member.busy != event.operation:
            return
        member.busy, member.due = None, inf
        if event.error:
            self._failed(member, event)
            return
        member.state = AFTER.get(event.operation, event.state)
        member.copied = member.state == "checkpointed"
        if event.operation != "state":
            member.tries = 0
        if member.state == "failed":
            self._lose(f"the driver has given up on pid {event.pid}")

    def _failed(self, member: Member, event: Answered) -> None:
        """Deal with an operation that failed."""
        why = f"{event.operation} of pid {event.pid}: {event.error}"
        member.state = "unknown"
        if event.operation == "restore":
            member.state = "failed"
            self._lose(why)
        elif event.operation in {"lock", "checkpoint"}:
            self._back(why)
        else:
            member.tries += 1
            if member.tries >= TRIES:
                self._lose(why)

    def _seen(self, event: Seen, now: float) -> None:
        """Use a look for what it was asked for: the first, the last before the lease goes, or for a restore."""
        if self.look_due is None:
            return
        self.look_due = None
        if self.goal == "running":
            self._measured(event, now)
        elif not self.found:
            self._begin(event)
        elif event.refused:
            self._back(event.refused)
        elif stranger := self._stranger(event):
            self._back(stranger)
        else:
            self.resting = True

    def _begin(self, event: Seen) -> None:
        """Take the processes that were found, or leave the job alone."""
        self.found = True
        if event.refused or not event.found:
            self.refused = bool(event.refused)
            self._back(event.refused or "no process of the job is on its GPUs")
        else:
            self.members = {one.pid: Member(one) for one in event.found}

    def _measured(self, event: Seen, now: float) -> None:
        """Compare free GPU memory with what is to come back."""
        short = event.refused or self._short(event.free)
        self.enough, self.shortage = not short, short
        if self.enough:
            return
        self.next_look = now + LOOK_EVERY_S
        if self.wait_until is None:
            self.wait_until = now + self.limits.memory_wait_s
        elif now >= self.wait_until:
            self._give_up(self._stranger(event), short)

    def _give_up(self, stranger: str, short: str) -> None:
        """Let the lease go if nobody of the job is on the GPUs; the job waits for its next turn then."""
        if stranger or not self._all("checkpointed"):
            self._lose(f"{short}; {stranger}" if stranger else short)
        else:
            self.goal, self.resting, self.reason, self.shortage = "frozen", True, short, ""

    def _stranger(self, event: Seen) -> str:
        """Name a process of the job that is on its GPUs and was not there when it was first looked."""
        pid = next((one.pid for one in event.found if one.pid not in self.members), None)
        return "" if pid is None else f"pid {pid} of the job came to its GPUs meanwhile"

    def _short(self, free: Mapping[int, int]) -> str:
        """Say which GPU has not enough free memory for the processes that are to come back to it."""
        needed: dict[int, int] = {}
        for one in self.members.values():
            for gpu, size in one.target.gpu_bytes if one.away else ():
                needed[gpu] = needed.get(gpu, 0) + size
        for gpu, size in needed.items():
            if gpu not in free:
                return f"free memory of GPU {gpu} is not known"
            if free[gpu] < size + GPU_MARGIN_BYTES:
                wanted = (size + GPU_MARGIN_BYTES) >> 20
                return f"GPU {gpu} has {free[gpu] >> 20} MB free and a restore wants {wanted} MB"
        return ""

    def _helper_lost(self, event: HelperLost) -> None:
        """Forget what was asked; the next helper says where the processes stand."""
        disturbed = self.look_due is not None
        self.look_due, self.enough = None, False
        for one in self.members.values():
            if one.busy is not None or one.state == "locked":  # a helper that leaves unlocks
                one.state, one.busy, one.due = "unknown", None, inf
                disturbed = True
        if not disturbed:
            return
        self.losses += 1
        if not self.resting:
            self._back(event.reason)
        if self.losses >= TRIES and self.members:
            self._lose(event.reason)

    def _ended(self, event: Ended) -> None:
        """Go on without a process that ended; a job that loses one is not worth freezing."""
        if self.members.pop(event.pid, None) is not None and not self.resting:
            self._back(f"pid {event.pid} ended meanwhile")

    def _thaw(self) -> None:
        """Turn round."""
        self.goal, self.resting, self.undoing, self.enough = "running", False, False, False
        self.reason = self.shortage = ""
        self.wait_until, self.look_due, self.next_look = None, None, -inf

    def _late(self, now: float) -> list[Command]:
        """Deal with what should be back by now."""
        if self.lost:
            return []
        if self.look_due is not None and now >= self.look_due:
            self.look_due = inf
            return [Restart("a look at the GPUs did not come back")]
        late = next((one for one in self.members.values() if now >= one.due), None)
        if late is None:
            return []
        why = f"{late.busy} of pid {late.target.pid} did not come back"
        if late.busy == "lock" and self.goal == "frozen":
            late.due = now + self.limits.answer_s  # it does when the others are unlocked
            self._back(why)
            return []
        for one in self.members.values():
            one.due = inf
        return [Restart(why)]

    def _back(self, reason: str) -> None:
        """Give up freezing: all are to run again."""
        if self.goal == "frozen":
            self.goal, self.reason, self.undoing, self.enough = "running", reason, True, False
            self.look_due = None

    def _lose(self, reason: str) -> None:
        """Give the job up; what is locked is let go, so that it can end."""
        if not self.lost:
            self.lost, self.reason = True, reason

    # --- commands ------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> list[Command]:
        """Return what can be done now."""
        if self.lost:
            return self._let_go(now)
        return self._ask(now) or (self._freezing(now) if self.goal == "frozen" else self._thawing(now))

    def _ask(self, now: float) -> list[Command]:
        """Ask for every state that is unknown; what is locked and harmless is let go beside it."""
        unknown = [one for one in self.members.values() if one.state == "unknown" and one.busy is None]
        commands = [self._operate(one, "state", now) for one in unknown if one.tries < TRIES]
        if commands and self.goal == "running" and not self._any_away():
            commands += self._unlocks(now)
        return commands

    def _freezing(self, now: float) -> list[Command]:
        """Lock all, then checkpoint all, then make sure that those were all."""
        if not self.found:
            return self._look(now)
        members = list(self.members.values())
        if self.resting:
            return self._resting(now)
        if any(one.busy is not None for one in members):
            return []
        if running := [one for one in members if one.state == "running"]:
            return [self._operate(one, "lock", now) for one in running]
        if locked := [one for one in members if one.state == "locked"]:
            return [self._operate(one, "checkpoint", now) for one in locked]
        return self._look(now)

    def _resting(self, now: float) -> list[Command]:
        """Do nothing; a process that is found to run has the GPU without a lease, and is not ours to stop again."""
        if all(one.state in {"checkpointed", "unknown"} for one in self.members.values()):
            return []
        self._lose("it was brought back without its lease, by somebody else")
        return self._let_go(now)

    def _thawing(self, now: float) -> list[Command]:
        """Restore all, when there is room for all, then unlock all."""
        if not self._any_away():
            return self._unlocks(now)
        members = self.members.values()
        if any(one.busy is not None or one.state == "unknown" for one in members):
            return []
        if not self.enough:
            return self._look(now) if now >= self.next_look else []
        self.enough = False
        return [self._operate(one, "restore", now) for one in members if one.state == "checkpointed"]

    def _let_go(self, now: float) -> list[Command]:
        """Unlock what is locked of a lost job; nothing of it is waited for."""
        unknown = [one for one in self.members.values() if one.state == "unknown" and one.busy is None]
        asked: list[Command] = [self._operate(one, "state", now) for one in unknown if one.tries < TRIES]
        return asked + self._unlocks(now)

    def _unlocks(self, now: float) -> list[Command]:
        """Unlock whoever is locked."""
        locked = [one for one in self.members.values() if one.state == "locked" and one.busy is None]
        return [self._operate(one, "unlock", now) for one in locked if one.tries < TRIES]

    def _operate(self, member: Member, operation: Operation, now: float) -> Command:
        """Return a command for a process, and note that it is under way."""
        allowed = self.limits.answer_s
        if operation == "lock":
            allowed = 2 * self.limits.lock_s
        elif operation in {"checkpoint", "restore"}:
            allowed += member.nbytes / self.limits.copy_bytes_s
        member.copied |= operation == "checkpoint"
        member.busy, member.due = operation, now + allowed
        return Operate(member.target.pid, operation)

    def _look(self, now: float) -> list[Command]:
        """Return the command for a look, unless one is under way."""
        if self.look_due is not None:
            return []
        self.look_due = now + self.limits.answer_s
        return [LookAt()]

    def _all(self, state: str) -> bool:
        return all(one.state == state for one in self.members.values())

    def _any_away(self) -> bool:
        return any(one.away for one in self.members.values())
