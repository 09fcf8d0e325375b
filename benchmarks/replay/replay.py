#!/usr/bin/env python3
"""Replay days of submissions on a real Slurm: plain backfill and Cadenza's default at once, on as many GPUs each.

Two fresh clusters in containers, each with slurmctld, slurmdbd and 16 nodes of 8 (fake) GPUs: one without Cadenza, one
with Cadenza's shipped default. The jobs are drawn from Microsoft's Philly trace.
Both sites weigh age and fair share, and each job belongs to one of two accounts of unequal shares.
One factor divides arrivals, run times and time limits, and the slices, levels and bounds of the default. The
simulator runs the list first: if an ideal preemptive scheduler gains less than 1.2 times on it, the next seed is taken.
Each job is a loop that sleeps (replay_job.py), attaches and takes turns as a real one. Exit code 1 when a job is lost
or a goal is missed; 3 when the trace is not here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

from compressed_times import compress
from philly_sample import NODES, PER_NODE, read_philly
from published_data import needed
from replay_cluster import Cluster, Size, commands
from replay_figures import Figures, Load, Rpcs, figures, gpu_parts, loads, read_sdiag
from replay_predict import Costs, Forecast, cadenza_forecast, ideal_forecast, ideal_gain, plain_forecast
from replay_sample import SHARES, ReplaySample, Window, replay_sample

from cadenza.policies.inputs.published import synergy_profiles
from cadenza.slurm_plugin.service.settings import Settings

from cluster import ROOT, ClusterError, prepare

TRACE = "philly-2017-09-10.csv"
SIZE = Size(NODES, PER_NODE, 24, 500_000)
LEAST_GAIN = 1.2
MAX_SEEDS = 50
POLL_S = 1.0
"""Least time between rounds: 24 s of the trace, where a site has 2 s."""
MOST_RPCS = 6
SIDES = ("plain", "cadenza")
ROWS = (
    ("mean completion time (s)", "mean_jct_s", 0.85),
    ("median completion time (s)", "p50_jct_s", 0.5),
    ("99th percentile (s)", "p99_jct_s", 1.10),
    ("mean time to the first start (s)", "mean_first_s", 0.2),
)
"""Row, figure, and the goal for Cadenza's over plain's."""
RPCS_GOAL = 3.0
PARTS_OFF = 0.05
"""Largest difference of an account's part of the GPU time between the sides, while jobs arrive."""
PREDICTION_OFF = 0.10


@dataclass(frozen=True)
class Side:
    """Results of one side's run."""

    figures: Figures
    rpcs: Rpcs
    loads: dict[str, Load]
    seconds: float
    late_s: float
    """Longest delay of a submission."""
    parts: dict[str, float]
    """Each account's part of the GPU time while jobs arrived."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-day", type=int, default=28, help="day of the file with which it begins (default: 28)")
    parser.add_argument("--hours", type=float, default=72, help="hours of the trace (default: 72)")
    parser.add_argument(
        "--factor", type=float, default=48, help="all times are divided by it, 48 at most (default: 48)"
    )
    parser.add_argument("--load", type=float, default=1.0, help="offered load (default: 1.0)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed that is tried (default: 1)")
    parser.add_argument("--lanes", type=int, default=1, help="lanes of a node under Cadenza (default: 1, as shipped)")
    parser.add_argument("--start-s", type=float, default=1.5, help="predicted time of a start (default: 1.5)")
    parser.add_argument("--move-s", type=float, default=4.0, help="predicted time of a move (default: 4)")
    parser.add_argument("--only", choices=SIDES, help="run one side")
    parser.add_argument("--name", default="replay", help="first part of the clusters' names (default: replay)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "replay.json")
    parser.add_argument("--accounting", type=Path, metavar="FOLDER", help="write each side's accounting for a what-if")
    parser.add_argument("--dry-run", action="store_true", help="state and predict the list, and start nothing")
    return parser.parse_args(words)


def drawn(options: argparse.Namespace) -> ReplaySample:
    """Return the first list on which the ideal gains enough, and state it."""
    trace, profiles = read_philly(needed(TRACE)), synergy_profiles()
    window = Window(options.first_day, options.hours, options.load, options.factor)
    for seed in range(options.seed, options.seed + MAX_SEEDS):
        sample = replay_sample(trace, window, seed, profiles)
        gain = ideal_gain(sample)
        print(f"{TRACE}, from day {options.first_day}, seed {seed}: the ideal gains {gain:.2f} times over backfill")
        if gain >= LEAST_GAIN:
            print(sample.stated(), flush=True)
            return sample
    raise ValueError(f"the ideal gains less than {LEAST_GAIN} times with {MAX_SEEDS} seeds: nothing to schedule")


def settings_text(factor: float, move_s: float) -> str:
    """Return the shipped settings with their times divided by the factor, in apply mode."""
    shipped = Settings()
    return f"""[service]
