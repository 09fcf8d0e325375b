#!/usr/bin/env python3
"""Print how much of the best possible total throughput each allocation reaches on rounds packed from scratch.

16 nodes of 8 GPUs, 24 CPUs and 500 GB; jobs for all 128 GPUs, drawn as in the published measurement of Synergy's
simulator: with ``random.seed(s)`` each job draws u = random() times the sum of the split for vision, language or
speech, then ``choice`` among its models. In the mixes each job then draws its GPUs; one for which no room is left is
drawn again. One-GPU rounds are measured against ILP1, which counts all nodes as one machine; mixes against a bound
that keeps jobs of up to 8 GPUs on one node and 16 GPUs on two (``bounds.py``). A job runs at its slowest node.

"placed" says whether all jobs are: the bound holds for plans that place all, so one that leaves large jobs out can
come out above 1. "fair" says whether every job placed is at or above the throughput of its proportional share. The
CPU time is one call's, the median over the seeds. The exit code is 1 when our allocation misses a limit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

from bounds import node_bound

from cadenza.policies.allocation.ilp import ilp1
from cadenza.policies.allocation.problem import Case, Plan, Server, placement_speed, proportional_share
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.inputs.published import synergy_profiles
from cadenza.policies.registry import ENTRIES, allocation

TASKS = (
    ("alexnet", "res18", "res50", "mobilenet", "shufflenet"),
    ("gnmt", "transformer", "lstm"),
    ("m5", "deepspeech"),
)
"""The published order of the models of vision, language and speech."""
SPLITS = ((20, 70, 10), (33, 33, 33))
SIZES = {
    "1": {1: 1},
    "1/2/4/8": {1: 70, 2: 10, 4: 15, 8: 5},
    "1/2/4/8/16": {1: 70, 2: 10, 4: 12, 8: 5, 16: 3},
}
"""Shares of the jobs by GPUs: all one; as in the published generator; with some of 16."""
GPUS = 128
SERVERS = tuple(Server(f"n{number:02}", 8, 24, 512000) for number in range(1, 17))
TYPES = {server.name: "" for server in SERVERS}
OURS = "cadenza"
PUBLISHED = (0.88, 0.91)
"""TUNE over ILP1, one-GPU jobs, as the published code reaches it."""
LIMITS = {False: (0.995, 0.985), True: (0.985, 0.985)}
"""Ours, mean and every seed: for one-GPU jobs, and (True) for mixes."""
EPSILON = 1e-9


@dataclass(frozen=True)
class Setting:
    """One kind of round: a split of tasks, sizes of jobs, and whether a job's speed counts for each of its GPUs."""

    split: tuple[int, int, int]
    sizes: str
    weighted: bool = False

    @property
    def mixed(self) -> bool:
        """Return whether jobs have different numbers of GPUs."""
        return len(SIZES[self.sizes]) > 1

    def __str__(self) -> str:
        objective = ", by GPUs" if self.weighted else ""
        return f"{'/'.join(map(str, self.split))}, {self.sizes} GPU{'s' if self.mixed else ''} a job{objective}"


SETTINGS = tuple(
    Setting(split, sizes, weighted)
    for sizes, some in SIZES.items()
    for weighted in ((False, True) if len(some) > 1 else (False,))
    for split in SPLITS
)


@dataclass(frozen=True)
class Round:
    """One allocation's result in one drawn round."""

    ratio: float
    placed: bool
    fair: bool
    cpu_s: float


@dataclass(frozen=True)
class Row:
    """One allocation in one setting, over the seeds."""

    setting: str
    allocation: str
    mean: float
    least: float
    all_placed: bool
    all_fair: bool
    cpu_ms: float
    limit: str
    met: bool | None
    """None where there is no limit."""


@cache
def drawn(setting: Setting, seed: int) -> Case:
    """Return the round of a seed; the two objectives share it but for ``weighted``."""
    rng, profiles, weights = random.Random(seed), synergy_profiles(), SIZES[setting.sizes]
    jobs: list[Job] = []
    left = GPUS
    while left:
        draw = rng.random() * sum(setting.split)
        task = TASKS[0 if draw < setting.split[0] else 1 if draw < setting.split[0] + setting.split[1] else 2]
        profile = profiles[rng.choice(task)]
        gpus = rng.choices(list(weights), list(weights.values()))[0] if setting.mixed else 1
        if gpus <= left:
            key = JobKey(len(jobs) + 1, 0)
            jobs.append(Job(key, "user", "", "gpu", "", "PENDING", gpus, gpus, 1024 * gpus, 1, 0.0, profile=profile))
            left -= gpus
    return Case(0.0, SERVERS, tuple(jobs), len(jobs), weighted=setting.weighted)


