"""The median rule (Golovin et al., Vizier, KDD'17, §3.2.2): below the median of the others' running averages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from cadenza.policies.sweep.learning_curve import Rule, Trial


def median_rule(least: int) -> Rule:
    """Return the rule; it says nothing of a trial at a step that fewer than ``least`` others have reached."""

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
