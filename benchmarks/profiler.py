#!/usr/bin/env python3
"""Profile two PyTorch jobs, then measure the points that were only predicted; exit code 1 unless limits are kept.

images   compressed images are decoded and augmented by loader workers: bound by CPU preprocessing
text     a small transformer on text: hardly any preprocessing

Both train for real. Without a GPU a step takes at least 40 ms, in which no CPU is used, as if a GPU computed. The grid
are CPUs in quarters from a half on, given as quotas, so that two cores have seven points; it needs root or a delegated
cgroup. No point takes longer than --point-s, so that all of it ends within six minutes on two cores.

error     prediction against a second run with the same stopping rule, at each point that the profile did not measure
time      of the profile, starts included, against that of the full grid: every number of CPUs with each of eleven
          cache sizes, which the profile computes. Measured is the grid's row with all memory (what the profile took,
          and the points of the second run); the other ten rows are not run, but counted as taking as long as that one.
          The share of the one measured row stands beside it, without a limit.

Other processes on the machine lengthen and blur all of it: the load is printed with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from cadenza.profiler.clock import SystemClock
from cadenza.profiler.law import fit, predict, worst_error
from cadenza.profiler.measure import Point, Rule
from cadenza.profiler.memory import PARTS
from cadenza.profiler.offline import Offline, Request, every
from cadenza.profiler.search import next_point
from cadenza.profiler.state import State
from cadenza.slurm_plugin.cli.profile import end_on_sigterm

ERROR_LIMIT = 0.05
TIME_LIMIT = 0.2
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "profile"
STEP = 0.25
LEAST = 0.5


def measured(words: tuple[str, ...], out: Path, cpus: tuple[float, ...], rule: Rule, search: Any) -> State:
    """Measure one command at the points that a search asks for."""

    def tell(point: Point) -> None:
        note = "" if point.settled else ", interval still wide"
        print(f"  {point.cpus:g} CPUs: {point.iteration_s * 1000:.1f} ms, {point.spent_s:.1f} s{note}", file=sys.stderr)

    offline = Offline(Request(words, out, cpus=cpus, rule=rule, search=search), SystemClock(), tell)
    try:
        return offline.run()
    finally:
        offline.close()


def job(name: str, words: tuple[str, ...], folder: Path, grid: tuple[float, ...], rule: Rule) -> dict[str, Any]:
    """Return a profile's predictions beside measurements of a second run."""
    load = os.getloadavg()[0]
    print(name, file=sys.stderr)
    profile = measured(words, folder / f"{name}.json", grid, rule, next_point)
    times = profile.times()
    law = fit(times)
    left = tuple(cpus for cpus in grid if cpus not in times)
    check = measured(words, folder / f"{name}-check.json", left, rule, every) if left else State([], "")
    row = {cpus: predict(law, times, cpus) for cpus in left}
    row_s = profile.spent_s + sum(point.spent_s for point in check.points)
    return {
        "law": {**law._asdict(), "error": worst_error(law, times)},
        "measured_ms": {f"{cpus:g}": seconds * 1000 for cpus, seconds in sorted(times.items())},
        "held_out": {
            f"{cpus:g}": {
                "predicted_ms": row[cpus] * 1000,
                "measured_ms": seconds * 1000,
                "error": row[cpus] / seconds - 1,
                "law_error": law.time_s(cpus) / seconds - 1,
            }
            for cpus, seconds in sorted(check.times().items())
        },
        "worst_error": max((abs(row[cpus] / seconds - 1) for cpus, seconds in check.times().items()), default=0.0),
        "spent_s": profile.spent_s,
        "row_s": row_s,
        "points": [len(times), len(grid), len(grid) * len(PARTS)],
        "of_the_row": profile.spent_s / row_s,
        "of_the_grid": profile.spent_s / (row_s * len(PARTS)),
        "load": [load, os.getloadavg()[0]],
        "others": max(point.others for point in (*profile.points, *check.points)),
        "stolen": max(point.stolen for point in (*profile.points, *check.points)),
        "unsettled": sum(not point.settled for point in (*profile.points, *check.points)),
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the tables."""
    for name, row in found.items():
        law = row["law"]
        print(f"{name}: T_gpu {law['gpu_s'] * 1000:.1f} ms, P {law['work_s'] * 1000:.1f} CPU-ms a step", end="; ")
        print(f"largest error of the law {law['error']:.1%} at {', '.join(row['measured_ms'])} CPUs")
        for cpus, point in row["held_out"].items():
            print(f"  {cpus:>5} CPUs: predicted {point['predicted_ms']:7.1f} ms, measured", end=" ")
            print(f"{point['measured_ms']:7.1f} ms, error {point['error']:+.1%} (law alone {point['law_error']:+.1%})")
        verdict = "met" if row["worst_error"] <= ERROR_LIMIT else "MISSED"
        print(f"  largest error {row['worst_error']:.1%}, limit {ERROR_LIMIT:.0%}: {verdict}")
        show_time(row)
        print(f"  load {row['load'][0]:.1f} before, {row['load'][1]:.1f} after (our own run included);", end=" ")
        print(f"others used up to {row['others']:.1f} CPUs, the hypervisor {row['stolen']:.0%} of the time;", end=" ")
        print(f"{row['unsettled']} points with a wide interval")


def show_time(row: dict[str, Any]) -> None:
    """Print what profiling took, and of what."""
    few, line, full = row["points"]
    verdict = "met" if row["of_the_grid"] <= TIME_LIMIT else "MISSED"
    print(f"  profile: {few} points measured in {row['spent_s']:.0f} s, the other {full - few} of {full} computed")
    print(f"  full grid: {line} points measured in {row['row_s']:.0f} s (all memory),", end=" ")
    print(f"{full - line} with less memory not run, counted alike: {row['row_s'] * len(PARTS):.0f} s")
    print(f"  profile over full grid {row['of_the_grid']:.1%}, limit {TIME_LIMIT:.0%}: {verdict};", end=" ")
    print(f"over the measured row alone {row['of_the_row']:.0%} (no limit)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point-s", type=float, default=20.0, help="most seconds for a point")
    parser.add_argument("--within", type=float, default=1.5, help="half of the 95 %% interval, per cent of the mean")
    parser.add_argument("--only", choices=("images", "text"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    end_on_sigterm()
    rule = Rule(within=options.within / 100, most_s=options.point_s)
    grid = tuple(STEP * at for at in range(round(LEAST / STEP), round(len(os.sched_getaffinity(0)) / STEP) + 1))
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {"images": ("--data", str(folder / "images")), "text": ()}
        for job_name, more in jobs.items():
            if options.only in (None, job_name):
                words = (sys.executable, str(EXAMPLES / f"{job_name}.py"), *more)
                found[job_name] = job(job_name, words, folder, grid, rule)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    kept = all(row["worst_error"] <= ERROR_LIMIT and row["of_the_grid"] <= TIME_LIMIT for row in found.values())
    sys.exit(not kept)


if __name__ == "__main__":
    main()
