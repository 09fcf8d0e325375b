"""Stopping rules: the median of the others, successive halving, and learning curves extended by a power law."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite
from statistics import fmean, median

from cadenza.policies.sweep.learning_curve import Rule, Trial

EXPONENTS = tuple(0.05 * 1.15**n for n in range(30))
"""From 0.05 to 2.9: from hardly bending to there at once."""
LEAST_POINTS = 4
ALIKE = 2.0
"""Laws whose squared error is within this many times the least are all possible; the most hopeful one counts."""


def median_rule(least: int) -> Rule:
    """Return the median rule (Golovin et al., Vizier, KDD'17, §3.2.2): below the others' median running average.

    It says nothing of a trial at a step that fewer than ``least`` others have reached.
    """

    def rule(trials: Sequence[Trial]) -> Mapping[int, str]:
        found = {}
        means = {trial.number: _Means(trial) for trial in trials if trial.points}
        for trial in trials:
            if not trial.live or not trial.points:
                continue
            others = [m.at(trial.step) for n, m in means.items() if n != trial.number and m.steps[-1] >= trial.step]
            if len(others) >= least and trial.top < median(others):
                found[trial.number] = f"its best is below the median of {len(others)} others at step {trial.step}"
        return found

    return rule


class _Means:
    """One trial's running averages."""

    def __init__(self, trial: Trial) -> None:
        self.steps = [step for step, _ in trial.points]
        self._sums = list(accumulate(value for _, value in trial.points))

    def at(self, step: int) -> float:
        """Return the mean of the values up to a step, or the first value where that came later."""
        count = max(1, bisect_right(self.steps, step))
        return self._sums[count - 1] / count


def asha_rule(first: int, reduction: float, least: int) -> Rule:
    """Return the rule of ASHA (Li et al., MLSys'20): of those that reached a rung, the best 1/``reduction`` go on.

    Rungs are ``first`` steps and each ``reduction`` times the one before. A trial is judged at the last rung that it
    has reached, again each time that others reach it, and not before ``least`` have. Equals stay together.
    """

    def rule(trials: Sequence[Trial]) -> Mapping[int, str]:
        found: dict[int, str] = {}
        rungs: defaultdict[int, list[Trial]] = defaultdict(list)
        for trial in trials:
            if trial.live and trial.step >= first:
                rungs[last_rung(trial.step, first, reduction)].append(trial)
        for rung, judged in rungs.items():
            there = sorted((value_at(other, rung) for other in trials if other.step >= rung), reverse=True)
            passing = there[max(1, int(len(there) / reduction)) - 1]
            why = f"not among the best 1/{reduction:g} of {len(there)} at step {rung}"
            if len(there) >= least:
                found |= {trial.number: why for trial in judged if value_at(trial, rung) < passing}
        return found

    return rule


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


def curve_rule(steps: int, bar: float | None) -> Rule:
    """Return the rule: stop what will not reach ``bar`` by step ``steps``; None: the best value of any so far.

    Gandiva's AutoML runs fit a curve and stop what ends too low (OSDI'18, p. 605). Here the law is ``a - b step^-c``
    with b of at least 0: a curve rises, ever more slowly.
    """

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
