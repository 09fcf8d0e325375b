"""What each result says, in one plain sentence (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from cadenza.policies.simulator.load_sweep import highest_stable, load_rows
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Result
from cadenza.slurm_plugin.report.units import HOUR_S, NARROW, about, count, number, percent, times

HALF_PERCENT = 0.005


def summary(result: Result, comparison: Comparison) -> str:
    """Return the sentences that sum up a result; for the baseline, what the others are compared to."""
    return " ".join([*_completion(result, comparison), *_more(result, comparison), *_capacity(result)])


def _completion(result: Result, comparison: Comparison) -> Iterator[str]:
    found = comparison.figure("avg_jct_h", result)
    if found is None:
        if result.runs:
            yield "No job ended."
        return
    takes = f"Jobs take {_hours(found)} on average"
    if found.ratio is not None:
        yield f"{takes}, {_against(found)} {_quoted(comparison.baseline)}{_paired(result, comparison)}."
    else:
        yield takes + (", to which the others are compared." if _is_compared(result, comparison) else ".")


def _is_compared(result: Result, comparison: Comparison) -> bool:
    return result is comparison.baseline and len(comparison.results) > 1


def _against(found: Cell) -> str:
    change = (found.ratio or 1.0) - 1
    size = percent(abs(change)).lstrip("+")
    words = {
        "better": f"{size} less than with",
        "worse": f"{size} more than with",
        "same": "about the same as with",
        "unclear": f"which is not clearly different ({percent(change)}, within the 95{NARROW}% interval) from",
    }
    return words.get(found.verdict, "beside")


def _paired(result: Result, comparison: Comparison) -> str:
    paired = comparison.speed_ups.get(result.label)
    if not paired or not paired.ratios:
        return ""
    sooner = sum(ratio > 1 for ratio in paired.ratios) / len(paired.ratios)
    later = sum(ratio < 1 for ratio in paired.ratios) / len(paired.ratios)
    return f"; {_share(sooner)} of the jobs end sooner and {_share(later)} later"


def _more(result: Result, comparison: Comparison) -> Iterator[str]:
    makespan = comparison.figure("makespan_h", result)
    if makespan:
        yield f"The last one ends after {_hours(makespan)}{_ratio(makespan)}."
    held, busy = (comparison.mean(key, result) for key in ("gpu_utilization", "gpu_busy"))
    if held is not None:
        computing = "" if busy is None or busy == held else f" and compute {_share(busy)}"
        yield f"GPUs are held {_share(held)} of the time{computing}."
    jobs, moved = (comparison.mean(key, result) for key in ("jobs", "migrations"))
    if jobs and moved:
        yield f"There were {count(moved)} migrations, {number(moved / jobs, 2)} a job."


def _ratio(found: Cell) -> str:
    if found.ratio is None or found.verdict in ("same", "unclear"):
        return ""
    return f" ({times(found.ratio)} the baseline’s)"  # noqa: RUF001


def _capacity(result: Result) -> Iterator[str]:
    """Yield up to which load the cluster keeps up, where loads were swept."""
    rows = load_rows(result.sweep)
    if not rows:
        return
    most = highest_stable(rows)
    if most is None:
        yield f"The cluster does not keep up with {rows[0].load:g} jobs an hour."
    else:
        row = next(row for row in rows if row.load == most)
        takes = "" if row.mean_jct_h is None else f", where jobs take {about(row.mean_jct_h * HOUR_S)} on average"
        tried = "every load tried, up to " if most == rows[-1].load else ""
        yield f"The cluster keeps up with {tried}{most:g} jobs an hour{takes}."


def _hours(found: Cell) -> str:
    return about(found.estimate.mean * HOUR_S) if found.estimate else ""


def _share(part: float) -> str:
    """Return a part as a whole percentage."""
    return f"under 1{NARROW}%" if 0 < part < HALF_PERCENT else f"{100 * part:.0f}{NARROW}%"


def _quoted(result: Result) -> str:
    return f"“{result.label}”"
