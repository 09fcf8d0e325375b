"""Figures of a run of the demo, and the promises that it must keep (pure)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MILESTONE_GAIN = 5.0
MEAN_LIMIT = 1.0
P95_LIMIT = 1.1
RATE_LIMIT = 0.97
UNFAVORABLE_LIMIT = 0.97


@dataclass(frozen=True)
class Result:
    """One finished job, times in seconds since the epoch."""

    job: str
    user: str
    gpus: int
    submit_s: float
    start_s: float
    hundredth_s: float
    end_s: float
    iterations: int
    losses: str
    """Digest of all losses."""


@dataclass(frozen=True)
class Stretch:
    """A time in which a job held GPUs of a host, in seconds since the epoch."""

    job: str
    host: str
    gpus: tuple[int, ...]
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Switch:
    """One yield or resume, durations in seconds."""

    kind: str
    boundary_s: float
    total_s: float


@dataclass(frozen=True)
class Run:
    """Everything recorded of one list on one cluster."""

    name: str
    gpus: int
    results: tuple[Result, ...]
    stretches: tuple[Stretch, ...]
    switches: tuple[Switch, ...] = ()

    @property
    def span(self) -> tuple[float, float]:
        """First submission and last end."""
        return min(result.submit_s for result in self.results), max(result.end_s for result in self.results)


@dataclass(frozen=True)
class Figures:
    """One run in numbers; times in seconds, latencies None without any switch of their kind."""

    jobs: int
    time_to_100_s: float
    """Mean, from submission."""
    jct_mean_s: float
    jct_p95_s: float
    iterations_per_s: float
    """Sum over all jobs, from the first submission to the last end."""
    makespan_s: float
    gpu_holding: float
    """Part of the GPU time of the run in which some job held the GPU."""
    yields: int
    boundary_p50_s: float | None
    boundary_p99_s: float | None
    yield_p50_s: float | None
    yield_p99_s: float | None
    resume_p50_s: float | None
    resume_p99_s: float | None


@dataclass(frozen=True)
class Check:
    """One promise, kept or not, and the numbers."""

    ok: bool
    text: str


def percentile(values: Iterable[float], part: float) -> float | None:
    """Return the nearest-rank percentile; None of no values.

    >>> percentile([3, 1, 2], 0.5), percentile([], 0.5)
    (2, None)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of at least one value."""
    return sum(values) / len(values)


def figures(run: Run) -> Figures:
    """Return one run in numbers; it must have a result."""
    first, last = run.span
    times = [result.end_s - result.submit_s for result in run.results]
    yields = [switch for switch in run.switches if switch.kind == "yield"]
    resumes = [switch.total_s for switch in run.switches if switch.kind == "resume"]
    return Figures(
        jobs=len(run.results),
        time_to_100_s=mean([result.hundredth_s - result.submit_s for result in run.results]),
        jct_mean_s=mean(times),
        jct_p95_s=percentile(times, 0.95) or 0.0,
        iterations_per_s=sum(result.iterations for result in run.results) / (last - first),
        makespan_s=last - first,
        gpu_holding=held_s(run.stretches) / (run.gpus * (last - first)),
        yields=len(yields),
        boundary_p50_s=percentile([switch.boundary_s for switch in yields], 0.5),
        boundary_p99_s=percentile([switch.boundary_s for switch in yields], 0.99),
        yield_p50_s=percentile([switch.total_s for switch in yields], 0.5),
        yield_p99_s=percentile([switch.total_s for switch in yields], 0.99),
        resume_p50_s=percentile(resumes, 0.5),
        resume_p99_s=percentile(resumes, 0.99),
    )


def held_s(stretches: Iterable[Stretch]) -> float:
    """Return the GPU seconds held."""
    return sum((stretch.to_s - stretch.from_s) * len(stretch.gpus) for stretch in stretches)


def overlaps(stretches: Sequence[Stretch]) -> list[tuple[Stretch, Stretch]]:
    """Return pairs of stretches in which two jobs held the same GPU at once; there should be none."""
    found = []
    ordered = sorted(stretches, key=lambda stretch: stretch.from_s)
    for number, first in enumerate(ordered):
        for second in ordered[number + 1 :]:
            if second.from_s >= first.to_s:
                break
            if first.host == second.host and set(first.gpus) & set(second.gpus) and first.job != second.job:
                found.append((first, second))
    return found


def different_losses(plain: Run, shared: Run) -> list[str]:
    """Return the jobs whose losses are not bit-identical in both runs."""
    before = {result.job: result.losses for result in plain.results}
    return sorted(result.job for result in shared.results if before.get(result.job) != result.losses)


def check_favorable(plain: Figures, shared: Figures) -> list[Check]:
    """Return the promises for a list with a queue."""
    gain = plain.time_to_100_s / shared.time_to_100_s
    average = shared.jct_mean_s / plain.jct_mean_s
    tail = shared.jct_p95_s / plain.jct_p95_s
    rate = shared.iterations_per_s / plain.iterations_per_s
    return [
        Check(gain >= MILESTONE_GAIN, f"first 100 iterations {gain:.1f}x sooner (at least {MILESTONE_GAIN:g}x)"),
        Check(average <= MEAN_LIMIT, f"mean completion time {average:.2f} of plain Slurm's (at most {MEAN_LIMIT:g})"),
        Check(tail <= P95_LIMIT, f"p95 completion time {tail:.2f} of plain Slurm's (at most {P95_LIMIT:g})"),
        Check(rate >= RATE_LIMIT, f"iterations per second {rate:.3f} of plain Slurm's (at least {RATE_LIMIT:g})"),
    ]


def check_unfavorable(plain: Figures, shared: Figures) -> list[Check]:
    """Return the promise for a list without a queue."""
    rate = shared.iterations_per_s / plain.iterations_per_s
    bound = f"of plain Slurm's (at least {UNFAVORABLE_LIMIT:g})"
    text = f"without a queue, iterations per second {rate:.3f} {bound}"
    return [Check(rate >= UNFAVORABLE_LIMIT, text)]


def check_runs(plain: Run, shared: Run) -> list[Check]:
    """Return the promises that hold for every list: the same losses, and never two jobs on a GPU."""
    different, twice = different_losses(plain, shared), overlaps(shared.stretches)
    same = len(shared.results) - len(different)
    return [
        Check(not different, f"losses of {same} of {len(shared.results)} jobs are bit-identical in both runs"
              + (f"; different: {', '.join(different)}" if different else "")),
        Check(not twice, "no GPU was held by two jobs at once"
              + (f", except by {twice[0][0].job} and {twice[0][1].job}" if twice else "")),
    ]  # fmt: skip


def as_json(run: Run) -> dict[str, Any]:
    """Return a run and its figures as JSON values."""
    return {**asdict(run), "figures": asdict(figures(run))}
