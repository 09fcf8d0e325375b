"""The learning curves of a sweep's configurations as rules see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

Goal: TypeAlias = Literal["max", "min"]
WORST = -math.inf


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration and what it has reported."""

    number: int
    points: tuple[tuple[int, float], ...] = ()
    """(step, value), one for each step, steps ascending."""
    live: bool = True
    """Waiting or running; False once it has ended or is to be stopped."""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Return the last step reported, 0 before the first."""
        return self.points[-1][0] if self.points else 0

    @property
    def top(self) -> float:
        """Return the greatest value reported; the worst there is before the first."""
        return max((value for _, value in self.points), default=WORST)

    def until(self, step: int) -> Trial:
        """Return the trial as it was up to a step."""
        return replace(self, points=tuple(point for point in self.points if point[0] <= step))


Rule: TypeAlias = Callable[[Sequence[Trial]], Mapping[int, str]]
"""From the trials, in which more is better, to those to be stopped: number and the reason, a sentence's end."""


def scored(trials: Sequence[Trial], goal: Goal) -> tuple[Trial, ...]:
    """Return the trials with values of which more is better; one that is not finite (it diverged) is the worst."""
    sign = 1.0 if goal == "max" else -1.0

    def points(trial: Trial) -> tuple[tuple[int, float], ...]:
        return tuple((step, sign * value if math.isfinite(value) else WORST) for step, value in trial.points)

    return tuple(replace(trial, points=points(trial)) for trial in trials)


def judge(trials: Sequence[Trial], rule: Rule, first: int) -> dict[int, str]:
    """Return which trials to stop and why; values are such that more is better (``scored``).

    Whatever the rule says, no trial is stopped before step ``first``, nor one with the best value of all.
    """
    best = max((trial.top for trial in trials), default=0.0)
    may = {trial.number for trial in trials if seen(trial, first) and trial.top < best}
    return {number: reason for number, reason in rule(trials).items() if number in may}


def put_behind(trials: Sequence[Trial], top: int, first: int) -> frozenset[int]:
    """Return the live trials that make way for others: those with feedback and not among the ``top`` best; 0: none.

    Trials without feedback are in front with the best, so that all get early feedback.
    """
    ranked = sorted((t for t in trials if t.live and seen(t, first)), key=lambda t: (-t.top, t.number))
    return frozenset(trial.number for trial in ranked[top:]) if top else frozenset()


def seen(trial: Trial, first: int) -> bool:
    """Return whether a live trial has given its first feedback."""
    return trial.live and bool(trial.points) and trial.step >= first
