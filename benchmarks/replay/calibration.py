#!/usr/bin/env python3
"""Slurm's baseline in the simulator against a real slurmctld: the same submission lists, run twice and predicted once.

A list has 320 jobs of 1 to 32 GPUs (more than 8: whole nodes) that sleep for 4 to 60 s, with time limits of 1.2 to 10
times that in whole minutes, as Slurm keeps them; their arrivals offer 1.15 times the GPUs of 16 nodes x 8. A plain
cluster in containers (one lane, no Cadenza) runs each list twice. The simulator's ``--set baseline=slurm`` runs it with
the backfill settings of that cluster, and with the mean time that the cluster's jobs took besides their sleep.

Goals: the baseline's mean wait is within 5 % of both runs' mean, or within the difference of the two. Agreement is the
share of jobs whose starts, since the first submission, lie within 5 s of each other; the baseline's with either run is
at least 0.9 times the two runs' with each other. Exit code 1 when a goal is missed.

``--overload`` runs two other lists once each, both at once: 640 jobs of 4 s to 10 minutes, 60 of them at the beginning
and all others faster than the GPUs can serve them, so that the queue is never empty while jobs arrive. All times are
a site's divided by 96, Slurm's default ``bf_window`` of a day and the limits with them: in one list all jobs have a
limit of a day, in the other one of twice their run time. Goals: the baseline's mean wait is within 5 % of the run's,
and that of each class of width and length, with 20 jobs or more, within 15 %.

    benchmarks/replay/calibration.py                                  # three lists, about 45 minutes
    benchmarks/replay/calibration.py --list 1 --out results/list1.json
    benchmarks/replay/calibration.py --overload                       # two lists at once, about 20 minutes
    benchmarks/replay/calibration.py --again results/list1.json       # predict what was measured before
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from replay_cluster import PLACE, Cluster, Plan, Size

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.slurm_baseline import simulate_slurm
from cadenza.policies.slurm.backfill import EASY, Backfill

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

OVERLOADS = ("equal", "double")
"""Lists of an overload, by their limits."""
FACTOR = 96.0
OVERLOAD_SCHEDULER = "bf_interval=1,bf_resolution=1,bf_window=15,sched_interval=1,requeue_delay=0"
"""Backfill's defaults (30 s, 60 s, a day, 60 s) over the factor, where a second and a minute are the least."""
DAY_MIN = 15
"""A day over the factor, in minutes."""
OVERLOAD_JOBS, BACKLOG, OVERLOAD = 640, 60, 1.3
"""Jobs, those of them that are submitted at once, and the load that the others offer."""
OVERLOAD_WIDTHS = {1: 40, 2: 18, 4: 16, 8: 18, 16: 6, 32: 2}
OVERLOAD_MEDIAN_S, OVERLOAD_SPREAD, OVERLOAD_LONGEST_S = 16.0, 1.2, 600
WIDE, LONG_S = (2, 8, 9), (15, 60)
"""GPUs and seconds at which the classes are parted."""
CLASS_OFF, LEAST_IN_CLASS = 0.15, 20
OVERLOAD_DRAWS = 5


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


def draw_overload(limits: str, seed: int = 1) -> list[Listed]:
    """Return a list of an overload, in order of submission."""
    random = Random(seed)
    widths = random.choices(list(OVERLOAD_WIDTHS), list(OVERLOAD_WIDTHS.values()), k=OVERLOAD_JOBS)
    drawn = (random.lognormvariate(log(OVERLOAD_MEDIAN_S), OVERLOAD_SPREAD) for _ in widths)
    sleeps = [round(min(max(sleep, SHORTEST_S), OVERLOAD_LONGEST_S)) for sleep in drawn]
    later = sum(map(int.__mul__, widths[BACKLOG:], sleeps[BACKLOG:]))
    window_s = later / (SIZE.nodes * SIZE.gpus * OVERLOAD)
    arrivals = sorted(random.uniform(0, window_s) if at >= BACKLOG else 0.0 for at in range(OVERLOAD_JOBS))
    twice = [ceil(max(2 * sleep, sleep + SPARE_S) / 60) for sleep in sleeps]
    ends = [DAY_MIN] * OVERLOAD_JOBS if limits == "equal" else twice
    return [Listed(round(at, 2), *job) for at, *job in zip(arrivals, widths, sleeps, ends, strict=True)]


