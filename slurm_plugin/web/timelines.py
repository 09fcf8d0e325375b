"""Times as drawings: rows of stretches, and bars over time; positions in percent, so that any width will do (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from cadenza.sidecar.clock import local

DATE, CLOCK = 5, 11
"""Places in a moment's text at which the date without its year begins, and the time."""
TICKS = 4
LEAST_PERCENT = 0.2
"""Width of the shortest stretch that can be seen."""
MAX_LEVELS = 4
"""Stretches that one row can show at the same moment: jobs that are packed on one GPU."""


class Stretch(NamedTuple):
    """Time from one moment to another, seconds since the epoch, in one row and one of the page's colors."""

    key: str
    from_s: float
    to_s: float
    color: int
    text: str


class Bar(NamedTuple):
    """One stretch as drawn: position and width in percent, its level, and the number of levels in its row."""

    x: float
    width: float
    level: int
    levels: int
    color: int
    text: str


class Timeline(NamedTuple):
    """Rows of bars over one axis of time, and moments on that axis."""

    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    ticks: tuple[tuple[float, str], ...]


class Column(NamedTuple):
    """One bar of a drawing over time: position, width and height in percent, and its value, also in words."""

    x: float
    width: float
    height: float
    number: int
    text: str


def timeline(stretches: Iterable[Stretch], rows: Sequence[str], from_s: float, to_s: float) -> Timeline:
    """Return the rows, in this order, of a period; a stretch that reaches out of it is cut."""
    by_row: dict[str, list[Stretch]] = {row: [] for row in rows}
    for one in stretches:
        if one.to_s > from_s and one.from_s < to_s and one.key in by_row:
            by_row[one.key].append(one)
    percent = _scale(from_s, to_s)
    return Timeline(
        tuple((row, tuple(_bars(sorted(mine, key=lambda one: one.from_s), percent))) for row, mine in by_row.items()),
        axis(from_s, to_s),
    )


def columns(moments: Iterable[float], from_s: float, to_s: float, count: int) -> tuple[Column, ...]:
    """Return the number of moments in each of ``count`` equal parts of a period."""
    numbers, step_s = [0] * count, (to_s - from_s) / count
    for at_s in moments:
        if from_s <= at_s < to_s:
            numbers[int((at_s - from_s) / step_s)] += 1
    most = max(numbers)
    edges = [from_s + at * step_s for at in range(count + 1)]
    percent = _scale(from_s, to_s)
    return tuple(
        Column(
            percent(start),
            100 / count,
            100 * number / most,
            number,
            f"{local(start)[CLOCK:]} to {local(end)[CLOCK:]}: {number}",
        )
        for number, (start, end) in zip(numbers, pairwise(edges), strict=True)
        if number
    )


def axis(from_s: float, to_s: float) -> tuple[tuple[float, str], ...]:
    """Return moments at equal distances, with their texts; with the date where the period is longer than a day."""
    step_s = (to_s - from_s) / TICKS
    since = CLOCK if to_s - from_s < 86400.0 else DATE  # noqa: PLR2004 (a day)
    return tuple((100.0 * at / TICKS, local(from_s + at * step_s)[since:]) for at in range(TICKS))


def _scale(from_s: float, to_s: float) -> Callable[[float], float]:
    return lambda at_s: round(100.0 * (min(max(at_s, from_s), to_s) - from_s) / (to_s - from_s), 3)


def _bars(ordered: Sequence[Stretch], percent: Callable[[float], float]) -> Iterator[Bar]:
    """Yield the bars of one row; stretches at the same time lie one above the other."""
    ends: list[float] = []
    placed = []
    for one in ordered:
        free = next((level for level, end_s in enumerate(ends) if end_s <= one.from_s), len(ends))
        ends[free : free + 1] = [one.to_s]
        placed.append((one, min(free, MAX_LEVELS - 1)))
    levels = min(len(ends), MAX_LEVELS)
    for one, level in placed:
        x = percent(one.from_s)
        width = max(percent(one.to_s) - x, LEAST_PERCENT)
        yield Bar(min(x, 100.0 - width), width, level, levels, one.color, one.text)
