"""Learning curves extended by a power law: what a configuration ends with if it goes on as it went so far.

Gandiva's AutoML runs fit a curve and stop what ends too low (OSDI'18, p. 605). Here the law is ``a - b step^-c`` with b
of at least 0: a curve rises, ever more slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean

from cadenza.policies.sweep.learning_curve import Rule, Trial

EXPONENTS = tuple(0.05 * 1.15**n for n in range(30))
"""From 0.05 to 2.9: from hardly bending to there at once."""
LEAST_POINTS = 4
ALIKE = 2.0
"""Laws whose squared error is within this many times the least are all possible; the most hopeful one counts."""


def curve_rule(steps: int, bar: float | None) -> Rule:
    """Return the rule: stop what will not reach ``bar`` by step ``steps``; None: the best value of any so far."""

    def rule(trials: Sequence[Trial]) -> Mapping[int, str]:
        best = max((trial.top for trial in trials), default=0.0)
        wanted = best if bar is None else bar
        ends = {trial.number: predict(trial, steps) for trial in trials if trial.live}
        why = f"its curve does not lead to {'the best so far' if bar is None else 'the target'} by step {steps}"
        return {number: why for number, end in ends.items() if end is not None and end < wanted}

    return rule


def predict(trial: Trial, steps: int) -> float | None:
    """Return the value that the trial reaches by step ``steps``, at least its best so far; None: too few points."""
    if len(trial.points) < LEAST_POINTS:
        return None
    if not all(isfinite(value) for _, value in trial.points):
        return trial.top
    fits = [_fit(trial.points, exponent, max(steps, trial.step)) for exponent in EXPONENTS]
    least = min(error for error, _ in fits)
    return max(trial.top, *(end for error, end in fits if error <= ALIKE * least + 1e-12))


def _fit(points: Sequence[tuple[int, float]], exponent: float, steps: int) -> tuple[float, float]:
    """Return the least squared error of a law with this exponent, and its value at ``steps``."""
    falls = [max(step, 1) ** -exponent for step, _ in points]
    mean_fall, mean_value = fmean(falls), fmean(value for _, value in points)
    spread = sum((fall - mean_fall) ** 2 for fall in falls)
    slope = sum((f - mean_fall) * (v - mean_value) for f, (_, v) in zip(falls, points, strict=True))
    b = max(0.0, -slope / spread) if spread else 0.0
    a = mean_value + b * mean_fall
    error = sum((a - b * fall - value) ** 2 for fall, (_, value) in zip(falls, points, strict=True))
    return error, a - b * steps**-exponent
