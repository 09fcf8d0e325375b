#!/usr/bin/env python3
"""Print what a cluster of 128 GPUs gets through, and how long jobs take below that, by allocation.

Capacity: nominal GPU-hours (run time at the proportional share) that end in an hour while strict FIFO always has a
queue, the first 20 % of the time not counted, over 16.77 h, the mean of the published durations. Every seed's jobs
and arrivals are the same for all allocations, and every move, restart and retune costs what `policies/data/costs.toml`
says; `--free` sets all costs to 0. JCT: jobs 4000-4999 of 9,000, FIFO, at a load below saturation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean, stdev
from typing import TypeAlias

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import FREE_COSTS, SimCosts
from cadenza.policies.inputs.model_mix import model_mix
from cadenza.policies.inputs.published import default_costs, synergy_profiles
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.load_sweep import Capacity, capacity
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.workloads.synergy import MEAN_JOB_H, Synergy

CLUSTER, GPUS = "16x8:24:500", 128
SPLITS = {"20/70/10": (20.0, 70.0, 10.0), "33/33/33": (33.0, 33.0, 33.0)}
ALLOCATIONS = ("proportional", "tune", "tune-coded", "cadenza")
LOADS = {"20/70/10": 7.0, "33/33/33": 9.0}
MOVES = 0.1


@dataclass(frozen=True)
class Limit:
    """One promise: the ratio of ours to a peer, and what it must be."""

    what: str
    split: str
    peer: str
    ratio: float
    limit: float
    at_least: bool

    @property
    def kept(self) -> bool:
        """Return whether it holds."""
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    def line(self) -> str:
        """Return it in words."""
        sign = ">=" if self.at_least else "<="
        return (
            f"{self.what} {self.split}: cadenza {self.ratio:.3f}x {self.peer}, "
            f"to be {sign} {self.limit}: {'kept' if self.kept else 'NOT KEPT'}"
        )


def workload(split: str, load: float, count: int, seed: int) -> tuple[TraceJob, ...]:
    """Return one-GPU jobs of the published generator."""
    profiles = synergy_profiles()
    return Synergy(load, count, model_mix(profiles, SPLITS[split], "split")).generate(Random(seed), profiles)


def run(jobs: Sequence[TraceJob], allocate: str, setup: Setup) -> Result:
    """Run FIFO with an allocation."""
    policy = build("fifo", allocate, "none", PolicySettings(partitions=frozenset({PARTITION})))
    return simulate(jobs, read_cluster(CLUSTER), policy, setup)


def measure_capacity(split: str, allocate: str, seeds: Sequence[int], count: int, costs: SimCosts) -> list[Capacity]:
    """Return the capacity for each seed."""
    found = []
    for seed in seeds:
        jobs = workload(split, 9.0, count, seed)

        def once(waiting: Sequence[TraceJob]) -> Result:
            return run(waiting, allocate, Setup(costs=costs, horizon_s=waiting[-1].submit_s))

        found.append(capacity(jobs, GPUS, once, job_gpu_h=MEAN_JOB_H))
    return found


def measure_jct(split: str, allocate: str, seeds: Sequence[int], costs: SimCosts) -> list[float]:
    """Return the mean JCT of jobs 4000-4999 for each seed, hours."""
    found = []
    for seed in seeds:
        jobs = workload(split, LOADS[split], 9000, seed)
        result = run(jobs, allocate, Setup(costs=costs, until_done=(4000, 5000)))
        found.append(fmean(job.jct_s for job in result.jobs[4000:5000] if job.jct_s is not None) / 3600)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the mean of the paired ratios."""
    return fmean(a / b for a, b in zip(ours, theirs, strict=True))


Table: TypeAlias = Mapping[str, Mapping[str, list[float]]]
"""Values for each seed, by split and allocation."""


def limits(rates: Table, jcts: Table) -> list[Limit]:
    """Return every promise with what was measured."""
    found = []
    for split, peer, limit in (
        ("20/70/10", "proportional", 1.13),
        ("33/33/33", "proportional", 1.24),
        ("33/33/33", "tune", 1.12),
    ):
        value = ratio(rates[split]["cadenza"], rates[split][peer])
        found.append(Limit("capacity", split, peer, value, limit, at_least=True))
    for split, limit in (("20/70/10", 1.01), ("33/33/33", 0.7)):
        if jcts:
            value = ratio(jcts[split]["cadenza"], jcts[split]["tune"])
            found.append(Limit(f"mean JCT at {LOADS[split]:g} jobs/h", split, "tune", value, limit, at_least=False))
    return found


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation in words."""
    return f"{fmean(values):6.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:6.2f}"


def main() -> int:
    """Print the tables; 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1")
    parser.add_argument("--jobs", type=int, default=4000, help="jobs of a capacity run")
    parser.add_argument("--free", action="store_true", help="no move, restart or retune costs anything")
    parser.add_argument("--no-jct", action="store_true", help="leave out the long JCT runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    costs = FREE_COSTS if arguments.free else default_costs()

    def say(text: str) -> None:
        if not arguments.json:
            print(text, flush=True)

    rates: dict[str, dict[str, list[float]]] = {}
    moves: dict[str, dict[str, float]] = {}
    for split in SPLITS:
        rates[split], moves[split] = {}, {}
        for allocate in ALLOCATIONS:
            found = measure_capacity(split, allocate, seeds, arguments.jobs, costs)
            rates[split][allocate] = [value.jobs_per_hour for value in found]
            moves[split][allocate] = fmean(value.moves_per_job_hour for value in found)
            say(
                f"capacity {split} {allocate:13s} {spread(rates[split][allocate])} jobs/h, "
                f"{moves[split][allocate]:.3f} moves a job-hour"
            )
    jcts: dict[str, dict[str, list[float]]] = {}
    for split in SPLITS if not arguments.no_jct else ():
        jcts[split] = {}
        for allocate in ("proportional", "tune", "cadenza"):
            jcts[split][allocate] = measure_jct(split, allocate, seeds, costs)
            say(f"mean JCT {split} at {LOADS[split]:g} jobs/h {allocate:13s} {spread(jcts[split][allocate])} h")
    kept = limits(rates, jcts)
    restless = [split for split in SPLITS if moves[split]["cadenza"] > MOVES]
    if arguments.json:
        print(json.dumps({"jobs_per_hour": rates, "moves": moves, "jct_h": jcts, "limits": [asdict(k) for k in kept]}))
    for limit in kept:
        say(limit.line())
    say(f"moves a job-hour, to be <= {MOVES}: {'NOT KEPT in ' + ', '.join(restless) if restless else 'kept'}")
    return int(bool(restless) or not all(limit.kept for limit in kept))


if __name__ == "__main__":
    sys.exit(main())
