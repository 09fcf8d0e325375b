"""The simulator's figures of a replay's list: the ideal's gain, plain Slurm, and Cadenza's shipped default.

All times of the replay and of the policy are divided by one factor, so Cadenza is simulated in the trace's time, with
what a start and a move take multiplied by it. Plain Slurm is simulated in the replay's own time.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from subprocess import run

from philly_sample import CLUSTER, DAY_S
from philly_yardsticks import Easy, ideal
from replay_sample import CALC_S, MEMORY_GB, SHARES, WEIGHTS, ReplaySample, in_trace_time, write_replay_trace

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.queue_rules import QueueRules, Weights, with_shares
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.slurm_baseline import simulate_slurm
from cadenza.policies.slurm.backfill import Backfill

CADENZA = Path(sys.executable).with_name("cadenza")
INTERVALS_S = 1.0
"""``bf_interval`` and ``sched_interval`` of the container cluster."""


@dataclass(frozen=True)
class Costs:
    """What jobs wait for besides GPUs, seconds of the replay; and the time between two polls of the service."""

    start_s: float
    """From Slurm's start of a job until it runs."""
    move_s: float
    """From a checkpoint until the job runs again."""
    poll_s: float


@dataclass(frozen=True)
class Forecast:
    """Predicted figures of one side; seconds of the replay."""

    mean_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    mean_first_s: float


def ideal_gain(sample: ReplaySample) -> float:
    """Return the mean completion time under EASY backfill over that under preemptive LAS at no cost."""
    jobs = in_trace_time(sample)
    means = [fmean(times.end_s[job.id] - job.submit_s for job in jobs) for times in (Easy(jobs).run(), ideal(jobs))]
    return means[0] / means[1]


def ideal_forecast(sample: ReplaySample) -> Forecast:
    """Return the figures of preemptive LAS whose starts and switches cost nothing."""
    jobs, factor = in_trace_time(sample), sample.factor
    times = ideal(jobs)
    return _forecast(
        [(times.end_s[job.id] - job.submit_s) / factor for job in jobs],
        [(times.start_s[job.id] - job.submit_s) / factor for job in jobs],
    )


def plain_forecast(sample: ReplaySample, costs: Costs) -> Forecast:
    """Return the figures of plain Slurm."""
    jobs = [
        TraceJob(
            number, job.submit_s, job.gpus, job.work_s, memory_gb_per_gpu=MEMORY_GB, startup_s=costs.start_s,
            time_limit_s=60.0 * job.limit_min, account=job.account,
        )
        for number, job in enumerate(sample.jobs)
    ]  # fmt: skip
    rules = Backfill(interval_s=INTERVALS_S, full_interval_s=INTERVALS_S, window_s=DAY_S / sample.factor)
    week_s = 7 * DAY_S / sample.factor
    site = with_shares(
        QueueRules(weights=Weights(**WEIGHTS), max_age_s=week_s, half_life_s=week_s, calc_s=CALC_S), SHARES
    )
    found = simulate_slurm(jobs, read_cluster(CLUSTER), Setup(costs=SimCosts(), queue=site), rules).jobs
    first_s = [(job.start_s or 0.0) + costs.start_s - job.submit_s for job in found]
    return _forecast([(job.finish_s or 0.0) - job.submit_s for job in found], first_s)


def cadenza_forecast(sample: ReplaySample, costs: Costs, lanes: int) -> Forecast:
    """Return the figures of the shipped default; end with the exit code of ``cadenza simulate`` when it fails."""
    factor = sample.factor
    with tempfile.TemporaryDirectory() as folder:
        trace, rows, file, site = (Path(folder) / name for name in ("trace.csv", "jobs.csv", "costs.toml", "site.toml"))
        write_replay_trace(trace, sample)
        moves = "".join(f"{name} = {costs.move_s * factor}\n" for name in ("restart_s", "migrate_s", "resize_s"))
        file.write_text(f"start_s = {costs.start_s * factor}\n{moves}")
        weights = "".join(f"{name} = {weight}\n" for name, weight in WEIGHTS.items())
        shares = "".join(f"[accounts.{name}]\nshare = {share}\n" for name, share in SHARES.items())
        site.write_text(f"calc_s = {CALC_S * factor}\n[weights]\n{weights}{shares}")
        words = [
            str(CADENZA), "simulate", "--trace", str(trace), "--nodes", CLUSTER, "--set", f"costs={file}", "--per-job",
            str(rows), "--site", str(site), "--set", f"round={costs.poll_s * factor}", "--lanes",
            str(lanes), "--json",
        ]  # fmt: skip
        done = run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            raise SystemExit(done.returncode)
        with rows.open(newline="") as table:
            found = list(csv.DictReader(table))
    jct_s = [(float(row["finish_s"]) - float(row["submit_s"])) / factor for row in found]
    first_s = [(float(row["start_s"]) - float(row["submit_s"])) / factor + costs.start_s for row in found]
    return _forecast(jct_s, first_s)


def _forecast(jct_s: Sequence[float], first_s: Sequence[float]) -> Forecast:
    ordered = sorted(jct_s)
    return Forecast(
        fmean(ordered), median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], fmean(first_s)
    )
