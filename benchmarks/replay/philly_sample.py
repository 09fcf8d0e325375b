"""Samples of Microsoft's Philly trace, jobs of a window drawn until they offer a load; and two made-up populations."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.published import synergy_profiles
from cadenza.policies.inputs.queue_rules import USUAL_WEIGHTS, QueueRules, Weights, with_shares
from cadenza.policies.inputs.trace import TraceJob

NODES, PER_NODE = 16, 8
GPUS = NODES * PER_NODE
CLUSTER = f"{NODES}x{PER_NODE}:24:500"
MEMORY_GB = 30
"""Memory that each job asks for, GB a GPU."""
DAY_S = 86400.0
NEAR = 0.005
"""A sample's load is as near to the one asked for, as a part of it."""
USERS = 6
"""Users of each virtual cluster: the trace has none."""
LOOSE = 0.4
USUAL_LIMITS_S = tuple(hours * 3600.0 for hours in (1, 4, 12, 24, 48, 72, 168))


class Group(NamedTuple):
    """The jobs of one group of the made-up month: its part of all, its users, and what they submit."""

    part: float
    prefix: str
    users: int
    digits: int
    widths: tuple[int, ...]
    weights: tuple[int, ...]
    median_s: float
    sigma: float


GROUPS = {
    "vision": Group(0.4, "vis", 9, 1, (1, 2, 4, 8), (55, 15, 20, 10), 3600, 1.9),
    "nlp": Group(0.3, "nlp", 7, 1, (1, 2, 4, 8, 16, 32), (35, 10, 20, 22, 10, 3), 5400, 2.0),
    "bio": Group(0.15, "bio", 6, 1, (0, 1, 2, 4), (25, 55, 10, 10), 7200, 1.6),
    "teaching": Group(0.15, "stu", 30, 2, (1,), (1,), 600, 1.2),
}


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
        chance.random()  # so that a seed gives the models of the recorded replays
        submit_s, iteration_s = job.submit_s - begin_s, profiles[model].iteration_s
        sample.append(PhillyJob(number, submit_s, job.gpus, job.run_s, job.user, model, iteration_s))
    return sample


# --- Jobs of accounts and users, with limits as users give them ----------------------------------------------------


@dataclass(frozen=True)
class Population:
    """The jobs of one sample in order of submission, the cluster that they are offered to, and its site's rules."""

    cluster: str
    jobs: tuple[TraceJob, ...]
    rules: QueueRules

    @classmethod
    def of(cls, cluster: str, jobs: Iterable[TraceJob]) -> Population:
        """Return jobs as a population whose accounts' shares are half by demand and half equal."""
        ordered = tuple(sorted(jobs, key=lambda job: (job.submit_s, job.id)))
        demand: dict[str, float] = {}
        for job in ordered:
            demand[job.account] = demand.get(job.account, 0.0) + job.gpus * job.work_s
        whole = sum(demand.values())
        shares = {name: 0.5 * part / whole + 0.5 / len(demand) for name, part in demand.items()}
        return cls(cluster, ordered, with_shares(QueueRules(weights=Weights(**USUAL_WEIGHTS)), shares))


@dataclass
class _Drawn:
    submit_s: float
    gpus: int
    run_s: float
    limit_s: float
    user: str
    account: str

    def submitted(self, number: int) -> TraceJob:
        """Return the job with its number; its limit is its run time at least."""
        run_s = max(self.run_s, 1.0)
        return TraceJob(
            number, self.submit_s, self.gpus, run_s, user=self.user, account=self.account,
            memory_gb_per_gpu=MEMORY_GB, time_limit_s=max(self.limit_s, run_s),
        )  # fmt: skip


def philly_population(
    trace: Sequence[PhillyJob], days: tuple[float, float], load: float, *, loose: bool, seed: int = 1
) -> Population:
    """Return jobs of a window, with a virtual cluster as account and one of six users of it drawn for each job.

    Their limits are tight (2 x run time + 300 s), or ``loose`` for 40 % of them: three or seven days.
    """
    chance = np.random.default_rng([seed, 11])
    jobs = []
    for job in draw_sample(trace, days, load, seed, synergy_profiles()):
        user, long, days_s = int(chance.integers(USERS)), chance.random() < LOOSE, DAY_S * (3, 7)[chance.integers(2)]
        limit_s = max(job.limit_s, days_s) if loose and long else job.limit_s
        drawn = _Drawn(job.submit_s, job.gpus, job.run_s, limit_s, f"{job.user}-{user}", job.user)
        jobs.append(drawn.submitted(job.id))
    return Population.of(CLUSTER, jobs)


