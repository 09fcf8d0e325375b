#!/usr/bin/env python3
"""Search 40 configurations on 8 GPUs for one that reaches a target: with `cadenza sweep`, and one after the other.

The scenario is that of Gandiva's Table 3 (OSDI'18, p. 606), smaller. ``train.py`` trains each configuration for real;
one of the 40 reaches the target, early in its run. *In order* is plain Slurm on the same machine:
each job has its GPU to its end, eight at once, in the order of the list. *Sweep* is `cadenza sweep` with five lanes, so
that all 40 have turns from the start: asha stops losers, the best are preferred. Both have the same random order, and
both times are from the first submission to the report that reaches the target.

Two processor cores play the GPUs: a step takes ``--step-s`` and computes for a part of a millisecond, so a run to its
end takes a minute. ``--predict N`` runs no cluster: it prints what perfect turns without any cost would give.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from predict import in_order, in_turns
from train import STEPS

from cadenza.policies.simulator.figures import mean_and_half

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "container"))

from cluster import CADENZA, EXAMPLES, PYTHON, SHARED, Cluster, prepare

HERE = Path(__file__).resolve().parent
LANES = 5
RATES = (1e-6, 3e-5, 1e-3, 3e-2, 1.0)
DECAYS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TARGET = 0.8
RULE = {"first": 20, "reduction": 4.0, "least": 8, "top": 4}
GOAL = 5.0
"""Least mean ratio (Gandiva: 5.5 to 7)."""


def order(seed: int) -> list[dict[str, float]]:
    """Return the 40 configurations in a random order."""
    configs = [{"lr": lr, "decay": decay} for lr, decay in itertools.product(RATES, DECAYS)]
    Random(seed).shuffle(configs)  # noqa: S311 (no secret)
    return configs


class SearchCluster(Cluster):
    """Two hosts of four GPUs in containers."""

    def start(self) -> None:
        """Start it; an earlier one of this name goes."""
        prepare()
        self.up("--nodes", 2, "--gpus-per-node", 4, "--lanes", LANES, "--config", HERE / "search.toml")

    def search(self, seed: int, step_s: float, *, shared: bool) -> float:
        """Return the seconds from the first submission of one search to the result that reaches the target."""
        name = f"{'sweep' if shared else 'order'}-{seed}"
        self.write(f"{name}.csv", order(seed))
        rule = [f"--set={key}={value}" for key, value in RULE.items()] if shared else ["--rule=none"]
        self.run(
            "ctl", CADENZA, "sweep", "run", f"{SHARED}/{name}.csv", f"--dir={SHARED}/sweeps/{name}", "--json",
            f"--target={TARGET}", "--set=finish=no", "--set=poll-s=0.2", "--set=slurm-s=2", *rule,
            *([] if shared else ["--set=share=no"]), "--", "--gres=gpu:1", "--mem=300", "--cpus-per-task=1",
            f"--chdir={SHARED}", "--output=/dev/null", f"--wrap={train(step_s)}",
            user="alice",
        )  # fmt: skip
        return found_after(self.home / "sweeps" / name / "journal.jsonl")

    def write(self, name: str, configs: list[dict[str, float]]) -> None:
        """Write a search's list to where the cluster sees it."""
        with (self.home / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ("lr", "decay"))
            writer.writeheader()
            writer.writerows(configs)


def train(step_s: float) -> str:
    """Return the batch script's command."""
    script = f"{EXAMPLES}/sweep/train.py"
    return f"export OMP_NUM_THREADS=1; exec {PYTHON} {script} --lr {{lr}} --decay {{decay}} --step-s {step_s}"


def found_after(journal: Path) -> float:
    """Return the seconds from a sweep's first submission to its target."""
    records: list[dict[str, Any]] = [json.loads(line) for line in journal.read_text().splitlines()]
    begun = next(record["time_s"] for record in records if record["kind"] == "submitting")
    return float(next(record["time_s"] for record in records if record["kind"] == "target") - begun)


def measure(cluster: SearchCluster, seeds: range, step_s: float) -> list[tuple[float, float]]:
    """Run every order both ways; return and print the times."""
    times = []
    for seed in seeds:
        both = cluster.search(seed, step_s, shared=False), cluster.search(seed, step_s, shared=True)
        times.append(both)
        print(f"order {seed}: in order {both[0]:.1f} s, sweep {both[1]:.1f} s: {both[0] / both[1]:.2f}x", flush=True)
    return times


def predict(seeds: range, step_s: float) -> list[tuple[float, float]]:
    """Return what both ways would take with perfect turns and no costs."""
    rule = {key: value for key, value in RULE.items() if key != "top"}
    return [
        (in_order(order(seed), TARGET, step_s), in_turns(order(seed), TARGET, step_s, rule, int(RULE["top"])))
        for seed in seeds
    ]


def ratio_of_means(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return how many times sooner the sweep finds it: the mean over the orders, and half of its 95 % interval."""
    return mean_and_half([before / after for before, after in times])


def main() -> int:
    """Measure or predict; 1 when the mean ratio is below the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=20, help="random orders to run on the cluster")
    parser.add_argument("--first", type=int, default=1, help="seed of the first order")
    parser.add_argument("--predict", type=int, metavar="N", help="run no cluster: perfect turns, N orders")
    parser.add_argument("--step-s", type=float, default=0.025, help="duration of a training step")
    parser.add_argument("--name", default="search", help="the cluster's name")
    parser.add_argument("--out", type=Path, help="JSON file for the times")
    options = parser.parse_args()
    print(f"40 configurations, 8 GPUs, a whole run {STEPS * options.step_s:.0f} s, target {TARGET}", flush=True)
    if options.predict:
        times, word = (
            predict(range(options.first, options.first + options.predict), options.step_s),
            "PREDICTED, not run",
        )
    else:
        cluster, word = SearchCluster(options.name), "measured"
        try:
            cluster.start()
            times = measure(cluster, range(options.first, options.first + options.orders), options.step_s)
        finally:
            cluster.down()
    mean, half = ratio_of_means(times)
    before, after = (sum(column) / len(times) for column in zip(*times, strict=True))
    print(
        f"{word}, {len(times)} orders: in order {before:.1f} s, sweep {after:.1f} s; of the means {before / after:.2f}x"
    )
    print(f"mean ratio {mean:.2f}x ± {half:.2f} (95 %), wanted {GOAL:g}x: {'ok' if mean >= GOAL else 'MISSED'}")
    if options.out:
        options.out.write_text(json.dumps({"kind": word, "seconds": times, "ratio": mean, "half": half}) + "\n")
    return int(mean < GOAL)


if __name__ == "__main__":
    sys.exit(main())
