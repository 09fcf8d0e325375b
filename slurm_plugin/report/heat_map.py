"""Heat maps: change of the completion time by number of GPUs and run time, one map for each result (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cadenza.slurm_plugin.report.compare import LENGTHS, WIDTHS
from cadenza.slurm_plugin.report.page_model import Comparison, Result
from cadenza.slurm_plugin.report.tables import VersusText, versus

STRONG = (1.1, 1.5, 3.0)
"""Ratios, in either direction, from which a field is a step darker."""


class Field(NamedTuple):
    """One class of jobs: their number, the change, and the name of its color, such as *good2*; empty without one."""

    jobs: float
    change: VersusText | None
    color: str


class HeatMap(NamedTuple):
    """One result: a row for each number of GPUs, a column for each run time; None where there are no jobs."""

    result: Result
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Field | None, ...]], ...]


def heat_maps(comparison: Comparison) -> tuple[HeatMap, ...]:
    """Return the map of each result that is compared; none where all jobs are of one class."""
    if len(comparison.by_size) < 2:  # noqa: PLR2004 (one field shows nothing)
        return ()
    columns = tuple(name for _, name in LENGTHS)
    return tuple(
        HeatMap(result, columns, tuple(_rows(comparison, result, columns)))
        for result in comparison.results[1:]
        if any(item.cells[result.index].ratio is not None for item in comparison.by_size)
    )


def _rows(comparison: Comparison, result: Result, columns: Sequence[str]) -> list[tuple[str, tuple[Field | None, ...]]]:
    slices = {item.name: item for item in comparison.by_size}
    rows = []
    for _, width in WIDTHS:
        fields: list[Field | None] = []
        for length in columns:
            item = slices.get(f"{width}, {length}")
            if item is None:
                fields.append(None)
                continue
            cell = item.cells[result.index]
            fields.append(Field(item.jobs[result.index], versus(cell), _color(cell.ratio)))
        if any(fields):
            rows.append((width, tuple(fields)))
    return rows


def _color(ratio: float | None) -> str:
    if not ratio:
        return ""
    step = sum(max(ratio, 1 / ratio) >= limit for limit in STRONG)
    return f"{'good' if ratio < 1 else 'bad'}{step}" if step else ""
