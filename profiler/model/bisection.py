"""The next number of CPUs to measure: Synergy's bisection, cut short where the law holds (pure).

Synergy (OSDI 2022) bisects between the fewest and the most CPUs and skips an interval whose ends differ by less
than 10 %. Here an interval is cut where the law has its knee, if that lies inside, and the two parts are left alone
where the measurement there is what the law said. A job that follows the law takes three or four points then; one
that does not takes as many as the bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Search: TypeAlias = Callable[[Sequence[float], Mapping[float, float]], float | None]
"""Returns the next point of a grid, given what is measured; None: enough."""
FLAT = 0.10
"""Ends that differ by less are taken as equal: Synergy's threshold."""
FOLLOWS = 0.04
"""A measurement that differs by less from what the law said confirms it."""


def next_point(grid: Sequence[float], times: Mapping[float, float]) -> float | None:
    """Return the CPUs to measure next, or None when what was measured says enough.

    ``grid`` ascends; ``times`` are seconds a step by CPUs, as far as they are measured. The answer depends on
    nothing else, so that an interrupted profile goes on where it was.
    """
    for end in (grid[-1], grid[0]):
        if end not in times:
            return end
    return _within(grid, times, 0, len(grid) - 1)


def _within(grid: Sequence[float], times: Mapping[float, float], low: int, high: int) -> float | None:
    """Return the next point between two measured ones, or None."""
    slow, fast = times[grid[low]], times[grid[high]]
    if high - low < 2 or slow / fast - 1 < FLAT:  # noqa: PLR2004 (nothing lies between neighbors)
        return None
    # Cut next to the knee when that lies inside, else in the middle.
    cut, knee = (low + high) // 2, slow * grid[low] / fast
    if grid[low + 1] <= knee <= grid[high - 1]:
        cut = min(range(low + 1, high), key=lambda at: abs(grid[at] / knee - 1))
    found = times.get(grid[cut])
    if found is None:
        return grid[cut]
    said = max(fast, slow * grid[low] / grid[cut])
    if abs(found / said - 1) <= FOLLOWS:
        return None
    below = _within(grid, times, low, cut)
    return below if below is not None else _within(grid, times, cut, high)
