"""Charts as data: lines with points, axes with a kind, and the ticks of an axis (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from cadenza.slurm_plugin.report.stats import Points
from cadenza.slurm_plugin.report.units import DAY_S, DAYS, HOUR_S, HOURS, MINUTE_S, MINUTES, SECONDS, Unit, number

Scale: TypeAlias = Literal["linear", "log"]
Ticks: TypeAlias = list[tuple[float, str]]
RATIO_TICKS = (
    (2.0, (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)),
    (6.0, (0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)),
    (60.0, (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)),
    (math.inf, (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 10000.0)),
)
"""Ticks of a logarithmic axis of ratios, by the ratio of its end to its beginning."""
LOG_TICKS_S = (
    1.0, 10.0, MINUTE_S, 10 * MINUTE_S, HOUR_S, 10 * HOUR_S, 4 * DAY_S, 40 * DAY_S, 400 * DAY_S,
)  # fmt: skip
"""Ticks of a long logarithmic axis of time, about a decade apart, each a round number of a unit."""
FINE_TICKS_S = (
    *(part * unit for unit in (1.0, MINUTE_S) for part in (1.0, 2.0, 5.0, 10.0, 20.0)),
    *(HOUR_S * part for part in (1.0, 2.0, 5.0, 10.0, 24.0, 48.0, 96.0, 240.0, 480.0, 960.0)),
)
LONG_AXIS = 200.0
"""Ratio of the end of a long logarithmic axis to its beginning."""
CLOCK_STEPS = {"min": (1, 2, 5, 10, 15, 30, 60, 120), "h": (1, 2, 3, 6, 12, 24, 48)}
"""Steps that suit a clock, by the sign of their unit; other units have decimal steps."""
HEADROOM = 1.06
"""End of an axis without a natural end, relative to its highest point."""


class Axis(NamedTuple):
    """One axis: values from ``low`` to ``high`` in the unit of the points.

    ``kind``: "part" is percent from 0 to 100, "time" seconds, "ratio" a factor, "number" anything else.
    """

    label: str
    kind: Literal["part", "time", "ratio", "number"]
    low: float
    high: float
    scale: Scale = "linear"
    unit: Unit = Unit("", 1.0)
    clock: bool = False
    """True for steps that suit a clock, such as 6, 12 and 24 hours."""


@dataclass(frozen=True)
class Line:
    """One result's line with its note in the legend; ``band``: (x, low, high) around it."""

    index: int
    label: str
    points: Points
    note: str = ""
    band: tuple[tuple[float, float, float], ...] = ()
    step: bool = False
    """True for a line that stays flat up to the next point."""
    dots: bool = False


class Chart(NamedTuple):
    """One chart; ``key`` names it in the page, ``text`` describes it for screen readers."""

    key: str
    title: str
    caption: str
    text: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    upright: float | None = None
    """Position of an upright line that marks the baseline."""


def ticks(axis: Axis, limit: int) -> Ticks:
    """Return about ``limit`` ticks or fewer, with their labels."""
    if axis.scale == "log":
        marks = _log(axis)
        while len(marks) > limit:  # leave out every other one; the tick at 1 stays
            keep = next((at % 2 for at, (value, _) in enumerate(marks) if value == 1.0), 0)
            marks = marks[keep::2]
        return marks
    if axis.kind == "part":
        return [(float(at), f"{at} %") for at in (0, 25, 50, 75, 100)]
    low, high = axis.low / axis.unit.seconds, axis.high / axis.unit.seconds
    step = linear_step(high - low, limit, axis.unit.sign if axis.clock else "")
    positions = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(at * step * axis.unit.seconds, number(at * step, decimals)) for at in positions]


def _log(axis: Axis) -> Ticks:
    if axis.kind == "time":
        row = LOG_TICKS_S if axis.high / axis.low > LONG_AXIS else FINE_TICKS_S
        marks = [(tick, tick_label(tick)) for tick in row if axis.low <= tick <= axis.high]
    else:
        row = next(ticks for limit, ticks in RATIO_TICKS if axis.high / axis.low <= limit)
        marks = [(tick, f"{tick:g}×") for tick in row if axis.low <= tick <= axis.high]  # noqa: RUF001
    ends = (axis.low, axis.high)
    return marks or [(at, f"{number(at / axis.unit.seconds)} {axis.unit.sign}".strip()) for at in ends]


def tick_label(value_s: float) -> str:
    """Return a round duration without decimals.

    >>> tick_label(600), tick_label(36000), tick_label(86400)
    ('10 min', '10 h', '1 d')
    """
    unit = next(unit for unit in (DAYS, HOURS, MINUTES, SECONDS) if value_s >= unit.seconds or unit is SECONDS)
    return f"{value_s / unit.seconds:g} {unit.sign}"


def linear_step(span: float, limit: int, sign: str = "") -> float:
    """Return a round step that divides an axis into at most ``limit`` intervals.

    >>> linear_step(100, 5), linear_step(72, 6, "h")
    (20.0, 12)
    """
    least = span / limit
    power = 10.0 ** math.floor(math.log10(least))
    decimal = next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= least * (1 - 1e-9))
    return next((step for step in CLOCK_STEPS.get(sign, ()) if step >= least), decimal)


def upper(values: Sequence[float]) -> float:
    """Return the end of an axis that starts at 0 and shows all of ``values``.

    >>> upper([0, 100])
    106.0
    """
    return HEADROOM * max(values, default=0.0) or 1.0


def log_bounds(values: Sequence[float], widen: float = 1.15) -> tuple[float, float]:
    """Return bounds of a logarithmic axis around positive values."""
    if not values:
        return (1.0, 10.0)
    low, high = min(values), max(values)
    widen = widen if high > low else 2.0
    return (low / widen, high * widen)
