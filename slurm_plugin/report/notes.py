"""What a reader must know before believing a comparison: differing clusters, workloads, seeds and ends (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cadenza.slurm_plugin.report.page_model import Result, Run
from cadenza.slurm_plugin.report.units import count


def notes(results: Sequence[Result]) -> tuple[str, ...]:
    """Return one sentence for each thing that makes the results less comparable."""
    return tuple(note for result in results for note in _notes(result, results[0]))


def _notes(result: Result, baseline: Result) -> Iterator[str]:
    who = f"“{result.label}”"
    if result is not baseline and result.runs and baseline.runs:
        yield from _against(who, result.runs, baseline)
    if len({(run.gpus, run.cpus) for run in result.runs}) > 1:
        yield f"{who}: its runs are on clusters of different sizes."
    if len({run.seed for run in result.runs}) < len(result.runs):
        yield f"{who}: {len(result.runs)} runs, not all with a seed of their own; jobs are paired by their order."
    if (shown := _endings(result.runs)) != round(sum(run.summary.get("jobs", 0.0) for run in result.runs)):
        yield f"{who}: its charts show {count(shown)} jobs that ended, which are not those of its figures."
    if unfinished := sum(job.finish_s is None for run in result.runs for job in run.jobs):
        total = sum(len(run.jobs) for run in result.runs)
        yield (
            f"{who}: {count(unfinished)} of {count(total)} jobs had not ended when the simulation did; "
            "completion times are of those that had."
        )


def _endings(runs: Sequence[Run]) -> int:
    return sum(job.finish_s is not None for run in runs for job in run.jobs)


def _against(who: str, runs: Sequence[Run], baseline: Result) -> Iterator[str]:
    base, mine = baseline.runs[0], runs[0]
    if (mine.gpus, mine.cpus) != (base.gpus, base.cpus):
        yield (
            f"{who} is on another cluster: {_cluster(mine)}, the baseline on {_cluster(base)}. "
            "Its figures differ for that reason too."
        )
    if workload(mine) != workload(base) and not _other_seeds(runs, baseline):
        shared = len(workload(mine) & workload(base))
        yield (
            f"{who} has another workload: {count(shared)} of its {count(len(mine.jobs))} jobs are in the baseline's "
            f"{count(len(base.jobs))} as well (same id, submission, GPUs and model)."
        )
    if {run.seed for run in runs} != {run.seed for run in baseline.runs}:
        yield f"{who} was run with seeds {_seeds(runs)}, the baseline with {_seeds(baseline.runs)}."


def _other_seeds(runs: Sequence[Run], baseline: Result) -> bool:
    """Tell whether the first runs differ in their seed, so that other jobs are no surprise."""
    return runs[0].seed != baseline.runs[0].seed


def workload(run: Run) -> frozenset[tuple[int, float, int, str]]:
    """Return what a run was given, as far as a result tells."""
    return frozenset((job.id, job.submit_s, job.gpus, job.model) for job in run.jobs)


def _cluster(run: Run) -> str:
    return f"{count(run.gpus)} GPUs and {count(run.cpus)} CPUs"


def _seeds(runs: Sequence[Run]) -> str:
    known = [str(run.seed) for run in runs if run.seed is not None]
    return ", ".join(known) or "none given"