@cache
def bound(setting: Setting, seed: int) -> float:
    """Return what no plan for a round exceeds."""
    case = drawn(setting, seed)
    if not setting.mixed:
        return ilp1(case).bound
    return node_bound(len(SERVERS), SERVERS[0], case.jobs, weighted=setting.weighted).bound


def judge(case: Case, plan: Plan, most: float, cpu_s: float) -> Round:
    """Return how good a plan is; raise AssertionError for one that gives more than there is."""
    used = {server.name: [0, 0, 0] for server in SERVERS}
    total, fair = 0.0, True
    for job in case.jobs:
        placement = plan.placements.get(job.key, ())
        if not placement:
            continue
        for share in placement:
            used[share.node] = [have + take for have, take in zip(used[share.node], share[1:], strict=True)]
        speed = placement_speed(job.profile, placement, TYPES)
        least = tuple(proportional_share(SERVERS[0], share.gpus)._replace(node=share.node) for share in placement)
        fair = fair and speed >= placement_speed(job.profile, least, TYPES) - EPSILON
        total += speed * (job.gpus if case.weighted else 1)
        if sum(share.gpus for share in placement) != job.gpus:
            raise AssertionError(f"job {job.key} has not its {job.gpus} GPUs: {placement}")
    for server in SERVERS:
        if any(taken > has for taken, has in zip(used[server.name], server[1:4], strict=True)):
            raise AssertionError(f"{server.name} gives more than it has: {used[server.name]}")
    return Round(total / most, len(plan.placements) == len(case.jobs), fair, cpu_s)


def row(setting: Setting, name: str, seeds: int) -> Row:
    """Return one line of the table."""
    allocate = allocation(name)
    rounds = []
    for seed in range(seeds):
        case = drawn(setting, seed)
        started = time.process_time()
        plan = allocate(case)
        cpu_s = time.process_time() - started
        rounds.append(judge(case, plan, bound(setting, seed), cpu_s))
    mean, least = statistics.mean(one.ratio for one in rounds), min(one.ratio for one in rounds)
    placed, fair = all(one.placed for one in rounds), all(one.fair for one in rounds)
    limit, met = _limit(setting, name, mean, least, whole=placed and fair)
    return Row(
        str(setting), name, mean, least, placed, fair, statistics.median(one.cpu_s for one in rounds) * 1e3, limit, met
    )


def _limit(setting: Setting, name: str, mean: float, least: float, *, whole: bool) -> tuple[str, bool | None]:
    if name == OURS:
        of_mean, of_each = LIMITS[setting.mixed]
        return f"mean >= {of_mean}, each >= {of_each}, all fair", whole and mean >= of_mean and least >= of_each
    if name in {"tune", "tune-coded"} and not setting.mixed:
        return f"published {PUBLISHED[0]}-{PUBLISHED[1]}", None
    return "", None


def available(names: Sequence[str]) -> list[str]:
    """Return the allocations to measure; end with exit code 2 for an unknown name."""
    try:
        for name in names:
            allocation(name)
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    return list(names)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    setting = ""
    for one in rows:
        if one.setting != setting:
            setting = one.setting
            print(f"\n{setting}")
            print("  allocation     mean   least  placed  fair  CPU ms  limit")
        placed, fair = ("all" if one.all_placed else "some"), ("all" if one.all_fair else "no")
        verdict = "" if one.met is None else "  met" if one.met else "  MISSED"
        print(
            f"  {one.allocation:13s} {one.mean:.4f} {one.least:.4f}  {placed:6s}  {fair:4s} {one.cpu_ms:7.2f}"
            f"  {one.limit}{verdict}"
        )


def main() -> int:
    """Measure and print; 1 when ours misses a limit."""
    every = [entry.name for entry in ENTRIES if entry.kind == "allocation"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocations", default=",".join(every), help="comma separated; default: all")
    parser.add_argument("--seeds", type=int, default=20, help="rounds drawn for each setting; default: 20")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be 1 or more")
    names = available(options.allocations.split(","))
    rows = [row(setting, name, options.seeds) for setting in SETTINGS for name in names]
    if options.json:
        print(json.dumps([asdict(one) for one in rows]))
    else:
        print(f"share of the bound, {options.seeds} seeds, {len(SERVERS)}x8:24:500, {GPUS} GPUs in demand")
        show(rows)
    return int(any(one.met is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
