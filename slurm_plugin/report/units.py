"""Numbers and times as readable text (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
MINUS = "\N{MINUS SIGN}"
NARROW = "\N{NARROW NO-BREAK SPACE}"
WHOLE_FROM = 100.0
"""Smallest mean of counts without decimals."""
DECIMALS = ((1000.0, 0), (100.0, 1), (1.0, 2))
"""Size from which a number has so many decimals; smaller ones have three."""


class Unit(NamedTuple):
    """A unit of time: its sign, and its length in seconds."""

    sign: str
    seconds: float


SECONDS, MINUTES, HOURS, DAYS = Unit("s", 1.0), Unit("min", MINUTE_S), Unit("h", HOUR_S), Unit("d", DAY_S)


def unit_of(values_s: Sequence[float]) -> Unit:
    """Return the unit that suits the smallest non-zero duration."""
    least = min((abs(value) for value in values_s if value), default=0.0)
    if least < 2 * MINUTE_S:
        return SECONDS
    return MINUTES if least < HOUR_S / 2 else HOURS


def axis_unit(span_s: float) -> Unit:
    """Return the unit for a linear axis of this length."""
    limits = ((3 * MINUTE_S, SECONDS), (3 * HOUR_S, MINUTES), (4 * DAY_S, HOURS))
    return next((unit for limit, unit in limits if span_s < limit), DAYS)


def number(value: float, decimals: int | None = None) -> str:
    """Return a number with about three significant digits, grouped thousands and a real minus.

    >>> number(3.914), number(1234.5), number(0.08214), number(2.5, 1)
    ('3.91', '1,234', '0.082', '2.5')
    """
    if decimals is None:
        decimals = decimals_of(value)
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def decimals_of(value: float) -> int:
    """Return the number of decimals for about three significant digits."""
    return next((digits for size, digits in DECIMALS if abs(value) >= size), 3 if value else 0)


def count(value: float) -> str:
    """Return a count; a small mean of counts has one decimal.

    >>> count(1200), count(3.25), count(1234.5)
    ('1,200', '3.2', '1,234')
    """
    return number(value, count_decimals(value))


def count_decimals(value: float) -> int:
    """Return the number of decimals of a mean of counts."""
    return 0 if value == round(value) or abs(value) >= WHOLE_FROM else 1


def duration(value_s: float) -> str:
    """Return a duration in the unit that suits it."""
    unit = unit_of((value_s,))
    return f"{number(value_s / unit.seconds)}{NARROW}{unit.sign}"


def milliseconds(seconds: float) -> str:
    """Return a short duration as text.

    >>> milliseconds(0.0304), milliseconds(2.5)
    ('30 ms', '2.50 s')
    """
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def about(value_s: float) -> str:
    """Return a duration with three digits, for sentences."""
    unit = unit_of((value_s,))
    value = value_s / unit.seconds
    return f"{number(value, 1 if abs(value) >= 10 else None)}{NARROW}{unit.sign}"  # noqa: PLR2004 (two digits before)


def percent(change: float) -> str:
    """Return a relative change in percent, always signed."""
    value = 100.0 * change
    decimals = 0 if abs(value) >= 100 else 1  # noqa: PLR2004 (three digits)
    return f"{value:+,.{decimals}f}{NARROW}%".replace("-", MINUS)


def times(ratio: float) -> str:
    """Return a ratio with a multiplication sign."""
    return f"{ratio:,.{2 if ratio < 10 else 1}f}×"  # noqa: PLR2004, RUF001
