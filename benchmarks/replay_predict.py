#!/usr/bin/env python3
"""What the simulator says of a replay under Cadenza: its mean completion time, with costs measured on another replay.

The jobs are drawn again as the replay's command says, and the policy is built from its settings. The one cost that the
replay's jobs have is the time from a start until the first iteration: sbatch, slurmctld, the launch, the lease. It is
what makes the simulator meet the mean of the other replay (another seed), by bisection. Exit code 1 when the mean is
off by more than 10 %.

    benchmarks/replay.py --only cadenza --seed 2 --out results/replay_costs.json …
    benchmarks/replay_predict.py results/replay.json --costs results/replay_costs.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from replay import arguments, drawn
from replay_week import MEMORY_GB

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.policy import Policy, build
from cadenza.policies.simulator.live import PARTITION
from cadenza.policies.simulator.model import Setup, SimCosts, TraceJob
from cadenza.policies.simulator.run import simulate
from cadenza.slurm_plugin.service.settings import load_settings, policy_settings

OFF = 0.10
MOST_S = 60.0
"""Longest start-up that is looked for, seconds."""
STEPS = 7
"""Bisections: half a second is left of a minute."""
TURN_COSTS = SimCosts(yield_s=0.01, resume_s=0.01)
"""The jobs of a replay have no GPU state."""


@dataclass(frozen=True)
class Replay:
    """One replay's Cadenza side: its command line, and what was measured."""

    options: argparse.Namespace
    jct_s: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> Replay:
        """Return what replay.py wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        if "cadenza" not in found:
            raise SystemExit(f"{path}: it has no side of Cadenza's")
        return cls(arguments(found["command"][1:]), found["cadenza"]["figures"]["jct_s"])

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
        """Return the policy of the settings that the replay ran under; the simulator places every job itself."""
        settings = load_settings(self.options.settings)
        rules, parts = policy_settings(settings), frozenset({PARTITION})
        sharing = replace(rules.sharing, enforce=True, admission="held", partitions=parts)
        table = settings.policy
        return build(table.order, table.allocate, table.share, replace(rules, partitions=parts, sharing=sharing))

    def predicted_s(self, startup_s: float) -> float:
        """Return the simulator's mean completion time, seconds."""
        options, poll_s = self.options, load_settings(self.options.settings).service.poll_s
        reference = self.jobs[0].profile.reference if self.jobs[0].profile is not None else None
        if reference is None:
            raise SystemExit("the replay's jobs have no profiles")
        shape = f"{options.nodes}x{options.gpus_per_node}:{int(reference.cpus)}:{int(reference.memory_gb)}"
        # A job that is moved or resized is requeued, and starts up as at first.
        costs = replace(TURN_COSTS, start_s=startup_s, restart_s=startup_s, migrate_s=startup_s, resize_s=startup_s)
        setup = Setup(round_s=poll_s, rounds_on_events=True, lanes=options.lanes, costs=costs)
        result = simulate(self.jobs, read_cluster(shape, options.lanes), self.policy, setup)
        return fmean(job.jct_s for job in result.jobs if job.jct_s is not None)


def calibrated(other: Replay) -> float:
    """Return the start-up with which the simulator meets another replay's mean, seconds."""
    low, high = 0.0, MOST_S
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if other.predicted_s(middle) < other.mean_s else (low, middle)
    return (low + high) / 2


def main() -> int:
    """Calibrate, predict, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replay", type=Path, help="what is predicted: results of replay.py")
    parser.add_argument("--costs", type=Path, required=True, help="results of another one, of another seed")
    words = parser.parse_args()
    replay, other = Replay.read(words.replay), Replay.read(words.costs)
    if replay.options.seed == other.options.seed:
        raise SystemExit(f"{words.costs}: it has the seed of {words.replay}, so it is no other run")
    startup_s = calibrated(other)
    predicted_s = replay.predicted_s(startup_s)
    off = predicted_s / replay.mean_s - 1
    print(f"start-up {startup_s:.1f} s, from {len(other.jct_s)} jobs of {words.costs.name}")
    print(f"mean completion time of {len(replay.jct_s)} jobs: measured {replay.mean_s:.1f} s, ", end="")
    print(f"predicted {predicted_s:.1f} s: {off:+.1%} (limit {OFF:.0%})")
    return 0 if abs(off) <= OFF else 1


if __name__ == "__main__":
    sys.exit(main())
