"""What a chart is, as data: lines with points, axes with a kind, and where the ticks of an axis go (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from cadenza.slurm_plugin.report.stats import Points
from cadenza.slurm_plugin.report.units import Unit, linear_step, log_ticks, number

Scale: TypeAlias = Literal["linear", "log"]
Ticks: TypeAlias = list[tuple[float, str]]
RATIO_TICKS = (
    (2.0, (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)),
    (6.0, (0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)),
    (60.0, (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)),
    (math.inf, (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 10000.0)),
)
"""Ticks of a logarithmic axis of ratios, by how many times its end is its beginning."""
TOP = 1.06
"""Room above the highest point of an axis that has no natural end."""


class Axis(NamedTuple):
    """One axis: values from ``low`` to ``high`` in the unit of the points.

    ``kind``: "part" is per cent from 0 to 100, "time" seconds, "ratio" a factor, "number" anything else.
    """

    label: str
    kind: Literal["part", "time", "ratio", "number"]
    low: float
    high: float
    scale: Scale = "linear"
    unit: Unit = Unit("", 1.0)
    clock: bool = False
    """Ticks go by the clock: 6, 12, 24 hours, not 5, 10, 20."""


@dataclass(frozen=True)
class Line:
    """One result's line; ``band`` are (x, low, high) around it, ``note`` what the legend says of it."""

    index: int
    label: str
    points: Points
    note: str = ""
    band: tuple[tuple[float, float, float], ...] = ()
    step: bool = False
    """Flat to the next point instead of a straight line there."""
    dots: bool = False


class Chart(NamedTuple):
    """One chart; ``key`` names it in the page, ``text`` describes it to who cannot see it."""

    key: str
    title: str
    caption: str
    text: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    upright: float | None = None
    """Where an upright line says "as in the baseline"."""


def ticks(axis: Axis, most: int) -> Ticks:
    """Return at most about ``most`` ticks with their labels."""
    if axis.scale == "log":
        return _fewer(_log(axis), most)
    if axis.kind == "part":
        return [(float(at), f"{at} %") for at in (0, 25, 50, 75, 100)]
    return _linear(axis, most)


def _log(axis: Axis) -> Ticks:
    if axis.kind == "time":
        found = log_ticks(axis.low, axis.high)
    else:
        found = [(tick, f"{tick:g}×") for tick in _ratio_ticks(axis.low, axis.high)]  # noqa: RUF001
    return found or [(axis.low, _plain(axis, axis.low)), (axis.high, _plain(axis, axis.high))]


def _ratio_ticks(low: float, high: float) -> list[float]:
    row = next(ticks for limit, ticks in RATIO_TICKS if high / low <= limit)
    return [tick for tick in row if low <= tick <= high]


def _plain(axis: Axis, at: float) -> str:
    return f"{number(at / axis.unit.seconds)} {axis.unit.sign}".strip()


def _fewer(found: Ticks, most: int) -> Ticks:
    """Leave out every other tick while there are too many; the one at 1 stays."""
    while len(found) > most:
        keep = next((at % 2 for at, (value, _) in enumerate(found) if value == 1.0), 0)
        found = found[keep::2]
    return found


def _linear(axis: Axis, most: int) -> Ticks:
    span = (axis.high - axis.low) / axis.unit.seconds
    step = linear_step(span, most, axis.unit.sign if axis.clock else "")
    first = math.ceil(axis.low / axis.unit.seconds / step - 1e-9)
    last = math.floor(axis.high / axis.unit.seconds / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(at * step * axis.unit.seconds, number(at * step, decimals)) for at in range(first, last + 1)]


def upper(values: Sequence[float]) -> float:
    """Return where an axis from 0 ends that must show all of ``values``.

    >>> upper([0, 100])
    106.0
    """
    return TOP * max(values, default=0.0) or 1.0


def log_bounds(values: Sequence[float], widen: float = 1.15) -> tuple[float, float]:
    """Return bounds of a logarithmic axis around positive values."""
    if not values:
        return (1.0, 10.0)
    low, high = min(values), max(values)
    widen = widen if high > low else 2.0
    return (low / widen, high * widen)
