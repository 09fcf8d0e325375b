"""Series of simulations of one policy: completion times over load, and capacity with a queue that is never empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from statistics import fmean
from typing import TypeAlias

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import positive, quoted
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import HOUR, mean_and_half, mean_over, summarize
from cadenza.policies.simulator.result_file import SweepPoint
from cadenza.policies.simulator.run_values import Result

Run: TypeAlias = Callable[[Sequence[TraceJob]], Result]
"""Simulates one set of jobs."""
MAX_LOADS = 200
GROWTH = 0.05
"""Growth of the queue over the second half that still counts as stable, as a share of the jobs that arrive then."""
FILL = 10
"""Least duration of the arrivals, in mean run times, to tell stable loads from others."""
PRESSURE = 1.5
"""Rate at which work arrives in a capacity run, relative to the GPUs' rate at the proportional share."""
EDGE = 0.1
"""Share of the arrivals' time over which a queue's length is averaged."""


def read_loads(text: str, where: str = "load sweep") -> tuple[float, ...]:
    """Return the loads of ``FROM:TO:STEP`` in jobs an hour, the last one included; raise InputError."""
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3:  # noqa: PLR2004
        raise InputError(f"{where}: {quoted(text)} is not FROM:TO:STEP, for example 4:10:0.5")
    first, last, step = (positive(part, f"{where} {quoted(text)}", 1e6) for part in parts)
    if last < first:
        raise InputError(f"{where}: {quoted(text)} ends below where it begins")
    count = int((last - first) / step + 1e-9) + 1
    if count > MAX_LOADS:
        raise InputError(f"{where}: {quoted(text)} are {count} loads, more than {MAX_LOADS}")
    return tuple(round(first + step * position, 9) for position in range(count))


# --- Load sweep ------------------------------------------------------------------------------------------


def sweep_point(
    load: float, seed: int, jobs: Sequence[TraceJob], result: Result, window: tuple[int, int] | None = None
) -> SweepPoint:
    """Return one load's figures with one seed."""
    summary = summarize(result, window)
    return SweepPoint(load, seed, summary.avg_jct_h, summary.gpu_utilization, stable(jobs, result))


def stable(jobs: Sequence[TraceJob], result: Result) -> bool:
    """Return True if the cluster keeps up with a load.

    The rule: over the second half of the arrivals the number of waiting jobs grows by no more than 5 % of the jobs
    that arrive in it. The queue's length is the mean over a tenth of the arrivals' time, before the middle and
    before the end; a run that ended sooner counts up to there.
    """
    last = min(max(job.submit_s for job in jobs), result.end_s)
    half, edge = last / 2, last * EDGE
    grown = _waiting(result, last - edge, last) - _waiting(result, half - edge, half)
    return grown <= GROWTH * sum(half < job.submit_s <= last for job in jobs)


def too_short(jobs: Sequence[TraceJob]) -> bool:
    """Return True if the arrivals end before the cluster can have filled up: within ten mean run times."""
    return max(job.submit_s for job in jobs) < FILL * fmean(job.work_s for job in jobs)


def _waiting(result: Result, begin_s: float, end_s: float) -> float:
    return mean_over(result.samples, lambda sample: sample.waiting, begin_s, end_s)


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One load over all seeds: mean JCT in hours with half its 95 % interval, share of GPUs held, whether stable."""

    load: float
    mean_jct_h: float | None
    interval95: float | None
    gpu_utilization: float
    stable: bool
    """At most of the seeds."""


def load_rows(points: Iterable[SweepPoint]) -> tuple[LoadRow, ...]:
    """Return the points over all seeds, in order of the loads."""
    by_load: dict[float, list[SweepPoint]] = {}
    for point in points:
        by_load.setdefault(point.load, []).append(point)
    rows = []
    for load, seeds in sorted(by_load.items()):
        known = [point.mean_jct_h for point in seeds if point.mean_jct_h is not None]
        mean, half = mean_and_half(known) if len(known) == len(seeds) else (None, None)
        held = fmean(point.gpu_utilization for point in seeds)
        rows.append(LoadRow(load, mean, half, held, sum(point.stable for point in seeds) * 2 > len(seeds)))
    return tuple(rows)


def highest_stable(rows: Sequence[LoadRow]) -> float | None:
    """Return the highest load below which all loads are stable, or None if the lowest is not."""
    found = None
    for row in rows:
        if not row.stable:
            break
        found = row.load
    return found


# --- Capacity --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """Throughput of a policy while jobs always wait."""

    gpu_hours_per_hour: float
    """Nominal GPU hours (run time at the proportional share times GPUs) of the jobs that ended, in an hour."""
    jobs_per_hour: float
    """The same over the mean nominal GPU hours of a job."""
    moves_per_job_hour: float
    """Migrations in an hour that a job runs."""
    hours: float
    """Length of the time over which it is measured."""


def backlogged(jobs: Sequence[TraceJob], gpus: int, pressure: float = PRESSURE) -> tuple[TraceJob, ...]:
    """Return the jobs, in their order, with submission times that keep the queue short and never empty.

    At the start there is nominal work for all GPUs twice over; from then on it arrives ``pressure`` times as fast as
    the GPUs could do it at the proportional share. That depends on the jobs alone, so that every policy sees the same
    arrivals. Times in whole seconds.
    """
    each = [job.gpus * job.work_s for job in jobs]
    head = 2 * gpus * sum(each) / max(sum(job.gpus for job in jobs), 1)
    before = accumulate(each, initial=0.0)
    return tuple(
        replace(job, submit_s=float(ceil(max(work - head, 0.0) / (pressure * gpus))))
        for job, work in zip(jobs, before, strict=False)
    )


def capacity(
    jobs: Sequence[TraceJob],
    gpus: int,
    run: Run,
    *,
    drop: float = 0.2,
    pressure: float = PRESSURE,
    job_gpu_h: float | None = None,
) -> Capacity:
    """Return a policy's capacity for a mix of jobs.

    ``run`` simulates the given jobs under strict first come, first served and may stop at the last submission, beyond
    which nothing is counted. The first ``drop`` of the time is not counted either. ``pressure``: see ``backlogged``.
    ``job_gpu_h``: mean nominal GPU hours of a job, where it is known better than from ``jobs``. Raise InputError when
    the queue was empty for a while, since that is not the capacity: give more pressure or more jobs.
    """
    waiting = backlogged(jobs, gpus, pressure)
    result = run(waiting)
    end_s = min(waiting[-1].submit_s, result.end_s)
    begin_s = drop * end_s
    if end_s <= begin_s:
        raise InputError(f"capacity: {len(jobs)} jobs are too few to keep {gpus} GPUs busy")
    ends = [*(sample.time_s for sample in result.samples[1:]), result.end_s]
    for sample, until_s in zip(result.samples, ends, strict=True):
        if sample.time_s < end_s and until_s > begin_s and not sample.waiting:
            raise InputError(f"capacity: no job waits at {sample.time_s:g} s; the queue must never be empty")
    hours = (end_s - begin_s) / HOUR
    ended = sum(
        job.work_s * job.gpus for job in result.jobs if job.finish_s is not None and begin_s < job.finish_s <= end_s
    )
    mean_gpu_h = job_gpu_h if job_gpu_h is not None else fmean(job.work_s * job.gpus for job in jobs) / HOUR
    running = mean_over(result.samples, lambda sample: sample.running, 0.0, result.end_s) * result.end_s / HOUR
    rate = ended / HOUR / hours
    return Capacity(rate, rate / mean_gpu_h, result.counts.migrations / running if running else 0.0, hours)
