"""A replay's jobs: some hours of the Philly trace, with arrivals, run times and limits compressed by one factor."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean, median

from philly_sample import DAY_S, GPUS, PER_NODE, PhillyJob, draw_sample

from cadenza.policies.core.profile import Profile

MOST_FACTOR = 48.0
LONGEST_S = DAY_S
SHORTEST_S = 5.0
"""Least run time after compression."""
ITERATION_S = 0.5
"""One iteration of each job after compression."""
LOAD_OFF = 0.02
START_MIN = 1
"""Added to each time limit: a start takes as long as ever, and no limit may end a job because of it."""
SHARES = {"large": 300, "small": 100}
"""Accounts and their FairShare; each has half of the jobs, drawn by the seed."""
WEIGHTS = {"age": 5000, "fairshare": 10_000}
"""PriorityWeights of the site."""
CALC_S = 60.0
"""PriorityCalcPeriod: the least that there is, and 48 minutes of the trace."""
MEMORY_GB = 1
"""Memory that each job requests for each GPU: lanes divide a node's memory in Slurm's books."""


@dataclass(frozen=True)
class Submission:
    """One job as it is submitted; seconds after compression."""

    name: str
    submit_s: float
    gpus: int
    iterations: int
    limit_min: int
    account: str = ""
    """Account that it is submitted to; empty: its user's own."""

    @property
    def nodes(self) -> int:
        """Return the number of nodes, of which it has equal parts."""
        return -(-self.gpus // PER_NODE)

    @property
    def work_s(self) -> float:
        """Return its run time."""
        return self.iterations * ITERATION_S


@dataclass(frozen=True)
class ReplaySample:
    """The jobs, in order of submission, and how they came about; ``hours`` are the trace's."""

    jobs: tuple[Submission, ...]
    hours: float
    factor: float
    before: tuple[PhillyJob, ...]
    """The sample that the same seed draws of all jobs."""
    kept: tuple[PhillyJob, ...]
    """The jobs of this one in the trace's time."""

    @property
    def minutes(self) -> float:
        """Return the time in which the jobs arrive."""
        return 60 * self.hours / self.factor

    def stated(self) -> str:
        """Return what was left out and dropped, and what that does to the run times."""
        long = sum(job.run_s > LONGEST_S for job in self.before)
        short = sum(job.run_s < SHORTEST_S * self.factor for job in self.before)
        load = sum(job.gpus * job.work_s for job in self.jobs) / (GPUS * self.minutes * 60)
        widths = [job.gpus for job in self.jobs]
        shown = ", ".join(f"{widths.count(width)} x {width}" for width in sorted(set(widths)))
        return (
            f"of {len(self.before)} jobs drawn in {self.hours:g} h, {long} run longer than {LONGEST_S / 3600:g} h and "
            f"are left out, {short} would run for less than {SHORTEST_S:g} s and are dropped; others make up the load\n"
            f"run time before: {_spread(self.before)}; after: {_spread(self.kept)}\n"
            f"{len(self.jobs)} jobs in {self.minutes:g} minutes, jobs x GPUs: {shown}; all times divided by "
            f"{self.factor:g} (time limits: 2 x run time + 300 s, then up to whole minutes, as Slurm keeps them, "
            f"and one for the start); offered load {load:.2f}"
        )


def _spread(jobs: Sequence[PhillyJob]) -> str:
    """Return the median and the mean of run times."""
    return f"median {median(job.run_s for job in jobs):.0f} s, mean {fmean(job.run_s for job in jobs):.0f} s"


@dataclass(frozen=True)
class Window:
    """Hours of the trace, the load that a sample of them offers to 16 nodes of 8 GPUs, and the times' common factor."""

    first_day: int
    hours: float
    load: float
    factor: float

    @property
    def days(self) -> tuple[float, float]:
        """Return the window's bounds, days since the beginning of the file."""
        return self.first_day, self.first_day + self.hours / 24


def replay_sample(trace: Sequence[PhillyJob], window: Window, seed: int, profiles: dict[str, Profile]) -> ReplaySample:
    """Return jobs of a window, drawn until they offer the load; raise ValueError where there are none, or too few."""
    if not 1 <= window.factor <= MOST_FACTOR:
        raise ValueError(f"the factor {window.factor:g} is not from 1 to {MOST_FACTOR:g}")
    fitting = [job for job in trace if SHORTEST_S * window.factor <= job.run_s <= LONGEST_S]
    before = draw_sample(trace, window.days, window.load, seed, profiles)
    kept = draw_sample(fitting, window.days, window.load, seed, profiles)
    offered = sum(job.gpus * job.run_s for job in kept) / (GPUS * window.hours * 3600)
    if offered < (1 - LOAD_OFF) * window.load:
        raise ValueError(f"the jobs of these hours that are neither left out nor dropped offer a load of {offered:.2f}")
    accounts = Random(seed).choices(list(SHARES), k=len(kept))
    jobs = tuple(_submission(job, window.factor, account) for job, account in zip(kept, accounts, strict=True))
    return ReplaySample(jobs, window.hours, window.factor, tuple(before), tuple(kept))


def _submission(job: PhillyJob, factor: float, account: str) -> Submission:
    nodes = -(-job.gpus // PER_NODE)
    gpus = nodes * ceil(job.gpus / nodes)
    limit_min = ceil((2 * job.run_s + 300) / factor / 60) + START_MIN
    iterations = ceil(job.run_s / factor / ITERATION_S)
    return Submission(f"r{job.id:04}", job.submit_s / factor, gpus, iterations, limit_min, account)


def write_replay_trace(path: Path, sample: ReplaySample) -> None:
    """Write the jobs as ``cadenza simulate`` takes them, in the trace's time, with the limits that they have."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        names = ("job", "submit_s", "gpus", "duration_s", "memory_gb_per_gpu", "time_limit_s", "checkpoints")
        out.writerow((*names, "account"))
        for number, job in enumerate(sample.jobs, 1):
            times = job.submit_s * sample.factor, job.work_s * sample.factor, job.limit_min * 60 * sample.factor
            out.writerow((number, times[0], job.gpus, times[1], MEMORY_GB, times[2], "yes", job.account))


def in_trace_time(sample: ReplaySample) -> list[PhillyJob]:
    """Return the jobs in the trace's time with the run times and GPUs that they have in the replay."""
    rows = zip(sample.kept, sample.jobs, strict=True)
    return [replace(job, run_s=one.work_s * sample.factor, gpus=one.gpus) for job, one in rows]
