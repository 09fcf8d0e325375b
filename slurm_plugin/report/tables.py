"""Cells of the page's tables as text: figures of all results, and completion times by kind of job (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cadenza.slurm_plugin.report.metrics import METRICS, Metric
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Result, Slice, Verdict
from cadenza.slurm_plugin.report.units import (
    HOUR_S,
    HOURS,
    Unit,
    count_decimals,
    decimals_of,
    number,
    percent,
    times,
    unit_of,
)

WORDS: dict[Verdict, str] = {
    "better": "better", "worse": "worse", "more": "more", "less": "less", "same": "about same", "unclear": "not clear",
}  # fmt: skip
MIN_RELATIVE_CHANGE = 0.0005
"""Smaller changes round to 0.0 %."""


class VersusText(NamedTuple):
    """Comparison with the baseline: the signed change, its verdict in a word, and the ratio."""

    verdict: str
    word: str
    percent: str = ""
    ratio: str = ""


class CellText(NamedTuple):
    """One figure of a result: its mean with unit, half its interval, and the value as saved."""

    label: str
    text: str = "–"  # noqa: RUF001 (a dash for a missing figure)
    unit: str = ""
    half: str = ""
    versus: VersusText | None = None
    value: float | None = None


class RowText(NamedTuple):
    """One row of a table; ``note`` explains the figure, ``jobs`` counts the jobs of a kind."""

    key: str
    name: str
    cells: tuple[CellText, ...]
    note: str = ""
    jobs: float = 0


class SliceTable(NamedTuple):
    """Mean completion times by kind of job, in one unit."""

    key: str
    title: str
    head: str
    unit: str
    rows: tuple[RowText, ...]


def sections(comparison: Comparison) -> dict[str, list[RowText]]:
    """Return the rows of the table of all figures by section."""
    table: dict[str, list[RowText]] = {}
    for metric in METRICS:
        if metric.key not in comparison.cells:
            continue
        row = comparison.cells[metric.key]
        means = [cell.estimate.mean * metric.seconds for cell in row if cell.estimate]
        unit = unit_of(means) if metric.kind == "time" else HOURS
        cells = tuple(_cell(metric, cell, unit, result) for cell, result in zip(row, comparison.results, strict=True))
        table.setdefault(metric.section, []).append(RowText(metric.key, metric.name, cells, metric.explain))
    return table


def _cell(metric: Metric, cell: Cell, unit: Unit, result: Result) -> CellText:
    value = cell.estimate.mean if cell.estimate else 0.0
    if metric.kind == "count":
        scale, sign, decimals = 1.0, "", count_decimals(value)
    elif metric.kind == "part":
        scale, sign, decimals = 100.0, "%", 1
    else:
        scale, sign = (1.0, "ms") if metric.kind == "ms" else (metric.seconds / unit.seconds, unit.sign)
        decimals = decimals_of(value * scale)
    judged = metric.better or abs((cell.ratio or 0.0) - 1) >= MIN_RELATIVE_CHANGE
    return _text(result.label, cell if judged else Cell(cell.estimate), scale, sign, decimals)


def _text(label: str, cell: Cell, scale: float, sign: str, decimals: int) -> CellText:
    """Return a cell; half the interval has decimals of its own where the mean has none."""
    if cell.estimate is None:
        return CellText(label)
    mean, half, _ = cell.estimate
    spread = number(half * scale, decimals or count_decimals(half * scale)) if half else ""
    return CellText(label, number(mean * scale, decimals), sign, spread, versus(cell), mean)


def versus(cell: Cell) -> VersusText | None:
    """Return a figure's comparison with the baseline's, or None without one."""
    if cell.ratio is None:
        return None
    if abs(cell.ratio - 1) < MIN_RELATIVE_CHANGE:
        return VersusText("same", "same")
    return VersusText(cell.verdict, WORDS[cell.verdict], percent(cell.ratio - 1), times(cell.ratio))


def slice_table(key: str, title: str, head: str, slices: Sequence[Slice], results: Sequence[Result]) -> SliceTable:
    """Return the mean completion time of each kind of job, one row per kind."""
    unit = unit_of([cell.estimate.mean * HOUR_S for item in slices for cell in item.cells if cell.estimate])
    scale = HOUR_S / unit.seconds
    rows = [
        RowText(
            key,
            item.name,
            tuple(
                _text(result.label, cell, scale, "", decimals_of(cell.estimate.mean * scale) if cell.estimate else 0)
                for cell, result in zip(item.cells, results, strict=True)
            ),
            jobs=max(item.jobs),
        )
        for item in slices
    ]
    return SliceTable(key, title, head, unit.sign, tuple(rows))
