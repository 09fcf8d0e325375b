#!/usr/bin/env python3
"""Slurm's baseline in the simulator against a real slurmctld: the same submission lists, run twice and predicted once.

A list has 320 jobs of 1 to 32 GPUs (more than 8: whole nodes) that sleep for 4 to 60 s, with time limits of 1.2 to 10
times that in whole minutes, as Slurm keeps them; their arrivals offer 1.15 times the GPUs of 16 nodes x 8. A plain
cluster in containers (one lane, no Cadenza) runs each list twice. The simulator's ``--baseline slurm`` runs it with the
backfill settings of that cluster, and with the mean time that the cluster's jobs took besides their sleep.

Goals: the baseline's mean wait is within 5 % of both runs' mean, or within the difference of the two. Agreement is the
share of jobs whose starts, since the first submission, lie within 5 s of each other; the baseline's with either run is
at least 0.9 times the two runs' with each other. Exit code 1 when a goal is missed.

    benchmarks/calibration.py                                  # three lists, about 45 minutes
    benchmarks/calibration.py --list 1 --out results/list1.json
    benchmarks/calibration.py --again results/list1.json       # predict what was measured before
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from replay_cluster import PLACE, Cluster, Plan, Size

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.slurm.backfill import Backfill
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.slurm_baseline import simulate_slurm

from cluster import ROOT, ClusterError, prepare

SIZE = Size(16, 8, 24, 64_000)
SHAPE = "16x8:24:64"
LISTS = (1, 2, 3)
JOBS = 320
LOAD = 1.15
WIDTHS = {1: 36, 2: 18, 4: 16, 8: 18, 16: 8, 32: 4}
"""GPUs: jobs in a hundred."""
MEDIAN_S, SPREAD = 16.0, 0.8
"""Sleeps are lognormal."""
SHORTEST_S, LONGEST_S = 4, 60
LIMITS = (1.2, 2.0, 3.0, 5.0, 10.0)
"""Time limits over run times."""
SPARE_S = 10
"""Least time between a job's end and its limit."""
SCHEDULER = "bf_interval=2,bf_resolution=1,sched_interval=2,requeue_delay=0"
"""Backfill as often, against these run times, as once in 30 s to 2 minutes against hours."""
QUEUED_S = 4.0
"""A job that stands in the queue for so long waits for GPUs, and not for the scheduler's next look."""
JITTER_S = 0.2
"""Spread of the jobs' overheads."""
DRAWS = 20
"""Simulations of a list: a second more puts a wide job behind another one, and much that follows is different."""
NEAR_S = 5.0
WAIT_OFF, AGREEMENT = 0.05, 0.9


@dataclass(frozen=True)
class Listed:
    """One job of a list."""

    submit_s: float
    gpus: int
    sleep_s: int
    limit_min: int


