#!/usr/bin/env python3
"""The simulator's prediction of a replay's mean completion time under Cadenza, with costs measured on another replay.

The jobs are drawn again as the replay's command says, and the policy is built from its settings. What a launch, a
start-up and a move cost is what the jobs of the other replay (another seed) noted. One simulation says little: a second
more puts a wide job behind another one, and all that follows is different. So there are several, in which each job has
the start-up of some job of the other replay, and their mean counts. Exit code 1 when it is off by more than 10 %.

    benchmarks/replay.py --only cadenza --seed 2 --out results/replay_costs.json …
    benchmarks/replay_predict.py results/replay.json --costs results/replay_costs.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from multiprocessing import Pool
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from typing import Any

from replay import arguments, drawn
from replay_figures import Costs
from replay_week import MEMORY_GB

from cadenza.policies.composition import Policy, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.service.settings import load_settings, policy_settings

OFF = 0.10
DRAWS = 8
"""Simulations."""
TURN_COSTS = SimCosts(yield_s=0.01, resume_s=0.01)
"""The jobs of a replay have no GPU state."""


@dataclass(frozen=True)
class Replay:
    """One replay's Cadenza side: its command line, and what was measured."""

    options: argparse.Namespace
    jct_s: dict[str, float]
    costs: Costs | None

    @classmethod
    def read(cls, path: Path) -> Replay:
        """Return what replay.py wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        if "cadenza" not in found:
            raise SystemExit(f"{path}: it has no side of Cadenza's")
        side = found["cadenza"]
        costs = Costs(**side["costs"]) if "costs" in side else None
        return cls(arguments(found["command"][1:]), side["figures"]["jct_s"], costs)

    @property
    def mean_s(self) -> float:
        """Return the mean completion time as measured, seconds."""
        return fmean(self.jct_s.values())

    @cached_property
    def jobs(self) -> tuple[TraceJob, ...]:
        """Return the jobs as the simulator takes them, without their start-up."""
        taken, scale, profiles = drawn(self.options)
        return tuple(
            TraceJob(
                id=number,
                submit_s=job.submit_s,
                gpus=job.gpus,
                work_s=job.iterations * scale.iteration_s,
                model=job.model,
                profile=profiles[job.model],
                iterations=job.iterations,
                memory_gb_per_gpu=MEMORY_GB,
            )
            for number, job in enumerate(taken.jobs)
        )

    @property
    def policy(self) -> Policy:
        """Return the policy of the settings that the replay ran under."""
        settings = load_settings(self.options.settings)
        rules, parts = policy_settings(settings), frozenset({PARTITION})
        sharing = replace(rules.sharing, enforce=True, partitions=parts)
        table = settings.policy
        return build(table.order, table.allocate, table.share, replace(rules, partitions=parts, sharing=sharing))

    @property
    def shape(self) -> str:
        """Return the cluster as ``cadenza simulate`` takes it."""
        reference = self.jobs[0].profile.reference if self.jobs[0].profile is not None else None
        if reference is None:
            raise SystemExit("the replay's jobs have no profiles")
        return f"{self.options.nodes}x{self.options.gpus_per_node}:{int(reference.cpus)}:{int(reference.memory_gb)}"

    def simulated_s(self, costs: Costs, seed: int) -> float:
        """Return one simulation's mean completion time, seconds."""
        lanes, service = self.options.lanes, load_settings(self.options.settings).service
        poll_s = service.poll_s
        setup = Setup(
            round_s=poll_s,
            rounds_on_events=True,
            lanes=lanes,
            costs=switches(costs),
            admission=service.admission,
            phased_moves=True,
        )
        random = Random(seed)
        # The service sees a job when it polls.
        seen = [
            replace(job, submit_s=ceil(job.submit_s / poll_s) * poll_s, startup_s=random.choice(costs.startups_s))
            for job in self.jobs
        ]
        result = simulate(seen, read_cluster(self.shape, lanes), self.policy, setup)
        submitted = {job.id: job.submit_s for job in self.jobs}
        jct_s = [job.finish_s - submitted[job.id] for job in result.jobs if job.finish_s is not None]
        return fmean(jct_s) + fmean(costs.endings_s)


def switches(costs: Costs) -> SimCosts:
    """Return measured costs as the simulator takes them; a job that moves or is resized is requeued."""
    dispatch_s, startup_s = fmean(costs.dispatches_s), fmean(costs.startups_s)
    again_s = max(median(costs.restarts_s) - dispatch_s, 0.0) if costs.restarts_s else startup_s
    return replace(TURN_COSTS, dispatch_s=dispatch_s, restart_s=again_s, migrate_s=again_s, resize_s=again_s)


def said(costs: Costs) -> str:
    """Return measured costs in words."""
    paid = switches(costs)
    return (
        f"launched after {paid.dispatch_s:.1f} s, started up after {fmean(costs.startups_s):.1f} s more, "
        f"away for {paid.dispatch_s + paid.migrate_s:.1f} s in each of {len(costs.restarts_s)} moves (median)"
    )


def main() -> int:
    """Simulate a replay with the costs of another one, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replay", type=Path, help="what is predicted: results of replay.py")
    parser.add_argument("--costs", type=Path, required=True, help="results of another one, of another seed")
    words = parser.parse_args()
    replay, other = Replay.read(words.replay), Replay.read(words.costs)
    if replay.options.seed == other.options.seed:
        raise SystemExit(f"{words.costs}: it has the seed of {words.replay}, so it is no other run")
    if other.costs is None or not other.costs.startups_s:
        raise SystemExit(f"{words.costs}: it says nothing of what its jobs waited for")
    with Pool() as pool:
        means_s = pool.map(partial(replay.simulated_s, other.costs), range(DRAWS), chunksize=1)
    print(f"{len(other.jct_s)} jobs of {words.costs.name}: {said(other.costs)}")
    print(f"{DRAWS} simulations: {min(means_s):.1f} to {max(means_s):.1f} s, standard deviation {stdev(means_s):.1f} s")
    predicted_s = fmean(means_s)
    off = predicted_s / replay.mean_s - 1
    print(f"mean completion time of {len(replay.jct_s)} jobs: measured {replay.mean_s:.1f} s, ", end="")
    print(f"predicted {predicted_s:.1f} s: {off:+.1%} (limit {OFF:.0%})")
    return 0 if abs(off) <= OFF else 1


if __name__ == "__main__":
    sys.exit(main())