mode = "apply"
poll_s = {POLL_S}
[guard]
partitions = ["shared"]
[expert]
min_run_s = {shipped.expert.min_run_s / factor}
move_s = {move_s}
[sharing]
slice_s = {shipped.sharing.slice_s / factor}
"""


def play(cluster: Cluster, sample: ReplaySample, accounting: Path | None) -> Side:
    """Run one side on a fresh cluster and remove it; its accounting goes into a folder, if one is given."""
    managed = cluster.settings is not None
    try:
        cluster.start({})
        cluster.set_site(sample.factor)
        if managed:
            compress(cluster, sample.factor)
        cluster.hand_over(commands(sample.jobs, SIZE, managed=managed))
        cluster.run("ctl", "sdiag", "--reset")
        before, started = cluster.look(), time.monotonic()
        # The queue of an overload drains in another window; what is left after three is stuck.
        longest_s = max(job.work_s for job in sample.jobs)
        began = cluster.replay(patience_s=3 * sample.minutes * 60 + 2 * longest_s)
        seconds = time.monotonic() - started
        rpcs, load = read_sdiag(cluster.run("ctl", "sdiag")), loads(before, cluster.look(), seconds)
        names = [job.name for job in sample.jobs]
        records = cluster.accounts()
        found = figures(names, records, cluster.events(), began)
        owners = [(job.name, job.account, job.gpus) for job in sample.jobs]
        parts = gpu_parts(records, owners, (began, began + 60 * sample.minutes))
        if accounting is not None:
            accounting.mkdir(parents=True, exist_ok=True)
            (accounting / f"{cluster.name}.txt").write_text(cluster.history())
        late_s = max(one["at"] - one["due"] for one in cluster.submitted())
        return Side(found, rpcs, load, seconds, late_s, parts)
    finally:
        cluster.down()


def table(sides: dict[str, Side], forecasts: dict[str, Forecast]) -> tuple[str, bool]:
    """Return the figures side by side with their predictions, and True if all goals are met."""
    lines, met = [f"{'':36s}" + "".join(f"{name:>12s}{'predicted':>12s}{'off':>8s}" for name in sides)], True
    for label, key, goal in ROWS:
        line = f"{label:36s}"
        for name, side in sides.items():
            value, said = getattr(side.figures, key), getattr(forecasts[name], key)
            met &= abs(said / value - 1) <= PREDICTION_OFF
            line += f"{value:12.1f}{said:12.1f}{said / value - 1:+8.1%}"
        lines.append(line + _ratio([getattr(side.figures, key) for side in sides.values()], goal))
        met &= not lines[-1].endswith("MISSED")
    totals = [float(side.rpcs.total) for side in sides.values()]
    lines.append(f"{'RPCs of slurmctld':36s}" + "".join(f"{total:12.0f}{'':20s}" for total in totals))
    lines[-1] += _ratio(totals, RPCS_GOAL)
    met &= not lines[-1].endswith("MISSED")
    for label, key in (("lost jobs", "lost"), ("turns given up", "yields"), ("requeues", "restarts")):
        values = [getattr(side.figures, key) for side in sides.values()]
        counts = [len(value) if isinstance(value, tuple) else value for value in values]
        lines.append(f"{label:36s}" + "".join(f"{count:12d}{'':20s}" for count in counts))
        met &= label != "lost jobs" or not any(counts)
    for account in SHARES:
        parts = [side.parts[account] for side in sides.values()]
        lines.append(f"{f'GPU time of {account}':36s}" + "".join(f"{part:12.1%}{'':20s}" for part in parts))
        even = max(parts) - min(parts) <= PARTS_OFF
        lines[-1] += f"   at most {PARTS_OFF:.0%} apart: {'ok' if even else 'MISSED'}"
        met &= even
    return "\n".join(lines), met


def _ratio(values: list[float], goal: float) -> str:
    if len(values) < len(SIDES) or not values[0] or isnan(values[0]):
        return ""
    ratio = values[1] / values[0]
    return f"   cadenza/plain {ratio:.2f}, goal {goal:g}: {'ok' if ratio <= goal else 'MISSED'}"


def details(name: str, side: Side) -> str:
    """Return one side's lines below the table."""
    most = "; ".join(f"{kind} {count} ({mean_ms:.1f} ms)" for kind, count, mean_ms in side.rpcs.most(MOST_RPCS))
    lost = f"\n  LOST: {' '.join(side.figures.lost)}" if side.figures.lost else ""
    daemons = ", ".join(f"{kind} {load.cpus:.3f}" for kind, load in sorted(side.loads.items()))
    return (
        f"{name}: {side.seconds:.0f} s, submissions at most {side.late_s:.1f} s late, a start took "
        f"{side.figures.start_up_s:.1f} s, a move {side.figures.move_s:.1f} s\n  RPCs: {most}\n  CPUs: {daemons}{lost}"
    )


def replay(sample: ReplaySample, options: argparse.Namespace) -> dict[str, Side]:
    """Run the sides at once."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "replay.toml"
        settings.write_text(settings_text(sample.factor, options.move_s))
        clusters = {
            "plain": Cluster(f"{options.name}-plain", SIZE),
            "cadenza": Cluster(f"{options.name}-cadenza", SIZE, lanes=options.lanes, settings=settings),
        }
        chosen = [name for name in clusters if options.only in (None, name)]
        with ThreadPoolExecutor(len(chosen)) as pool:
            sides = pool.map(lambda name: play(clusters[name], sample, options.accounting), chosen)
            return dict(zip(chosen, sides, strict=True))


def main() -> int:
    """Run the replay and return its exit code."""
    options = arguments()
    costs = Costs(options.start_s, options.move_s, POLL_S)
    try:
        sample = drawn(options)
        forecasts = {"plain": plain_forecast(sample, costs), "cadenza": cadenza_forecast(sample, costs, options.lanes)}
        for name, forecast in (forecasts | {"ideal": ideal_forecast(sample)}).items():
            print(f"{name}, predicted: " + ", ".join(f"{key} {value:.1f}" for key, value in asdict(forecast).items()))
        if options.dry_run:
            return 0
        sides = replay(sample, options)
    except ValueError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    except ClusterError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    shown, met = table(sides, forecasts)
    print(f"\n{' '.join(sys.argv)}\n{shown}\n")
    for name, side in sides.items():
        print(details(name, side))
    found: dict[str, Any] = {
        name: asdict(side) | {"predicted": asdict(forecasts[name])} for name, side in sides.items()
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"command": sys.argv, **found}, indent=1) + "\n")
    print(f"numbers: {options.out}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
