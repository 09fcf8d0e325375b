#!/usr/bin/env python3
"""Print what relief gains: the same jobs under Gandiva's sharing and our allocation, with relief moves and without.

The jobs are Synergy's (OSDI'22 §5: Poisson arrivals, published profiles), one GPU each, on a cluster that is not full.
Admission places them by affinity, which knows nothing of CPUs, so hungry models meet on one host while another has
CPUs to spare. A ratio above 1 says how much shorter the mean completion time becomes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.simulator.figures import Summary, mean_and_half, summarize
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.workloads.catalogue import parse_workload

LANES = 2
ROUND_S = 300.0
SHARING = SharingSettings(enforce=True, place=True, share_between_users=True, suspend=False)


def run(jobs: Sequence[TraceJob], cluster: str, *, floor: bool, relieve: bool) -> Summary:
    """Return the figures of one run; ``floor``: Slurm's books are a floor, as in the live service."""
    settings = PolicySettings(
        partitions=frozenset({PARTITION}),
        costs=Costs(round_s=ROUND_S),
        sharing=replace(SHARING, floor=floor),
        gandiva=GandivaSettings(relieve=relieve),
    )
    policy = build("fifo", "cadenza", "gandiva", settings)
    return summarize(simulate(jobs, read_cluster(cluster, LANES), policy, Setup(round_s=ROUND_S, lanes=LANES)))


def compare(arguments: argparse.Namespace, seed: int) -> float:
    """Print one seed's two runs and return the ratio of their mean completion times."""
    jobs = parse_workload(arguments.workload).generate(Random(seed))
    without, relieved = (run(jobs, arguments.nodes, floor=arguments.floor, relieve=on) for on in (False, True))
    ratio = (without.avg_jct_h or 0.0) / (relieved.avg_jct_h or 1.0)
    print(
        f"seed {seed}: mean completion {without.avg_jct_h:.2f} h without relief, {relieved.avg_jct_h:.2f} h with it, "
        f"ratio {ratio:.3f}; moves {without.migrations} and {relieved.migrations}; "
        f"GPUs in use {without.gpu_utilization:.0%}",
        flush=True,
    )
    return ratio


def main() -> int:
    """Print the ratios; 1 when relief does not gain on the mean of the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="synergy:load=1.2,split=40/50/10,jobs=150")
    parser.add_argument("--nodes", default="4x8:24:500")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--floor", action="store_true", help="Slurm's books are a floor, as in the live service")
    arguments = parser.parse_args()
    mean, half = mean_and_half([compare(arguments, seed) for seed in range(1, arguments.seeds + 1)])
    print(f"ratio of mean completion times, without relief over with it: {mean:.3f} ± {half or 0.0:.3f}")
    return int(mean <= 1.0)


if __name__ == "__main__":
    sys.exit(main())
