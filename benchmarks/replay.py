#!/usr/bin/env python3
"""Replay a week of submissions on a real Slurm: plain backfill against Cadenza, the same jobs on as many GPUs.

Two fresh clusters in containers, one after the other or, with --together, at once: slurmctld, slurmdbd and 16 nodes of
8 (fake) GPUs, once with one lane and without Cadenza, once with two lanes and Cadenza under replay_cadenza.toml. The
jobs are a sample of a week of Microsoft's Philly trace, compressed in time as the output states; models are dealt out
of the published profiles. Each job is a loop that sleeps as its profile says (replay_job.py), attaches and takes turns
as a real one. Exit code 1 when a job is lost; 3 when the trace is not here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from published_data import needed
from replay_cluster import Cluster, Plan, Size, commands
from replay_figures import Costs, Figures, Load, Rpcs, costs, figures, loads, read_sdiag
from replay_week import Sample, Scale, cpu_profiles, read_rows, sample

from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.profiles import write_profiles
from cadenza.policies.inputs.published import synergy_profiles

from cluster import ROOT, ClusterError, prepare

TRACE = "philly-2017-09-10.csv"
SETTINGS = Path(__file__).with_name("replay_cadenza.toml")
MOST_RPCS = 6
SIDES = ("plain", "cadenza")


@dataclass(frozen=True)
class Side:
    """Results of one side's run."""

    up_s: float
    figures: Figures
    costs: Costs
    rpcs: Rpcs
    loads: dict[str, Load]
    seconds: float
    sbatch_s: float
    """Mean time of one sbatch."""
    late_s: float
    """Most that a submission was late."""

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "up_s": self.up_s, "seconds": self.seconds, "sbatch_s": self.sbatch_s, "late_s": self.late_s,
            "figures": asdict(self.figures), "costs": asdict(self.costs), "rpcs": asdict(self.rpcs),
            "loads": {name: asdict(load) for name, load in self.loads.items()},
        }  # fmt: skip


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--week", type=int, default=4, help="week of the trace, from 0 (default: 4)")
    parser.add_argument("--hours", type=float, default=168, help="hours of that week (default: 168)")
    parser.add_argument("--minutes", type=float, default=30, help="minutes in which they arrive (default: 30)")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=2, help="lanes under Cadenza (default: 2)")
    parser.add_argument("--load", type=float, default=1.1, help="offered load at the proportional share (default: 1.1)")
    parser.add_argument("--median", type=float, default=120, help="seconds of the median job (default: 120)")
    parser.add_argument("--longest", type=float, default=900, help="seconds of the week's longest job (default: 900)")
    parser.add_argument("--split", default="20/70/10", help="image/language/speech in percent (default: 20/70/10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SIDES, help="run one side")
    parser.add_argument("--together", action="store_true", help="both sides at once, in half of the time")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="Cadenza's (default: replay_cadenza.toml)")
    parser.add_argument("--name", default="replay", help="first part of the clusters' names (default: replay)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "replay.json")
    parser.add_argument("--dry-run", action="store_true", help="state the sample and start nothing")
    return parser.parse_args(words)


def play(cluster: Cluster, taken: Sample, plan: Plan, profiles: str, minutes: float) -> Side:
    """Run one side on a fresh cluster and remove it."""
    try:
        up_s = cluster.start({"profiles/replay.json": profiles} if cluster.settings else {})
        cluster.hand_over(plan, profiles)
        cluster.run("ctl", "sdiag", "--reset")
        before, started = cluster.look(), time.monotonic()
        # The queue of an overload this long drains in another window; what is left after three is stuck.
        began = cluster.replay(patience_s=3 * minutes * 60 + 2 * taken.longest_s)
        seconds = time.monotonic() - started
        rpcs, after = read_sdiag(cluster.run("ctl", "sdiag")), cluster.look()
        measured = rpcs, loads(before, after, seconds)
        return _side(cluster, taken, (began, began + minutes * 60), (up_s, seconds), measured)
    finally:
        cluster.down()


def _side(
    cluster: Cluster,
    taken: Sample,
    window: tuple[float, float],
    spent: tuple[float, float],
    measured: tuple[Rpcs, dict[str, Load]],
) -> Side:
    names = [job.name for job in taken.jobs]
    records, events = cluster.accounts(), cluster.events()
    found = figures(names, records, events, cluster.size.nodes * cluster.size.gpus, window)
    submitted = cluster.submitted()
    return Side(
        spent[0], found, costs(records, events, cluster.decided()), *measured, spent[1],
        sum(one["seconds"] for one in submitted) / len(submitted),
        max(one["at"] - one["due"] for one in submitted),
    )  # fmt: skip


ROWS = (
    ("mean JCT (s)", "mean_jct_s", "{:.1f}"),
    ("median JCT (s)", "p50_jct_s", "{:.1f}"),
    ("99th percentile JCT (s)", "p99_jct_s", "{:.0f}"),
    ("mean wait for the first start (s)", "mean_wait_s", "{:.1f}"),
    ("until the last job ended (s)", "makespan_s", "{:.0f}"),
    ("GPUs held while jobs arrived", "holding_window", "{:.1%}"),
    ("GPUs held until the end", "holding", "{:.1%}"),
    ("turns given up", "yields", "{}"),
    ("requeues", "restarts", "{}"),
)


def table(sides: dict[str, Side]) -> str:
    """Return the figures side by side, and plain over Cadenza where both ran."""
    both = f"{'plain/cadenza':>15s}" if len(sides) == len(SIDES) else ""
    lines = [f"{'':36s}" + "".join(f"{name:>12s}" for name in sides) + both]
    for label, key, form in ROWS:
        values = [getattr(side.figures, key) for side in sides.values()]
        lines.append(f"{label:36s}" + "".join(f"{form.format(value):>12s}" for value in values) + _ratio(values))
    lost = [len(side.figures.lost) for side in sides.values()]
    lines.append(f"{'lost jobs':36s}" + "".join(f"{count:>12d}" for count in lost))
    totals = [side.rpcs.total for side in sides.values()]
    lines.append(f"{'RPCs of slurmctld':36s}" + "".join(f"{total:>12d}" for total in totals) + _ratio(totals))
    for name in sorted({name for side in sides.values() for name in side.loads}):
        row = [side.loads.get(name, Load(0, 0.0, 0.0)) for side in sides.values()]
        lines.append(f"{name + ' (CPUs, MB)':36s}" + "".join(f"{load.cpus:6.3f}{load.memory_mb:6.0f}" for load in row))
    return "\n".join(lines)


def _ratio(values: list[float]) -> str:
    return f"{values[0] / values[1]:>15.2f}" if len(values) == len(SIDES) and values[1] else ""


def details(name: str, side: Side) -> str:
    """Return one side's lines below the table."""
    most = "; ".join(f"{kind} {count} ({mean_ms:.1f} ms)" for kind, count, mean_ms in side.rpcs.most(MOST_RPCS))
    cycles = ", ".join(f"{key} {value / 1000:.0f} ms" for key, value in side.rpcs.cycles.items())
    lost = f"\n  LOST: {' '.join(side.figures.lost)}" if side.figures.lost else ""
    return (
        f"{name}: cluster up in {side.up_s:.0f} s, replay took {side.seconds:.0f} s, "
        f"sbatch {side.sbatch_s * 1e3:.0f} ms each, at most {side.late_s:.1f} s late\n"
        f"  RPCs: {most}\n  cycles: {cycles.replace('_us', '')}{lost}"
    )


def drawn(options: argparse.Namespace) -> tuple[Sample, Scale, dict[str, Profile]]:
    """Return the jobs of these options, their scale, and the profiles that they obey."""
    scale = Scale(
        options.nodes, options.gpus_per_node, options.minutes, options.load, options.median, options.longest
    )  # fmt: skip
    profiles = cpu_profiles(synergy_profiles(), scale.iteration_s)
    with needed(TRACE).open(newline="") as file:
        rows = read_rows(file, options.week, options.hours)
    return sample(rows, options.hours, scale, profiles, options.split, options.seed), scale, profiles


def run(options: argparse.Namespace) -> dict[str, Side] | None:
    """State the sample, play the sides, print and write what came out."""
    taken, scale, profiles = drawn(options)
    print(f"{TRACE}, week {options.week}, seed {options.seed}: {taken.stated()}", flush=True)
    if options.dry_run:
        return None
    prepare()
    share = synergy_profiles()[taken.jobs[0].model].reference
    size = Size(options.nodes, options.gpus_per_node, int(share.cpus), 1000 * int(share.memory_gb))
    text = write_profiles(profiles, note="the replay's: along CPUs alone, all jobs of one pace")
    clusters = {
        "plain": Cluster(f"{options.name}-plain", size),
        "cadenza": Cluster(f"{options.name}-cadenza", size, options.lanes, options.settings),
    }
    chosen = [name for name in clusters if options.only in (None, name)]

    def side(name: str) -> Side:
        plan = commands(taken.jobs, size, scale.iteration_s, managed=name == "cadenza")
        return play(clusters[name], taken, plan, text, scale.minutes)

    with ThreadPoolExecutor(len(chosen) if options.together else 1) as pool:
        return dict(zip(chosen, pool.map(side, chosen), strict=True))


def report(sides: dict[str, Side], options: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    print(f"\n{' '.join(sys.argv)}\n{table(sides)}\n")
    for name, side in sides.items():
        print(details(name, side))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"command": sys.argv, **{name: side.as_json() for name, side in sides.items()}}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"numbers: {options.out}")


def main() -> int:
    """Run the replay and return its exit code."""
    options = arguments()
    try:
        sides = run(options)
    except ValueError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    except ClusterError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    if sides is None:
        return 0
    report(sides, options)
    return 1 if any(side.figures.lost for side in sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