def class_of(job: Listed) -> str:
    """Return the class of a job by its width and length."""
    width = ("1 GPU", "2 to 7", "8", "16 and 32")[bisect_right(WIDE, job.gpus)]
    return f"{width}, {('short', 'medium', 'long')[bisect_right(LONG_S, job.sleep_s)]}"


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
        window_s=60 * float(given.get("bf_window", 1440)),
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


def compare_overload(limits: str, run: Run, parameters: str) -> bool:
    """Print a list's run and the baseline, all and by class; return True if the goals are met."""
    jobs = draw_overload(limits)
    overhead_s, rules = run.overhead_s(jobs), rules_of(parameters)
    drawn = [predict(jobs, rules, overhead_s, number) for number in range(OVERLOAD_DRAWS)]
    waits = [start - submit for start, submit in zip(run.start_s, run.submit_s, strict=True)]
    ours = [fmean(starts) - job.submit_s for starts, job in zip(zip(*drawn, strict=True), jobs, strict=True)]
    eager = replace(EASY, interval_s=rules.interval_s, full_interval_s=rules.full_interval_s)
    easy = fmean(start - job.submit_s for start, job in zip(predict(jobs, eager, overhead_s, 0), jobs, strict=True))
    queued = least_queued(run)
    off = fmean(ours) / fmean(waits) - 1
    met = abs(off) <= WAIT_OFF
    print(
        f"overload, {limits} limits: {len(jobs)} jobs, {overhead_s:.2f} s besides the sleep; {queued} jobs and more in "
        f"the queue while jobs arrive\n  mean wait: run {fmean(waits):.1f} s, baseline {fmean(ours):.1f} s "
        f"({off:+.1%}) {'ok' if met else 'MISSED'}; EASY {easy:.1f} s"
    )
    classes = [class_of(job) for job in jobs]
    for name in sorted(set(classes)):
        those = [at for at, one in enumerate(classes) if one == name]
        found, said = (fmean(values[at] for at in those) for values in (waits, ours))
        counts = len(those) >= LEAST_IN_CLASS
        near = abs(said / found - 1) <= CLASS_OFF
        met &= near or not counts
        verdict = ("ok" if near else "MISSED") if counts else "few"
        both = f"run {found:7.1f} s, baseline {said:7.1f} s ({said / found - 1:+.1%}) {verdict}"
        print(f"  {name:20s}{len(those):5d} jobs: {both}")
    return met


def least_queued(run: Run, backlog: int = BACKLOG) -> int:
    """Return the fewest jobs that waited after any start between the submission of the backlog and the last one."""
    submits = sorted(run.submit_s)
    moments = [start for start in run.start_s if submits[backlog - 1] <= start < submits[-1]]
    return min(
        sum(submit <= at < start for submit, start in zip(run.submit_s, run.start_s, strict=True)) for at in moments
    )


def measure(cluster: Cluster, name: str) -> tuple[list[Run], str]:
    """Run a list on a fresh cluster, twice but for an overload; return the runs and the SchedulerParameters."""
    over = name in OVERLOADS
    try:
        cluster.start({})
        line = f"s/^SchedulerParameters=.*/SchedulerParameters={OVERLOAD_SCHEDULER if over else SCHEDULER}/"
        cluster.run("ctl", "sed", "-i", line, "/etc/slurm/slurm.conf")
        cluster.run("ctl", "scontrol", "reconfigure")
        jobs = draw_overload(name) if over else draw(int(name))
        runs = [run_list(cluster, jobs, f"list{name}-run{number}") for number in ((1,) if over else (1, 2))]
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
    parser.add_argument("--overload", action="store_true", help="run the lists of an overload instead, both at once")
    parser.add_argument("--again", type=Path, help="predict the lists of this file anew; no cluster")
    parser.add_argument("--name", default="calibration", help="the cluster's name")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "calibration.json")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.again.read_text()) if options.again else {}
    try:
        if not options.again:
            prepare()
        names = list(OVERLOADS) if options.overload else [str(seed) for seed in options.list or LISTS]
        names = [] if options.again else names
        with ThreadPoolExecutor(len(OVERLOADS) if options.overload else 1) as pool:
            measured = pool.map(lambda name: measure(Cluster(f"{options.name}-{name}", SIZE), name), names)
            for name, (runs, parameters) in zip(names, measured, strict=True):
                found[name] = {"runs": [vars(run) for run in runs], "parameters": parameters}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(found) + "\n")
    except ClusterError as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 1
    met = []
    for name, one in found.items():
        if name in OVERLOADS:
            met.append(compare_overload(name, read_runs(one)[0], one["parameters"]))
        else:
            met.append(compare(int(name), read_runs(one), one["parameters"]))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