@dataclass(frozen=True)
class Run:
    """One run of a list on the cluster, by position in the list; seconds since the first submission was due."""

    submit_s: tuple[float, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    nodes: tuple[str, ...]

    @property
    def wait_s(self) -> float:
        """Return the mean wait."""
        return fmean(start - submit for start, submit in zip(self.start_s, self.submit_s, strict=True))

    def overhead_s(self, jobs: Sequence[Listed]) -> float:
        """Return the mean time that a job keeps its GPUs besides its sleep, until the next one starts on them.

        The part after its end is the mean time from the last end on its nodes until the start of a job that was the
        first in the queue, and had waited there.
        """
        rows = zip(jobs, self.start_s, self.end_s, strict=True)
        beside_s = fmean(end - start - job.sleep_s for job, start, end in rows)
        nodes, gaps = [read_nodes(text) for text in self.nodes], []
        for at, (start, submit) in enumerate(zip(self.start_s, self.submit_s, strict=True)):
            if start < submit + QUEUED_S or max(self.start_s[:at]) > start:
                continue
            ends = [end for end, theirs in zip(self.end_s, nodes, strict=True) if end <= start and theirs & nodes[at]]
            gaps.append(start - max(ends))
        return beside_s + fmean(gap for gap in gaps if gap < QUEUED_S)


def read_nodes(text: str) -> frozenset[int]:
    """Return the numbers of nodes as Slurm writes them: ``node3`` or ``node[1-2,7]``."""
    numbers: set[int] = set()
    for part in text.removeprefix("node").strip("[]").split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def draw(seed: int) -> list[Listed]:
    """Return a list, in order of submission."""
    random = Random(seed)
    widths = random.choices(list(WIDTHS), list(WIDTHS.values()), k=JOBS)
    sleeps = [round(min(max(random.lognormvariate(log(MEDIAN_S), SPREAD), SHORTEST_S), LONGEST_S)) for _ in widths]
    window_s = sum(map(int.__mul__, widths, sleeps)) / (SIZE.nodes * SIZE.gpus * LOAD)
    arrivals = sorted(random.uniform(0, window_s) for _ in widths)
    limits = [ceil(max(random.choice(LIMITS) * sleep, sleep + SPARE_S) / 60) for sleep in sleeps]
    return [Listed(round(at - arrivals[0], 2), *job) for at, *job in zip(arrivals, widths, sleeps, limits, strict=True)]


def plan_of(jobs: Sequence[Listed], label: str) -> Plan:
    """Return each job's time and its sbatch."""
    plan = []
    for at, job in enumerate(jobs):
        nodes = -(-job.gpus // SIZE.gpus)
        each, name = job.gpus // nodes, f"{label}-{at:03}"
        command = [
            "sbatch", "--parsable", f"--job-name={name}", f"--output={PLACE}/logs/{name}.log", f"--nodes={nodes}",
            "--ntasks-per-node=1", f"--cpus-per-task={SIZE.cpus * each // SIZE.gpus}", f"--gres=gpu:{each}",
            f"--mem={each}G", f"--time={job.limit_min}", f"--wrap=exec sleep {job.sleep_s}",
        ]  # fmt: skip
        plan.append({"name": name, "submit_s": job.submit_s, "command": command})
    return plan


def run_list(cluster: Cluster, jobs: Sequence[Listed], label: str) -> Run:
    """Run a list on an idle cluster; raise ClusterError for a job that did not complete."""
    plan = plan_of(jobs, label)
    cluster.hand_over(plan)
    began = cluster.replay(patience_s=1800)
    records = cluster.accounts()
    found = [records[entry["name"]] for entry in plan]
    failed = [entry["name"] for entry, record in zip(plan, found, strict=True) if not record.completed]
    if failed:
        raise ClusterError(f"not completed: {' '.join(failed)}")
    return Run(
        tuple(record.submit_s - began for record in found),
        tuple((record.start_s or 0.0) - began for record in found),
        tuple((record.end_s or 0.0) - began for record in found),
        tuple(record.nodes for record in found),
    )


def rules_of(parameters: str) -> Backfill:
    """Return the backfill rules of a ``SchedulerParameters`` line."""
    given = dict(word.partition("=")[::2] for word in parameters.split(","))
    return Backfill(
        interval_s=float(given.get("bf_interval", 30)),
        max_jobs=int(given.get("bf_max_job_test", 500)),
        precision_s=float(given.get("bf_window_linear", 0)),
        batch_delay_s=float(given.get("batch_sched_delay", 3)),
        full_interval_s=float(given.get("sched_interval", 60)),
    )


def predict(jobs: Sequence[Listed], rules: Backfill, overhead_s: float, seed: int) -> list[float]:
    """Return the baseline's starts, seconds since the first submission was due.

    The seed deals out the overheads, and says where in its intervals the scheduler is at the first submission.
    """
    random = Random(seed)
    phase_s = random.uniform(0, rules.interval_s)
    traced = [
        TraceJob(
            at, phase_s + job.submit_s, job.gpus, float(job.sleep_s), memory_gb_per_gpu=1,
            time_limit_s=60.0 * job.limit_min, startup_s=overhead_s + random.uniform(-JITTER_S, JITTER_S),
        )
        for at, job in enumerate(jobs)
    ]  # fmt: skip
    result = simulate_slurm(traced, read_cluster(SHAPE), Setup(), rules)
    return [(job.start_s or 0.0) - phase_s for job in sorted(result.jobs, key=lambda job: job.id)]


def agreement(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the share of jobs whose two starts lie within NEAR_S of each other."""
    return fmean(abs(a - b) <= NEAR_S for a, b in zip(left, right, strict=True))


def compare(seed: int, runs: Sequence[Run], parameters: str) -> bool:
    """Print a list's two runs and the baseline; return True if both goals are met."""
    jobs = draw(seed)
    overhead_s = fmean(run.overhead_s(jobs) for run in runs)
    drawn = [predict(jobs, rules_of(parameters), overhead_s, number) for number in range(DRAWS)]
    starts = [median(found) for found in zip(*drawn, strict=True)]
    waits = [run.wait_s for run in runs]
    draw_waits = [fmean(start - job.submit_s for start, job in zip(found, jobs, strict=True)) for found in drawn]
    wait, middle = fmean(draw_waits), fmean(waits)
    each = agreement(runs[0].start_s, runs[1].start_s)
    ours = [agreement(starts, run.start_s) for run in runs]
    allowed = max(WAIT_OFF * middle, abs(waits[0] - waits[1]))
    wait_ok, starts_ok = abs(wait - middle) <= allowed, min(ours) >= AGREEMENT * each
    print(
        f"list {seed}: {len(jobs)} jobs, {overhead_s:.2f} s besides the sleep\n"
        f"  mean wait: runs {waits[0]:.1f} s and {waits[1]:.1f} s, baseline {wait:.1f} s ({wait / middle - 1:+.1%}; "
        f"{DRAWS} draws from {min(draw_waits):.1f} to {max(draw_waits):.1f} s) {'ok' if wait_ok else 'MISSED'}\n"
        f"  starts within {NEAR_S:g} s: runs {each:.3f}, baseline with each {ours[0]:.3f} and {ours[1]:.3f} "
        f"{'ok' if starts_ok else 'MISSED'}",
        flush=True,
    )
    return wait_ok and starts_ok


def measure(cluster: Cluster, seed: int) -> tuple[list[Run], str]:
    """Run a list twice on a fresh cluster; return the runs and the cluster's SchedulerParameters."""
    try:
        cluster.start({})
        line = f"s/^SchedulerParameters=.*/SchedulerParameters={SCHEDULER}/"
        cluster.run("ctl", "sed", "-i", line, "/etc/slurm/slurm.conf")
        cluster.run("ctl", "scontrol", "reconfigure")
        runs = [run_list(cluster, draw(seed), f"list{seed}-run{number}") for number in (1, 2)]
        shown = cluster.run("ctl", "scontrol", "show", "config")
        return runs, next(line.partition("=")[2].strip() for line in shown.splitlines() if "SchedulerParam" in line)
    finally:
        cluster.down()


def read_runs(found: Mapping[str, Any]) -> list[Run]:
    """Return the runs of a list as the JSON has them."""
    return [Run(**{name: tuple(values) for name, values in run.items()}) for run in found["runs"]]


def main() -> int:
    """Measure and compare, or compare what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=int, action="append", help="seed of a list; may be repeated (default: 1, 2, 3)")
    parser.add_argument("--again", type=Path, help="predict the lists of this file anew; no cluster")
    parser.add_argument("--name", default="calibration", help="the cluster's name")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "calibration.json")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.again.read_text()) if options.again else {}
    try:
        if not options.again:
            prepare()
        for seed in () if options.again else options.list or LISTS:
            runs, parameters = measure(Cluster(options.name, SIZE), seed)
            found[str(seed)] = {"runs": [vars(run) for run in runs], "parameters": parameters}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found) + "\n")
    except ClusterError as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 1
    met = [compare(int(seed), read_runs(one), one["parameters"]) for seed, one in found.items()]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
