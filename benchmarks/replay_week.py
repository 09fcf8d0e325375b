"""A week of submissions, sampled and compressed into minutes: pure, and the same for one seed."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, log
from random import Random
from statistics import median

from cadenza.policies.core.profile import Demand, Profile
from cadenza.policies.inputs.model_mix import model_mix, read_split

HOUR_S = 3600.0
WEEK_S = 168 * HOUR_S
MEMORY_GB = 1
"""Memory that each job requests for each GPU."""
SLACK_MIN = 5
"""Added to twice the job's work as its time limit: users ask for too much, and backfill lives on what they ask for."""


@dataclass(frozen=True)
class Row:
    """One job of the trace: when it came, seconds, its GPUs and how long it ran, seconds."""

    submit_s: float
    gpus: int
    duration_s: float


@dataclass(frozen=True)
class Scale:
    """Target of the scaled week: ``minutes`` of submissions that offer ``load`` times ``nodes`` x ``node_gpus``."""

    nodes: int = 16
    node_gpus: int = 8
    minutes: float = 30.0
    load: float = 1.1
    median_s: float = 120.0
    longest_s: float = 900.0
    iteration_s: float = 2.0
    """One iteration of each job at the proportional share."""

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.node_gpus


@dataclass(frozen=True)
class Submission:
    """One job of the replay; ``iterations`` of the scale's length at the proportional share are its work."""

    name: str
    submit_s: float
    gpus: int
    model: str
    iterations: int
    limit_min: int


@dataclass(frozen=True)
class Sample:
    """The jobs, in order of submission, and how they came about."""

    jobs: tuple[Submission, ...]
    week_jobs: int
    too_wide: int
    """Jobs of the week that need more than one node's GPUs, left out."""
    arrivals_factor: float
    """So many times faster than in the trace do jobs arrive."""
    trace_median_s: float
    made_s: float
    """Scaled values of the trace's median job."""
    exponent: float
    median_s: float
    longest_s: float
    load: float
    """Offered, in GPU seconds at the proportional share over GPU seconds of the window."""

    def stated(self) -> str:
        """Return how the week was compressed."""
        gpus = ", ".join(f"{count} x {gpus}" for gpus, count in sorted(self._gpus().items()))
        return (
            f"{len(self.jobs)} of the week's {self.week_jobs} jobs ({self.too_wide} wider than a node left out), "
            f"jobs x GPUs: {gpus}\n"
            f"arrivals compressed {self.arrivals_factor:.4g} times; run times d become "
            f"d' = {self.made_s:g} s (d / {self.trace_median_s:.4g} s)^{self.exponent:.3f}, which keeps their order: "
            f"median {self.median_s:.3g} s, longest {self.longest_s:.4g} s\n"
            f"offered load {self.load:.2f} at the proportional share"
        )

    def _gpus(self) -> dict[int, int]:
        widths = [job.gpus for job in self.jobs]
        return {width: widths.count(width) for width in set(widths)}


def read_rows(lines: Iterable[str], week: int, hours: float) -> tuple[Row, ...]:
    """Return the jobs submitted in the first hours of a week (0: the trace's first), seconds from its start."""
    start = week * WEEK_S
    table = csv.DictReader(lines)
    rows = (Row(float(row["submit_s"]) - start, int(row["gpus"]), float(row["duration_s"])) for row in table)
    return tuple(row for row in rows if 0 <= row.submit_s < hours * HOUR_S and row.duration_s > 0 and row.gpus > 0)


def sample(
    rows: tuple[Row, ...], hours: float, scale: Scale, profiles: Mapping[str, Profile], split: str, seed: int
) -> Sample:
    """Return a sample that offers the wanted load; raise ValueError where the rows are too few for it.

    Arrivals are compressed linearly. Run times of one trace differ a million times; a power of them, fixed by what
    the median and the longest become, keeps their order and brings them into the replay.
    """
    fitting = [row for row in rows if row.gpus <= scale.node_gpus]
    if not fitting:
        raise ValueError("the trace has no job of at most one node in these hours")
    middle = median(row.duration_s for row in fitting)
    longest = max(row.duration_s for row in fitting)
    exponent = log(scale.longest_s / scale.median_s) / log(longest / middle) if longest > middle else 1.0
    short = [replace(row, duration_s=scale.median_s * (row.duration_s / middle) ** exponent) for row in fitting]
    taken = _up_to(short, scale.load * scale.gpus * scale.minutes * 60, Random(seed))
    factor = hours * HOUR_S / (scale.minutes * 60)
    models = model_mix(profiles, read_split(split, "split"), "split").models()
    jobs = tuple(_job(number, row, factor, next(models), scale) for number, row in enumerate(taken))
    lengths = [job.iterations * scale.iteration_s for job in jobs]
    offered = sum(job.gpus * length for job, length in zip(jobs, lengths, strict=True))
    return Sample(
        jobs, len(rows), len(rows) - len(fitting), factor, middle, scale.median_s, exponent,
        median(lengths), max(lengths), offered / (scale.gpus * scale.minutes * 60),
    )  # fmt: skip


def _up_to(rows: list[Row], gpu_seconds: float, random: Random) -> list[Row]:
    """Return rows drawn until they ask for so many GPU seconds, in order of submission."""
    random.shuffle(rows)
    taken, asked = [], 0.0
    for row in rows:
        if asked >= gpu_seconds:
            return sorted(taken, key=lambda row: row.submit_s)
        taken.append(row)
        asked += row.gpus * row.duration_s
    raise ValueError(f"{len(rows)} jobs offer {asked / gpu_seconds:.2f} of the load: take more hours or less load")


def _job(number: int, row: Row, factor: float, model: str, scale: Scale) -> Submission:
    iterations = max(1, round(row.duration_s / scale.iteration_s))
    limit_min = ceil(2 * iterations * scale.iteration_s / 60) + SLACK_MIN
    return Submission(f"r{number:04}", row.submit_s / factor, row.gpus, model, iterations, limit_min)


def cpu_profiles(profiles: Mapping[str, Profile], iteration_s: float) -> dict[str, Profile]:
    """Return the profiles along their CPUs alone, at the proportional share of memory, for jobs of one pace.

    Two lanes halve a node's memory in Slurm's books, so that the memory axis would compare unequal nodes: each job is
    taken to have the memory of its share, and asks for ``MEMORY_GB`` a GPU.
    """
    return {name: _along_cpus(profile, iteration_s) for name, profile in profiles.items()}


def _along_cpus(profile: Profile, iteration_s: float) -> Profile:
    share_gb = profile.reference.memory_gb / profile.reference.gpus
    return replace(
        profile,
        iteration_s=iteration_s,
        memory_gb_per_gpu=(1.0,),
        throughput=tuple((profile.speed(cpus, share_gb),) for cpus in profile.cpus_per_gpu),
        storage_mb_s=(),
        declared_best=Demand(profile.best.cpus, 1.0),
        siblings={},
    )
