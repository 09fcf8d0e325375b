"""Outcome of one round of sharing: the actions, by the stage that orders them, and what stages say of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cadenza.policies.core.actions import (
    Action,
    MakeWay,
    Migrate,
    NodeAction,
    Pack,
    Place,
    Resize,
    SetFactor,
    Tune,
    Unpack,
)  # fmt: skip
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import JobKey

Topic: TypeAlias = Literal["turn", "back", "pin", "queue", "pack", "order", "repair", "stranded", "size", "cpus"]
"""Subject of a sentence: a job's turn, why it gives its place back, the end of its pin, its place in Slurm's queue, its
pack, its move, its repair, why it cannot start where it was placed, why its size stays, why it lends no CPUs."""


@dataclass
class Outcome:
    """Decisions of the stages so far."""

    lane_actions: tuple[NodeAction, ...] = ()
    pack_actions: tuple[Pack | Unpack, ...] = ()
    slurm_actions: tuple[Action, ...] = ()
    factors: list[SetFactor] = field(default_factory=list)
    """SiteFactors of waiting jobs."""
    ways: list[MakeWay] = field(default_factory=list)
    """Running jobs that leave for a waiting one."""
    moves: list[Migrate | Resize | Unpack] = field(default_factory=list)
    tunes: tuple[Tune, ...] = ()
    placements: tuple[Place, ...] = ()
    reasons: dict[JobKey, dict[Topic, str]] = field(default_factory=dict)
    """The sentences of all stages on each job; ``turns.reasons`` says which of them its user reads."""
    waiting_reasons: Callable[[], Mapping[JobKey, str]] = dict
    """Sentences on jobs that stay in Slurm's queue, which take time to work out."""
    sentences: Mapping[JobKey, str] = field(default_factory=dict)
    """The sentence that each job's user reads."""
    quiet_until_s: float = 0.0
    """Time until which the decision can change by an event only, seconds since the epoch."""

    def say(self, topic: Topic, job: JobKey, text: str) -> None:
        """Say something of a job; a later sentence on the same topic replaces it."""
        self.reasons.setdefault(job, {})[topic] = text

    def decision(self, memory: Memory) -> Decision:
        """Return the decision; actions come in the order in which they are to be done."""
        # What frees comes first: lanes close before Slurm could start a job there, packs end before turns begin, and
        # jobs stop, leave and are requeued before others are placed on their GPUs.
        actions = (
            *self.lane_actions,
            *self.pack_actions,
            *self.slurm_actions,
            *self.factors,
            *self.ways,
            *self.moves,
            *self.tunes,
            *self.placements,
        )
        sentences, self.sentences = self.sentences, {}  # they hold the state: it is in no cycle
        return Decision(actions, memory, sentences, 0.0 if actions else self.quiet_until_s)
