"""One round, observe → decide → guard → apply → record, over the three seams that the outside implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.policies.guard import Guarded, GuardSettings, guard
from cadenza.policies.ledger import remember

Decide: TypeAlias = Callable[[ClusterSnapshot, Memory], Decision]


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

    def begin(self, snapshot: ClusterSnapshot, decision: Decision, guarded: Sequence[Guarded], memory: Memory) -> int:
        """Write a round down before its actions leave, and return its number."""
        ...

    def finish(self, number: int, outcomes: Sequence[tuple[Action, Outcome]], seconds: float) -> None:
        """Write down what became of a round's actions."""
        ...


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report of one round."""

    number: int
    snapshot: ClusterSnapshot
    decision: Decision
    guarded: tuple[Guarded, ...]
    outcomes: tuple[tuple[Action, Outcome], ...]


def run_round(gateway: Gateway, clock: Clock, store: Store, decide: Decide, settings: GuardSettings) -> RoundReport:
    """Run one round and return what it did.

    The round is on record before its first action leaves, so that a service killed in between knows on its
    next start what it may have suspended or held. Errors of ``gateway.read`` pass through: without a
    snapshot there is no round.
    """
    started = clock.now()
    snapshot = gateway.read()
    before = store.memory()
    decision = decide(snapshot, before)
    guarded = guard(decision.actions, snapshot, before, settings)
    allowed = tuple(item.action for item in guarded if item.allowed)
    number = store.begin(snapshot, decision, guarded, remember(decision.memory, allowed, snapshot))
    outcomes = tuple((action, gateway.apply(action)) for action in allowed)
    store.finish(number, outcomes, clock.now() - started)
    return RoundReport(number, snapshot, decision, guarded, outcomes)
