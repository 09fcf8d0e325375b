"""Figures of a simulation: completion times, utilization and switches, with mean and interval over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from cadenza.policies.simulator.run_values import JobResult, Result, Sample

HOUR = 3600.0
SHORT_S = 60.0
"""Run time below which a slowdown counts as if the job ran as long (Feitelson and Rudolph's bound)."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""
NORMAL = 1.959964


class Width(NamedTuple):
    """A class of jobs by their number of GPUs."""

    name: str
    least: int
    most: float

    def holds(self, gpus: int) -> bool:
        """Return whether a job of so many GPUs belongs to the class."""
        return self.least <= gpus <= self.most


WIDTHS = (Width("1 GPU", 1, 1), Width("2 to 7 GPUs", 2, 7), Width("8 GPUs", 8, 8), Width("more GPUs", 9, inf))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Wall time of the decisions, milliseconds; None without a stopwatch."""

    p50: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run, as ``cadenza simulate --json`` prints them. Hours, seconds, shares from 0 to 1, counts.

    Completion times count the jobs that ended, within the window if there is one; None if no job ended.
    Utilization is from the first submission to the end of the run.
    """

    jobs: int
    """Jobs whose completion times are counted."""
    unfinished: int
    """Jobs, of the same, that were submitted and have not ended."""
    avg_jct_h: float | None
    p50_jct_h: float | None
    p99_jct_h: float | None
    p999_jct_h: float | None
    makespan_h: float | None
    """When the last job ended, counted from the start of the simulation."""
    time_to_100_iterations_s: float | None
    """Median; a job with fewer iterations counts with its wait so far, which is a lower bound."""
    mean_time_to_100_iterations_s: float | None
    censored_100_iterations: int
    """Number of jobs with fewer iterations at the end."""
    gpu_utilization: float
    """GPUs that a job may use, as a share of all."""
    gpu_busy: float
    """GPUs that compute, by the jobs' own utilization, as a share of all."""
    cpu_utilization: float
    idle_waiting_gpus: float
    """GPUs that are idle while a job waits that fits there; mean from the first to the last submission."""
    mean_bounded_slowdown: float | None
    """Completion time over the larger of run time and 60 s, at least 1."""
    wait_1_gpu_h: float | None
    """Mean wait of jobs of one GPU for their first start; None without such jobs."""
    wait_2_to_7_gpus_h: float | None
    wait_8_gpus_h: float | None
    wait_more_gpus_h: float | None
    migrations: int
    yields: int
    tunes: int
    restarts: int
    packs: int
    unpacks: int
    resizes: int
    rounds: int
    decisions: int
    """Rounds that were not skipped."""
    decision_ms: Quantiles
    wall_s: float


def summarize(result: Result, window: tuple[int, int] | None = None, *, synergy: bool = False) -> Summary:
    """Return the figures of one simulation.

    ``window``: count completion times and first iterations of the jobs with these positions in order of submission
    only, first to one before last. ``synergy``: quantiles as in Synergy's simulator, see ``quantile``.
    """
    jobs = result.jobs[slice(*window)] if window else result.jobs
    jct_s = sorted(job.jct_s for job in jobs if job.jct_s is not None)
    hundred = sorted(_hundred_s(jobs, result.end_s))
    held = _utilization(result, lambda sample: sample.gpus_held, result.gpus)
    counts = result.counts
    decisions = sorted(result.decision_s)
    waits_h = [_wait_h(jobs, width) for width in WIDTHS]

    def jct_h(share: float) -> float | None:
        return quantile(jct_s, share, synergy=synergy) / HOUR if jct_s else None

    return Summary(
        jobs=len(jct_s),
        unfinished=sum(job.finish_s is None and job.submit_s <= result.end_s for job in jobs),
        avg_jct_h=fmean(jct_s) / HOUR if jct_s else None,
        p50_jct_h=jct_h(0.5),
        p99_jct_h=jct_h(0.99),
        p999_jct_h=jct_h(0.999),
        makespan_h=max((job.finish_s for job in result.jobs if job.finish_s is not None), default=0.0) / HOUR or None,
        time_to_100_iterations_s=quantile(hundred, 0.5) if hundred else None,
        mean_time_to_100_iterations_s=fmean(hundred) if hundred else None,
        censored_100_iterations=sum(_censored(job, result.end_s) for job in jobs),
        gpu_utilization=held,
        gpu_busy=_utilization(result, lambda sample: sample.busy, result.gpus),
        cpu_utilization=_utilization(result, lambda sample: sample.cpus_used, result.cpus),
        idle_waiting_gpus=_idle_waiting(result),
        mean_bounded_slowdown=fmean(slowdowns) if (slowdowns := bounded_slowdowns(jobs)) else None,
        wait_1_gpu_h=waits_h[0],
        wait_2_to_7_gpus_h=waits_h[1],
        wait_8_gpus_h=waits_h[2],
        wait_more_gpus_h=waits_h[3],
        migrations=counts.migrations,
        yields=counts.yields,
        tunes=counts.tunes,
        restarts=counts.restarts,
        packs=counts.packs,
        unpacks=counts.unpacks,
        resizes=counts.resizes,
        rounds=counts.rounds,
        decisions=counts.decided,
        decision_ms=Quantiles(*(1e3 * quantile(decisions, q) if decisions else None for q in (0.5, 0.99, 1.0))),
        wall_s=result.wall_s,
    )


def bounded_slowdowns(jobs: Iterable[JobResult]) -> list[float]:
    """Return the bounded slowdown of each job that ended."""
    return [bounded_slowdown(job.jct_s, job.work_s) for job in jobs if job.jct_s is not None]


def bounded_slowdown(jct_s: float, work_s: float) -> float:
    """Return completion time over the larger of run time and ``SHORT_S``, at least 1."""
    return max(1.0, jct_s / max(work_s, SHORT_S))


def _wait_h(jobs: Iterable[JobResult], width: Width) -> float | None:
    waits = [job.start_s - job.submit_s for job in jobs if job.start_s is not None and width.holds(job.gpus)]
    return fmean(waits) / HOUR if waits else None


def _idle_waiting(result: Result) -> float:
    if not result.jobs:
        return 0.0
    first_s, last_s = result.jobs[0].submit_s, result.jobs[-1].submit_s
    return mean_over(result.samples, lambda sample: sample.idle_waiting, first_s, min(last_s, result.end_s))


def quantile(ordered: Sequence[float], share: float, *, synergy: bool = False) -> float:
    """Return a quantile of ascending values: linear between the two nearest, as numpy and pandas do by default.

    ``synergy``: the element at ⌊share · n⌋, as Synergy's simulator takes it.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.5, synergy=True)
    (2.5, 3)
    """
    if synergy:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def _censored(job: JobResult, end_s: float) -> bool:
    return job.to_100_iterations_s is None and job.finish_s is None and job.submit_s <= end_s


def _hundred_s(jobs: Sequence[JobResult], end_s: float) -> list[float]:
    """Return each job's time to 100 iterations, or its time so far, without jobs that have fewer in all."""
    return [
        job.to_100_iterations_s if job.to_100_iterations_s is not None else end_s - job.submit_s
        for job in jobs
        if job.to_100_iterations_s is not None or _censored(job, end_s)
    ]


def _utilization(result: Result, of: Callable[[Sample], float], whole: int) -> float:
    begin = result.jobs[0].submit_s if result.jobs else 0.0
    return mean_over(result.samples, of, begin, result.end_s) / whole if whole else 0.0


def mean_over(samples: Sequence[Sample], of: Callable[[Sample], float], begin_s: float, end_s: float) -> float:
    """Return the mean of a quantity over an interval; before the first sample it is 0.

    For example the GPUs that are busy over the first two hours: ``mean_over(samples, lambda s: s.busy, 0, 7200)``.
    """
    if end_s <= begin_s:
        return 0.0
    ends = [sample.time_s for sample in samples[1:]] + [max(end_s, samples[-1].time_s)] if samples else []
    area = 0.0
    for sample, end in zip(samples, ends, strict=True):
        area += of(sample) * max(min(end, end_s) - max(sample.time_s, begin_s), 0.0)
    return area / (end_s - begin_s)


# --- Over seeds ------------------------------------------------------------------------------------------


def student(freedom: int) -> float:
    """Return Student's t at 97.5 %; to three digits beyond the table too.

    >>> student(4), round(student(100), 3)
    (2.776, 1.984)
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    cube = NORMAL**3
    return NORMAL + (cube + NORMAL) / (4 * freedom) + (5 * NORMAL**5 + 16 * cube + 3 * NORMAL) / (96 * freedom**2)


def mean_and_half(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half the width of its 95 % interval (Student's t), which one value does not have."""
    if len(values) == 1:
        return values[0], None
    return fmean(values), student(len(values) - 1) * stdev(values) / sqrt(len(values))


def flat(summary: Summary) -> dict[str, float | None]:
    """Return the figures without nesting; those of ``decision_ms`` become ``decision_p50_ms`` and so on."""
    found: dict[str, float | None] = {}
    for item in fields(summary):
        value = getattr(summary, item.name)
        if isinstance(value, Quantiles):
            found |= {f"decision_{name}_ms": part for name, part in asdict(value).items()}
        else:
            found[item.name] = value
    return found


def over_seeds(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return the mean of each figure, and under ``interval95`` half the width of its interval.

    A figure that one of the runs lacks is None. A single summary is returned unchanged, without intervals.
    """
    if len(summaries) == 1:
        return asdict(summaries[0])
    each = [flat(summary) for summary in summaries]
    means: dict[str, float | None] = {}
    halves: dict[str, float | None] = {}
    for name in each[0]:
        known = [value for row in each if (value := row[name]) is not None]
        means[name], halves[name] = mean_and_half(known) if len(known) == len(each) else (None, None)
    return {**_nested(means), "interval95": halves}


def _nested(values: Mapping[str, float | None]) -> dict[str, Any]:
    """Return flat figures in the shape of a summary."""
    names = {f"decision_{item.name}_ms": item.name for item in fields(Quantiles)}
    found: dict[str, Any] = {}
    for item in fields(Summary):
        if item.name == "decision_ms":
            found[item.name] = {short: values[name] for name, short in names.items()}
        else:
            found[item.name] = values[item.name]
    return found
