"""A comparison as plain data, for ``--json`` (pure)."""

from __future__ import annotations

from typing import Any

from cadenza.policies.simulator.figures import quantile
from cadenza.policies.simulator.load_sweep import load_rows
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Result
from cadenza.slurm_plugin.report.sentences import summary

SCHEMA = "cadenza.report/1"


def plain(comparison: Comparison, page: str) -> dict[str, Any]:
    """Return a comparison as JSON types; names and units are those of `cadenza simulate --json`."""
    return {
        "schema": SCHEMA,
        "page": page,
        "baseline": comparison.baseline.label,
        "notes": list(comparison.notes),
        "results": [_result(result, comparison) for result in comparison.results],
    }


def _result(result: Result, comparison: Comparison) -> dict[str, Any]:
    return {
        "label": result.label,
        "summary": summary(result, comparison),
        "files": [
            {"file": file.source, "arguments": file.arguments, "seeds": [run.seed for run in file.runs]}
            for file in result.files
        ],
        "figures": {key: _figure(cells[result.index]) for key, cells in comparison.cells.items()},
        "sweep": load_rows(result.sweep),
        "speed_up": _speed_up(result, comparison),
    }


def _figure(cell: Cell) -> dict[str, Any] | None:
    """Return a mean over seeds, half its 95 % interval, and its comparison with the baseline."""
    if cell.estimate is None:
        return None
    mean, half, seeds = cell.estimate
    return {"mean": mean, "half": half, "seeds": seeds, "ratio": cell.ratio, "verdict": cell.verdict}


def _speed_up(result: Result, comparison: Comparison) -> dict[str, Any] | None:
    """Return the speed-up of the jobs, each compared with itself in the baseline."""
    paired = comparison.speed_ups.get(result.label)
    if not paired or not paired.ratios:
        return None
    return {
        "jobs": len(paired.ratios),
        "unpaired": paired.unpaired,
        "median": quantile(paired.ratios, 0.5),
        "sooner": sum(ratio > 1 for ratio in paired.ratios) / len(paired.ratios),
        "later": sum(ratio < 1 for ratio in paired.ratios) / len(paired.ratios),
    }