def history_population() -> Population:
    """Return a made-up month of a site of 20 nodes with three research groups and a course, at load 0.88.

    15 % of the jobs fail within 90 s, 6 % end at their limit; 60 % of the limits are the shortest usual one that the
    run time fits, the others the partition's seven days.
    """
    chance, nodes, days = Random(7), 20, 28
    drawn: list[_Drawn] = []
    for _ in range(3000):
        group = chance.choices(list(GROUPS), [one.part for one in GROUPS.values()])[0]
        kind = GROUPS[group]
        user = chance.choice([f"{kind.prefix}{number:0{kind.digits}}" for number in range(kind.users)])
        day, hour = chance.randrange(days), min(23.9, max(0.0, chance.gauss(14.5, 4)))
        submit_s = day * DAY_S + int(hour * 3600) + chance.randrange(600)
        gpus = chance.choices(kind.widths, kind.weights)[0] if len(kind.widths) > 1 else kind.widths[0]
        run_s = max(3.0, min(6.5 * DAY_S, chance.lognormvariate(log(kind.median_s), kind.sigma)))
        if chance.random() < 0.15:  # noqa: PLR2004 (those that fail soon)
            run_s = chance.uniform(2, 90)
        fits = [limit for limit in USUAL_LIMITS_S if limit >= run_s]
        limit_s = chance.choice(fits or [7 * DAY_S]) if chance.random() < 0.6 else 7 * DAY_S  # noqa: PLR2004
        if chance.random() < 0.06 and limit_s < 3 * DAY_S:  # noqa: PLR2004 (those that run into it)
            run_s = limit_s
        drawn.append(_Drawn(submit_s, gpus, int(run_s), limit_s, user, group))
    scale = 0.93 * nodes * PER_NODE * days * DAY_S / sum(job.gpus * job.run_s for job in drawn)
    for job in drawn:
        if job.run_s > 90:  # noqa: PLR2004
            job.run_s = int(max(91, min(6.9 * DAY_S, job.run_s * scale)))
        while job.limit_s < job.run_s:
            job.limit_s = min(7 * DAY_S, job.limit_s * 2)
    drawn = sorted((job for job in drawn if job.gpus), key=lambda job: job.submit_s)
    first_s = drawn[0].submit_s
    for job in drawn:
        job.submit_s -= first_s
    return Population.of(f"{nodes}x{PER_NODE}:64:1000", (job.submitted(at) for at, job in enumerate(drawn)))


def large_population(jobs: int = 3000, load: float = 0.9, seed: int = 5) -> Population:
    """Return a made-up mix of a site with large models: 92 % short jobs of 1 to 8 GPUs, 2 % of 32 to 128 GPUs.

    The large ones have nine tenths of the GPU time, as far as five days each give it.
    """
    chance = np.random.default_rng(seed)
    rows: list[tuple[str, int, float]] = []
    for _ in range(jobs):
        part = chance.random()
        if part < 0.92:  # noqa: PLR2004
            gpus = int(chance.choice([1, 2, 4, 8], p=[0.5, 0.2, 0.15, 0.15]))
            rows.append(("short", gpus, chance.lognormal(log(900), 1.2)))
        elif part < 0.94:  # noqa: PLR2004
            gpus = int(chance.choice([32, 64, 128], p=[0.6, 0.3, 0.1]))
            rows.append(("large", gpus, chance.lognormal(log(14400), 0.8)))
        else:
            rows.append(("medium", int(chance.choice([4, 8, 16])), chance.lognormal(log(7200), 1.0)))
    rows = [(kind, gpus, min(max(run_s, 30.0), 4 * DAY_S)) for kind, gpus, run_s in rows]
    small, wide = (sum(g * s for kind, g, s in rows if (kind == "large") == large) for large in (False, True))
    rows = [(k, g, min(s * 9 * small / wide, 5 * DAY_S) if k == "large" else s) for k, g, s in rows]
    times = np.sort(chance.random(jobs)) * sum(g * s for _, g, s in rows) / (GPUS * load)
    found = []
    for at, ((kind, gpus, run_s), submit_s) in enumerate(zip(rows, times.tolist(), strict=True)):
        user = 12 + int(chance.integers(4)) if kind == "large" else int(chance.integers(12))
        found.append(_Drawn(submit_s, gpus, run_s, 2 * run_s + 300, f"u{user}", f"a{user % 4}").submitted(at))
    return Population.of(CLUSTER, found)
