"""The mean time of a step from windows of telemetry: start-up cut off, and known well enough to stop (pure).

Windows are the batches of the method of batch means (Law, *Simulation Modeling and Analysis*, ch. 9); the start-up is
cut by White's rule MSER ("An effective truncation heuristic for bias reduction in simulation output", 1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
LEAST_WINDOWS = 8


class Window(NamedTuple):
    """Steps of the slowest rank in a stretch of time, and the seconds that they took."""

    seconds: float
    steps: int
    others: float = 0.0
    """CPUs that other processes of the machine used at the same time."""
    stolen: float = 0.0
    """Part of the CPU time that the machine asked for and its hypervisor gave to others, 0 to 1."""


class Estimate(NamedTuple):
    """A mean time of a step in seconds, and half of its 95 % interval."""

    mean_s: float
    half_s: float
    steps: int


def estimate(windows: Sequence[Window]) -> Estimate:
    """Return the mean step of the windows without their start-up.

    The interval is the wider one of that of the windows and that of neighbors joined in pairs, which differ when
    windows are not independent of each other. Two windows at least.
    """
    kept = windows[start_up(windows) :]
    single = ratio(kept)
    joined = ratio(pairs(kept)) if len(kept) >= LEAST_WINDOWS else single
    return single if single.half_s >= joined.half_s else single._replace(half_s=joined.half_s)


def ratio(windows: Sequence[Window]) -> Estimate:
    """Return total seconds over total steps, with the interval of a ratio estimator."""
    seconds = np.array([window.seconds for window in windows])
    steps = np.array([window.steps for window in windows], dtype=float)
    mean = float(seconds.sum() / steps.sum())
    count = len(windows)
    spread = float(np.sqrt(((seconds - mean * steps) ** 2).sum() / (count - 1) / count))
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * spread / float(steps.mean())
    return Estimate(mean, half, int(steps.sum()))


def pairs(windows: Sequence[Window]) -> list[Window]:
    """Join neighbors; an odd one out at the beginning is dropped.

    >>> pairs([Window(9, 9), Window(1, 2), Window(3, 4)])
    [Window(seconds=4, steps=6, others=0.0, stolen=0.0)]
    """
    even = windows[len(windows) % 2 :]
    return [Window(a.seconds + b.seconds, a.steps + b.steps) for a, b in zip(even[::2], even[1::2], strict=True)]


def start_up(windows: Sequence[Window]) -> int:
    """Return how many windows to cut off at the beginning: the cut of least standard error.

    At most half of them are cut, and two stay: one alone has no interval.
    """
    means = np.array([window.seconds / window.steps for window in windows])
    cuts = range(max(1, min(len(means) // 2, len(means) - 2) + 1))
    return min(cuts, key=lambda cut: float(means[cut:].var()) / (len(means) - cut))


def settled(windows: Sequence[Window], within: float) -> bool:
    """Return whether the interval is narrow enough to stop: half of it at most ``within`` of the mean."""
    kept = len(windows) - start_up(windows) if windows else 0
    return kept >= LEAST_WINDOWS and (found := estimate(windows)).half_s <= within * found.mean_s
