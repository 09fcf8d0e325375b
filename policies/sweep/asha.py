"""Successive halving without waiting for stragglers, as a stopping rule (Li et al., ASHA, MLSys'20)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cadenza.policies.sweep.learning_curve import Rule, Trial


def asha_rule(first: int, reduction: float, least: int) -> Rule:
    """Return the rule: of those that reached a rung, the best part 1/``reduction`` goes on.

    Rungs are ``first`` steps and each ``reduction`` times the one before. A trial is judged at the last rung that it
    has reached, again each time that others reach it, and not before ``least`` have. Equals stay together.
    """

    def rule(trials: Sequence[Trial]) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for rung, judged in _at_rungs(trials, first, reduction).items():
            there = sorted((value_at(other, rung) for other in trials if other.step >= rung), reverse=True)
            passing = there[max(1, int(len(there) / reduction)) - 1]
            why = f"not among the best 1/{reduction:g} of {len(there)} at step {rung}"
            if len(there) >= least:
                found |= {trial.number: why for trial in judged if value_at(trial, rung) < passing}
        return found

    return rule


def _at_rungs(trials: Sequence[Trial], first: int, reduction: float) -> Mapping[int, list[Trial]]:
    """Return the live trials by the last rung that they have reached."""
    found = defaultdict(list)
    for trial in trials:
        if trial.live and trial.step >= first:
            found[last_rung(trial.step, first, reduction)].append(trial)
    return found


def last_rung(step: int, first: int, reduction: float) -> int:
    """Return the last rung that a trial at ``step`` has reached, 0 before the first.

    >>> [last_rung(step, 10, 3) for step in (9, 10, 29, 30, 90)]
    [0, 10, 10, 30, 90]
    """
    rung, height = 0, float(first)
    while int(height) <= step:
        rung, height = int(height), max(height * reduction, int(height) + 1)
    return rung


def value_at(trial: Trial, rung: int) -> float:
    """Return the best value up to the first report at or past a rung."""
    at = next(step for step, _ in trial.points if step >= rung)
    return trial.until(at).top
