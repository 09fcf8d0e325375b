#!/usr/bin/env python3
"""Print how long long simulations take on one core, through the same round as the live service.

Two runs: Synergy's setting (16x8:24:500, 8 jobs/h, FIFO with tune-coded, until jobs 4000-4999 have ended), and two
months of the Philly trace on 512 GPUs, its rows dealt to models 20/70/10 in order of submission. CPU seconds, the
median of ``--repeat`` runs, and the limit. The published simulator needs about 65 s for the first on a similar core.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from published_data import published

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import FREE_COSTS
from cadenza.policies.inputs.model_mix import model_mix
from cadenza.policies.inputs.published import synergy_profiles
from cadenza.policies.inputs.trace import TraceJob, read_trace
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.workloads.synergy import Synergy

SPLIT = (20.0, 70.0, 10.0)
SYNERGY_LIMIT_S, PHILLY_LIMIT_S = 3.0, 60.0
PEER_S = 65.0
PHILLY = "philly-2017-09-10.csv"


@dataclass(frozen=True)
class Timing:
    """One setting's CPU seconds."""

    name: str
    seconds: tuple[float, ...]
    limit_s: float
    rounds: int
    decided: int
    jobs: int

    @property
    def median(self) -> float:
        """Return the median of the repeats."""
        return statistics.median(self.seconds)


def synergy() -> Result:
    """Run Synergy's setting."""
    profiles = synergy_profiles()
    jobs = Synergy(8.0, 9000, model_mix(profiles, SPLIT, "split")).generate(Random(42), profiles)
    setup = Setup(synergy=True, costs=FREE_COSTS, until_done=(4000, 5000))
    return run(jobs, "16x8:24:500", "tune-coded", setup)


def philly(allocate: str) -> Result:
    """Run the Philly trace."""
    path = published(PHILLY)
    if path is None:
        raise SystemExit(f"{PHILLY} is not here: set CADENZA_DATA to the folder that has it")
    profiles = synergy_profiles()
    jobs = read_trace(path.read_text(), str(path), profiles, model_mix(profiles, SPLIT, "split"))
    return run(jobs, "64x8:24:500", allocate, Setup())


def run(jobs: Sequence[TraceJob], nodes: str, allocate: str, setup: Setup) -> Result:
    """Run FIFO with an allocation."""
    policy = build("fifo", allocate, "none", PolicySettings(partitions=frozenset({PARTITION})))
    return simulate(jobs, read_cluster(nodes), policy, setup)


def timed(name: str, work: Callable[[], Result], limit_s: float, repeat: int) -> Timing:
    """Run something several times."""
    seconds = []
    for _ in range(repeat):
        started = time.process_time()
        result = work()
        seconds.append(time.process_time() - started)
    ended = sum(job.finish_s is not None for job in result.jobs)
    return Timing(name, tuple(seconds), limit_s, result.counts.rounds, result.counts.decided, ended)


def main() -> int:
    """Print the table; 1 when a median is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--philly", default="tune-coded", help="allocations for the Philly trace, comma separated")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = [timed("synergy fifo/tune-coded", synergy, SYNERGY_LIMIT_S, arguments.repeat)]
    for allocate in filter(None, arguments.philly.split(",")):
        work = lambda allocate=allocate: philly(allocate)  # noqa: E731
        found.append(timed(f"philly fifo/{allocate}", work, PHILLY_LIMIT_S, max(arguments.repeat // 2, 1)))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if arguments.json:
        print(json.dumps({"runs": [{**vars(t), "median": t.median} for t in found], "peak_mb": peak_mb}))
    else:
        for t in found:
            print(
                f"{t.name:28s} {t.median:6.2f} s CPU, limit {t.limit_s:.0f} s: {t.median / t.limit_s:.2f}x of it; "
                f"{t.jobs} jobs ended, {t.decided} of {t.rounds} rounds decided"
            )
        print(f"the published simulator, first setting: {PEER_S:.0f} s, {PEER_S / found[0].median:.0f}x ours")
        print(f"peak memory {peak_mb:.0f} MB")
    return int(any(t.median > t.limit_s for t in found))


if __name__ == "__main__":
    sys.exit(main())
