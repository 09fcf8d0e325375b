"""Sentences of the page: a summary of each result, and notes on differences between results (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cadenza.policies.simulator.load_sweep import highest_stable, load_rows
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Result, Run
from cadenza.slurm_plugin.report.units import HOUR_S, NARROW, about, count, number, percent, times

HALF_PERCENT = 0.005


def summary(result: Result, comparison: Comparison) -> str:
    """Return the sentences that summarize a result."""
    return " ".join([*_completion(result, comparison), *_more(result, comparison), *_capacity(result)])


def _completion(result: Result, comparison: Comparison) -> Iterator[str]:
    cell = comparison.figure("avg_jct_h", result)
    if cell is None:
        if result.runs:
            yield "No job ended."
        return
    takes = f"Jobs take {_hours(cell)} on average"
    if cell.ratio is not None:
        yield f"{takes}, {_against(cell)} “{comparison.baseline.label}”{_paired(result, comparison)}."
    else:
        is_compared = result is comparison.baseline and len(comparison.results) > 1
        yield takes + (", the baseline of the others." if is_compared else ".")


def _against(cell: Cell) -> str:
    change = (cell.ratio or 1.0) - 1
    size = percent(abs(change)).lstrip("+")
    words = {
        "better": f"{size} less than with",
        "worse": f"{size} more than with",
        "same": "about the same as with",
        "unclear": f"which is not clearly different ({percent(change)}, within the 95{NARROW}% interval) from",
    }
    return words.get(cell.verdict, "compared with")


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
        differs = makespan.ratio is not None and makespan.verdict not in ("same", "unclear")
        ratio = f" ({times(makespan.ratio or 1.0)} the baseline’s)" if differs else ""  # noqa: RUF001
        yield f"The last one ends after {_hours(makespan)}{ratio}."
    held, busy = (comparison.mean(key, result) for key in ("gpu_utilization", "gpu_busy"))
    if held is not None:
        computing = "" if busy is None or busy == held else f" and compute {_share(busy)}"
        yield f"GPUs are held {_share(held)} of the time{computing}."
    jobs, moved = (comparison.mean(key, result) for key in ("jobs", "migrations"))
    if jobs and moved:
        yield f"There were {count(moved)} migrations, {number(moved / jobs, 2)} a job."


def _capacity(result: Result) -> Iterator[str]:
    """Yield the highest load of a sweep that the cluster keeps up with."""
    rows = load_rows(result.sweep)
    if not rows:
        return
    highest = highest_stable(rows)
    if highest is None:
        yield f"The cluster does not keep up with {rows[0].load:g} jobs an hour."
    else:
        row = next(row for row in rows if row.load == highest)
        takes = "" if row.mean_jct_h is None else f", where jobs take {about(row.mean_jct_h * HOUR_S)} on average"
        tried = "every load tried, up to " if highest == rows[-1].load else ""
        yield f"The cluster keeps up with {tried}{highest:g} jobs an hour{takes}."


def _hours(cell: Cell) -> str:
    return about(cell.estimate.mean * HOUR_S) if cell.estimate else ""


def _share(part: float) -> str:
    """Return a fraction as a whole percentage."""
    return f"under 1{NARROW}%" if 0 < part < HALF_PERCENT else f"{100 * part:.0f}{NARROW}%"


# --- Notes ---------------------------------------------------------------------------------------------------


def notes(results: Sequence[Result]) -> tuple[str, ...]:
    """Return a sentence for each difference that makes the results less comparable."""
    return tuple(note for result in results for note in _result_notes(result, results[0]))


def _result_notes(result: Result, baseline: Result) -> Iterator[str]:
    name = f"“{result.label}”"
    if result is not baseline and result.runs and baseline.runs:
        yield from _differences(name, result.runs, baseline)
    if len({(run.gpus, run.cpus) for run in result.runs}) > 1:
        yield f"{name}: its runs used clusters of different sizes."
    if len({run.seed for run in result.runs}) < len(result.runs):
        yield f"{name}: {len(result.runs)} runs, some of them with equal or missing seeds; jobs are paired in order."
    jobs = [job for run in result.runs for job in run.jobs]
    shown = sum(job.finish_s is not None for job in jobs)
    if shown != round(sum(run.summary.get("jobs", 0.0) for run in result.runs)):
        yield f"{name}: its charts show {count(shown)} jobs that ended, but its figures cover another number."
    if shown < len(jobs):
        yield (
            f"{name}: {count(len(jobs) - shown)} of {count(len(jobs))} jobs had not ended when the simulation did; "
            "completion times cover the others."
        )


def _differences(name: str, runs: Sequence[Run], baseline: Result) -> Iterator[str]:
    base, mine = baseline.runs[0], runs[0]
    if (mine.gpus, mine.cpus) != (base.gpus, base.cpus):
        yield (
            f"{name} is on another cluster: {_cluster(mine)}, the baseline on {_cluster(base)}. "
            "That changes its figures, too."
        )
    if workload(mine) != workload(base) and mine.seed == base.seed:
        shared = len(workload(mine) & workload(base))
        yield (
            f"{name} has another workload: {count(shared)} of its {count(len(mine.jobs))} jobs are in the baseline's "
            f"{count(len(base.jobs))} as well (same id, submission, GPUs and model)."
        )
    if {run.seed for run in runs} != {run.seed for run in baseline.runs}:
        yield f"{name} ran with seeds {_seeds(runs)}, the baseline with {_seeds(baseline.runs)}."


def workload(run: Run) -> frozenset[tuple[int, float, int, str]]:
    """Return the jobs that a run was given."""
    return frozenset((job.id, job.submit_s, job.gpus, job.model) for job in run.jobs)


def _cluster(run: Run) -> str:
    return f"{count(run.gpus)} GPUs and {count(run.cpus)} CPUs"


def _seeds(runs: Sequence[Run]) -> str:
    seeds = [str(run.seed) for run in runs if run.seed is not None]
    return ", ".join(seeds) or "none given"
