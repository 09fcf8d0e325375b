"""One round, observe → decide → guard → apply → record, over the three seams that the outside implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.guard import Guard, Guarded, GuardSettings, guard
from cadenza.policies.ledger import remember
from cadenza.policies.supervision import supervised

Decide: TypeAlias = Callable[[ClusterSnapshot, Memory], Decision]
LATE_PART = 0.25
"""Part of the deadline for actions of a round whose decision came late: a site that is slow must get on, too."""


class Gateway(Protocol):
    """The cluster: what it looks like, and the only way to change it."""

    def read(self) -> ClusterSnapshot:
        """Return one consistent snapshot; raise an error of the gateway's package when that is impossible."""
        ...

    def apply(self, action: Action) -> Outcome:
        """Carry out one action; a failure is an Outcome, not an exception."""
        ...


class Clock(Protocol):
    """Time as an argument."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        ...


class Store(Protocol):
    """Record that outlives a round."""

    def memory(self) -> Memory:
        """Return the memory of the last recorded decision."""
        ...

    def check(self, snapshot: ClusterSnapshot, decision: Decision, memory: Memory) -> None:
        """Raise an error if this round could not be written down and read again, because of what it says."""
        ...

    def begin(self, snapshot: ClusterSnapshot, decision: Decision, guarded: Sequence[Guarded], memory: Memory) -> int:
        """Write a round down before its actions leave, and return its number."""
        ...

    def finish(self, number: int, outcomes: Sequence[tuple[Action, Outcome]], seconds: float) -> None:
        """Write down what became of a round's actions."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """Facts of a running service that may change while a round's actions leave."""

    settings: Callable[[], GuardSettings]
    """The guard's settings as they are now, read before each action leaves."""
    deadline_s: float
    """Seconds after a round's start in which its actions may leave; at least a quarter of it since the first could."""
    left_alone: Mapping[JobKey, str] = field(default_factory=dict)
    """Jobs that earlier rounds have left alone, with the reason."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report of one round."""

    number: int
    snapshot: ClusterSnapshot
    decision: Decision
    guarded: tuple[Guarded, ...]
    outcomes: tuple[tuple[Action, Outcome], ...]
    left_alone: Mapping[JobKey, str] = field(default_factory=dict)
    """Jobs whose data makes a decision fail, with the reason."""


def run_round(
    gateway: Gateway,
    clock: Clock,
    store: Store,
    decide: Decide,
    settings: GuardSettings,
    live: Live | None = None,
) -> RoundReport:
    """Run one round and return what it did; ``live``: None where nothing changes while its actions leave.

    Errors of ``gateway.read`` pass through: without a snapshot there is no round.
    """
    started = clock.now()
    snapshot = gateway.read()
    before = store.memory()
    # 1. Decide; a job whose data makes this fail is left alone.
    drafted, snapshot, left_alone = supervised(
        lambda seen: _draft(store, decide, settings, seen, before), snapshot, live.left_alone if live else {}
    )
    decision, guarded, memory = drafted
    # 2. Write it down, before the first action leaves: a service that is killed in between then knows at its next start
    #    what it may have suspended or held.
    allowed = tuple(item.action for item in guarded if item.allowed)
    number = store.begin(snapshot, decision, guarded, memory)
    # 3. Let the actions leave.
    gate = Guard(snapshot, before)
    outcomes = []
    until_s = 0.0
    for action in allowed:
        reason = None
        if live is not None:
            passed_s = clock.now() - started
            until_s = until_s or max(live.deadline_s, passed_s + LATE_PART * live.deadline_s)
            reason = gate.refusal_reason(action, live.settings())
            if passed_s > until_s:
                reason = f"deadline: the round has taken {passed_s:.0f} s, the rest is decided anew"
        outcome = gateway.apply(action) if reason is None else Outcome(ok=False, error=reason, left=False)
        outcomes.append((action, outcome))
    store.finish(number, outcomes, clock.now() - started)
    return RoundReport(number, snapshot, decision, guarded, tuple(outcomes), left_alone)


def _draft(
    store: Store, decide: Decide, settings: GuardSettings, snapshot: ClusterSnapshot, before: Memory
) -> tuple[Decision, tuple[Guarded, ...], Memory]:
    """Return a decision that can be written down, the guard's judgment of it, and the memory after it."""
    decision = decide(snapshot, before)
    guarded = guard(decision.actions, snapshot, before, settings)
    memory = remember(decision.memory, (item.action for item in guarded if item.allowed), snapshot)
    store.check(snapshot, decision, memory)
    return decision, guarded, memory
