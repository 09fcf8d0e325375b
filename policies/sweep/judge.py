"""What holds for every rule: the best so far is never stopped, and nobody before its first feedback."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.policies.sweep.learning_curve import Rule, Trial


def judge(trials: Sequence[Trial], rule: Rule, first: int) -> dict[int, str]:
    """Return which trials to stop and why; values are such that more is better (``scored``).

    Whatever the rule says, no trial is stopped before step ``first``, and none whose best value nobody exceeds.
    """
    best = max((trial.top for trial in trials), default=0.0)
    may = {trial.number for trial in trials if seen(trial, first) and trial.top < best}
    return {number: reason for number, reason in rule(trials).items() if number in may}


def put_behind(trials: Sequence[Trial], top: int, first: int) -> frozenset[int]:
    """Return the live trials that make way for others: seen, and not among the ``top`` best; 0: nobody does.

    Those that nobody has seen yet are in front with the best, so that all get early feedback.
    """
    ranked = sorted((t for t in trials if t.live and seen(t, first)), key=lambda t: (-t.top, t.number))
    return frozenset(trial.number for trial in ranked[top:]) if top else frozenset()


def seen(trial: Trial, first: int) -> bool:
    """Whether a live trial has given its first feedback."""
    return trial.live and bool(trial.points) and trial.step >= first
