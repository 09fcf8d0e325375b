"""Numbers and times as a person reads them, and where the ticks of their axes go (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
MINUS = "\N{MINUS SIGN}"
NARROW = "\N{NARROW NO-BREAK SPACE}"
WHOLE = 100.0
"""A mean of counts from here on is written without decimals."""
DIGITS = ((1000.0, 0), (100.0, 1), (1.0, 2))
"""From which size on how many decimals; three below."""


class Unit(NamedTuple):
    """A unit of time: its sign, and its length in seconds."""

    sign: str
    seconds: float


SECONDS, MINUTES, HOURS, DAYS = Unit("s", 1.0), Unit("min", MINUTE_S), Unit("h", HOUR_S), Unit("d", DAY_S)

LOG_TICKS_S = (
    1.0, 10.0, MINUTE_S, 10 * MINUTE_S, HOUR_S, 10 * HOUR_S, 4 * DAY_S, 40 * DAY_S, 400 * DAY_S,
)  # fmt: skip
"""Where a long logarithmic axis of time has ticks: about a decade apart, each a round number of a unit."""
FINE_TICKS_S = (
    *(part * unit for unit in (1.0, MINUTE_S) for part in (1.0, 2.0, 5.0, 10.0, 20.0)),
    *(HOUR_S * part for part in (1.0, 2.0, 5.0, 10.0, 24.0, 48.0, 96.0, 240.0, 480.0, 960.0)),
)
LONG = 200.0
"""An axis is long from this ratio of its end to its beginning."""


def unit_of(values_s: Sequence[float]) -> Unit:
    """Return the unit in which the smallest of several durations that is not zero reads well."""
    least = min((abs(value) for value in values_s if value), default=0.0)
    if least < 2 * MINUTE_S:
        return SECONDS
    return MINUTES if least < HOUR_S / 2 else HOURS


def axis_unit(span_s: float) -> Unit:
    """Return the unit for a linear axis of a length."""
    limits = ((3 * MINUTE_S, SECONDS), (3 * HOUR_S, MINUTES), (4 * DAY_S, HOURS))
    return next((unit for limit, unit in limits if span_s < limit), DAYS)


def number(value: float, decimals: int | None = None) -> str:
    """Return a number with about three digits that matter, thousands apart and a real minus.

    >>> number(3.914), number(1234.5), number(0.08214), number(2.5, 1)
    ('3.91', '1,234', '0.082', '2.5')
    """
    if decimals is None:
        decimals = decimals_of(value)
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def decimals_of(value: float) -> int:
    """Return how many decimals of a number matter."""
    return next((digits for size, digits in DIGITS if abs(value) >= size), 3 if value else 0)


def count(value: float) -> str:
    """Return a count; a small mean of counts keeps one decimal.

    >>> count(1200), count(3.25), count(1234.5)
    ('1,200', '3.2', '1,234')
    """
    return number(value, count_decimals(value))


def count_decimals(value: float) -> int:
    """Return how many decimals a mean of counts keeps."""
    return 0 if value == round(value) or abs(value) >= WHOLE else 1


def duration(value_s: float) -> str:
    """Return one duration in the unit that suits it."""
    unit = unit_of((value_s,))
    return f"{number(value_s / unit.seconds)}{NARROW}{unit.sign}"


def about(value_s: float) -> str:
    """Return a duration with three digits, as it is said."""
    unit = unit_of((value_s,))
    value = value_s / unit.seconds
    return f"{number(value, 1 if abs(value) >= 10 else None)}{NARROW}{unit.sign}"  # noqa: PLR2004 (two digits before)


def percent(change: float) -> str:
    """Return a relative change in per cent, always with a sign."""
    value = 100.0 * change
    decimals = 0 if abs(value) >= 100 else 1  # noqa: PLR2004 (three digits)
    return f"{value:+,.{decimals}f}{NARROW}%".replace("-", MINUS)


def times(ratio: float) -> str:
    """Return a ratio with its sign."""
    return f"{ratio:,.{2 if ratio < 10 else 1}f}×"  # noqa: PLR2004, RUF001


def log_ticks(low_s: float, high_s: float) -> list[tuple[float, str]]:
    """Return the ticks of a logarithmic axis of time that are within bounds, with their labels."""
    among = LOG_TICKS_S if high_s / low_s > LONG else FINE_TICKS_S
    return [(tick, tick_label(tick)) for tick in among if low_s <= tick <= high_s]


def tick_label(value_s: float) -> str:
    """Return a round duration without decimals.

    >>> tick_label(600), tick_label(36000), tick_label(86400)
    ('10 min', '10 h', '1 d')
    """
    unit = next(unit for unit in (DAYS, HOURS, MINUTES, SECONDS) if value_s >= unit.seconds or unit is SECONDS)
    return f"{value_s / unit.seconds:g} {unit.sign}"


ROUND_STEPS = {"min": (1, 2, 5, 10, 15, 30, 60, 120), "h": (1, 2, 3, 6, 12, 24, 48)}
"""Steps that suit a clock; other units count in tens."""


def linear_step(span: float, most: int, sign: str = "") -> float:
    """Return a round step that gives at most ``most`` intervals on an axis in a unit.

    >>> linear_step(100, 5), linear_step(72, 6, "h")
    (20.0, 12)
    """
    wanted = span / most
    return next((step for step in ROUND_STEPS.get(sign, ()) if step >= wanted), 0) or _decimal(wanted)


def _decimal(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= wanted * (1 - 1e-9))
