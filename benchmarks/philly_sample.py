"""Samples of Microsoft's Philly trace: jobs of a window, drawn until their GPU time offers a load."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from cadenza.policies.core.profile import Profile

NODES, PER_NODE = 16, 8
GPUS = NODES * PER_NODE
CLUSTER = f"{NODES}x{PER_NODE}:24:500"
MEMORY_GB = 30
"""Memory that each job asks for, GB a GPU."""
DAY_S = 86400.0
NEAR = 0.005
"""A sample's load is as near to the one asked for, as a part of it."""


@dataclass(frozen=True)
class PhillyJob:
    """One job of the trace; times in seconds, ``submit_s`` since the beginning of its window."""

    id: int
    submit_s: float
    gpus: int
    run_s: float
    user: str
    """Its virtual cluster."""
    model: str = ""
    iteration_s: float = 1.0
    draw: float = 0.0
    """A number in [0, 1) drawn by the seed; the jobs below 0.5 are the half that can move."""

    @property
    def limit_s(self) -> float:
        """Return the time limit that its user gives it."""
        return 2 * self.run_s + 300

    @property
    def iterations(self) -> int:
        """Return the number of whole iterations in its run time."""
        return int(self.run_s / self.iteration_s)


def read_philly(path: Path) -> list[PhillyJob]:
    """Return the jobs of the file that fit the cluster; times since the file's beginning."""
    with path.open(newline="") as file:
        rows = [
            PhillyJob(int(row["job"]), float(row["submit_s"]), int(row["gpus"]), float(row["duration_s"]), row["vc"])
            for row in csv.DictReader(file)
        ]
    return [job for job in rows if 0 < job.gpus <= GPUS and job.run_s > 0]


def draw_sample(
    trace: Sequence[PhillyJob], days: tuple[float, float], load: float, seed: int, profiles: dict[str, Profile]
) -> list[PhillyJob]:
    """Return jobs of the window of ``days``, in random order until their GPU time offers ``load``; by submission.

    Each has a model of the published profiles. The same seed gives the same jobs.
    """
    begin_s, end_s = days[0] * DAY_S, days[1] * DAY_S
    target = load * GPUS * (end_s - begin_s)
    window = [job for job in trace if begin_s <= job.submit_s < end_s]
    taken: list[PhillyJob] = []
    used = 0.0
    for at in np.random.default_rng(seed).permutation(len(window)).tolist():
        job = window[at]
        if used + job.gpus * job.run_s > (1 + NEAR) * target:
            continue
        taken.append(job)
        used += job.gpus * job.run_s
        if used >= (1 - NEAR) * target:
            break
    models, chance = sorted(profiles), Random(seed)
    sample = []
    for number, job in enumerate(sorted(taken, key=lambda job: (job.submit_s, job.id)), 1):
        model = chance.choice(models)
        sample.append(
            PhillyJob(
                number, job.submit_s - begin_s, job.gpus, job.run_s, job.user, model, profiles[model].iteration_s,
                chance.random(),
            )
        )  # fmt: skip
    return sample


def write_trace(path: Path, sample: Sequence[PhillyJob], movable: float) -> None:
    """Write a sample as ``cadenza simulate`` takes it; jobs drawn below ``movable`` keep checkpoints.

    A job's model says how long an iteration takes. It is not named in the file, for the published run times are those
    with the resources that the jobs ask for, and not those at the profile's proportional share of memory.
    """
    names = ("job", "submit_s", "gpus", "iterations", "duration_s", "memory_gb_per_gpu", "user", "checkpoints")
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow((*names, "time_limit_s"))
        for job in sample:
            keeps = "yes" if job.draw < movable else "no"
            facts = (job.id, job.submit_s, job.gpus, max(job.iterations, 1), job.run_s, MEMORY_GB, job.user, keeps)
            out.writerow((*facts, job.limit_s))
