"""Statistics of a page: differences over seeds, thinned distributions and binned step functions (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import TypeAlias

from cadenza.policies.simulator.figures import mean_and_half, student
from cadenza.slurm_plugin.report.page_model import Estimate

Points: TypeAlias = tuple[tuple[float, float], ...]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a seed with its interval; ``values`` is not empty."""
    mean, half = mean_and_half(values)
    return Estimate(mean, half, len(values))


def clear(ours: Sequence[float], theirs: Sequence[float], *, paired: bool) -> bool | None:
    """Return True if two means differ beyond their 95 % interval; None with too few seeds.

    ``paired``: the values at one index belong to one seed, so that the effect of the seed cancels out.
    """
    least = min(len(ours), len(theirs))
    if least < 2:  # noqa: PLR2004 (a spread needs two)
        return None
    if paired:
        gap, half = mean_and_half([a - b for a, b in zip(ours, theirs, strict=True)])
        return abs(gap) > (half or 0.0)
    error = sqrt(sum(stdev(values) ** 2 / len(values) for values in (ours, theirs)))
    return abs(fmean(ours) - fmean(theirs)) > student(least - 1) * error


def distribution(values: Sequence[float], total: int, limit: int) -> Points:
    """Return the empirical distribution as at most ``limit`` points (value, percent of ``total``).

    It includes the first and the last value. Missing values, of jobs that did not end, keep it below 100 %.
    """
    ordered, last = sorted(values), len(values) - 1
    thinned = {round(step * last / (limit - 1)) for step in range(limit)}
    ranks = range(len(values)) if len(values) <= limit else sorted(thinned)
    return tuple((ordered[at], 100.0 * (at + 1) / total) for at in ranks)


def bins(samples: Points, end: float, edges: Sequence[float]) -> list[float | None]:
    """Return the time-weighted mean of a step function in each interval between ``edges``.

    ``samples`` are (start, value) in order of time, the last one valid until ``end``; an interval without data is None.
    """
    times = [time for time, _ in samples]
    means: list[float | None] = []
    at = 0
    for low, high in pairwise(edges):
        while at + 1 < len(times) and times[at + 1] <= low:
            at += 1
        means.append(_mean_between(samples, at, (low, min(high, end)), end))
    return means


def _mean_between(samples: Points, at: int, span: tuple[float, float], end: float) -> float | None:
    """Return the mean over a span; sample ``at`` is the last one at or before its start."""
    area = covered = 0.0
    low, high = span
    while at < len(samples) and samples[at][0] < high:
        until = samples[at + 1][0] if at + 1 < len(samples) else end
        width = min(until, high) - max(samples[at][0], low)
        if width > 0:
            area += width * samples[at][1]
            covered += width
        at += 1
    return area / covered if covered > 0 else None
