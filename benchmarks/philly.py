#!/usr/bin/env python3
"""The default on samples of Microsoft's Philly trace, against EASY backfill and the ideal preemptive policies.

Jobs of a window are drawn by a seed until they offer a load to 16 nodes of 8 GPUs; run times stay as they are, and all
jobs run to their end. ``cadenza simulate`` runs them with the shipped values, once with every job movable, once with
half of them and once with none; a move takes 60 s of a job's GPUs, another requeue loses what was done since the last
checkpoint. Baseline: EASY backfill with limits of 2 x run time + 300 s. Ideal: preemptive LAS at no cost. A sample on
which the ideal gains less than 1.2 over the baseline has nothing to schedule, and does not count; two of each window
and load do, from seed 1 upwards. Exit code 1 when a row is missed.

    CADENZA_DATA=FOLDER benchmarks/philly.py
    CADENZA_DATA=FOLDER benchmarks/philly.py --days 14:28 --load 0.9 --samples 1
    CADENZA_DATA=FOLDER benchmarks/philly.py --ablate --samples 1 # each part of the default changed once
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import floor, log10
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
from philly_sample import CLUSTER, DAY_S, PER_NODE, PhillyJob, draw_sample, read_philly, write_trace
from philly_yardsticks import Easy, Times, ideal
from published_data import needed

from cadenza.policies.inputs.published import synergy_profiles

CADENZA = Path(sys.executable).with_name("cadenza")
COSTS = "migrate_s = {0:.1f}\nrestart_s = {0:.1f}\n"
"""The GPU time of a move; the other costs are the simulator's defaults."""
MOVABLE = {"all": 1.0, "half": 0.5, "none": 0.0}
LEAST_GAIN = 1.2
MAX_SEEDS = 50
"""Samples that are drawn of a window and load; where so many do not count, it has nothing to schedule."""
IDEALS = ("srtf", "las", "levels", "gittins")
CLASS_JOBS, USER_JOBS = 30, 20
SOON_S = 120.0
"""Time to the hundredth iteration that is good enough whatever backfill's is."""
LOADS = (0.9, 1.1)
WINDOWS = ((14, 28), (28, 42))
ABLATIONS: dict[str, tuple[str, ...]] = {
    "a second lane: turns as well": ("--lanes", "2"),
    "a second lane, users share": ("--lanes", "2", "--share-between-users", "yes"),
    "a second lane, native admission": ("--lanes", "2", "--admission", "native"),
    "three queues in place of the levels": ("--order", "tiresias"),
    "no order: first come, first served": ("--order", "fifo"),
    "no moves of blocked jobs: turns in the order": ("--share", "timeslice", "--turns", "order"),
    "fair turns": ("--share", "timeslice", "--turns", "fair"),
}
"""Each changes one part of the default; that no job can move is a row of the table."""


@dataclass(frozen=True)
class Outcome:
    """One scheduler's times of a sample's jobs, in order of the sample; seconds since submission."""

    jct_s: np.ndarray
    first_s: np.ndarray
    hundred_s: np.ndarray
    """To the end of the hundredth iteration; nan for a job without one."""


@dataclass(frozen=True)
class Row:
    """One goal of a sample: the figure, its limit, and the mean gain over the baseline that goes with it."""

    name: str
    figure: float
    limit: float
    gain: float

    @property
    def ok(self) -> bool:
        """Return True if the goal is met."""
        return self.figure <= self.limit


@dataclass(frozen=True)
class Sample:
    """A sample with its baseline and its ideals."""

    days: tuple[int, int]
    load: float
    seed: int
    jobs: list[PhillyJob]
    easy: Outcome
    ideals: dict[str, Outcome]

    @property
    def name(self) -> str:
        """Return window, load and seed."""
        return f"days {self.days[0]}-{self.days[1]}, load {self.load}, seed {self.seed}"

    @property
    def gain(self) -> float:
        """Return the ideal's gain over the baseline in the mean."""
        return float(self.easy.jct_s.mean() / self.ideals["las"].jct_s.mean())


def outcome_of(jobs: Sequence[PhillyJob], times: Times) -> Outcome:
    """Return the outcome of jobs that run without a break from their start."""
    submit = np.array([job.submit_s for job in jobs])
    start = np.array([times.start_s[job.id] for job in jobs])
    end = np.array([times.end_s[job.id] for job in jobs])
    hundred = np.array([100 * job.iteration_s if job.iterations >= 100 else np.nan for job in jobs])  # noqa: PLR2004
    return Outcome(end - submit, start - submit, start - submit + hundred)


def simulated(sample: Sample, movable: float, move_s: float, options: Sequence[str], folder: Path) -> Outcome:
    """Return the outcome under ``cadenza simulate``; end with its exit code when it fails."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    stem = folder / "sample"
    trace, costs, rows = stem.with_suffix(".trace.csv"), folder / "costs.toml", stem.with_suffix(".jobs.csv")
    write_trace(trace, sample.jobs, movable)
    costs.write_text(COSTS.format(move_s))
    command = [
        CADENZA, "simulate", "--trace", trace, "--nodes", CLUSTER, "--costs", costs, "--per-job", rows, "--quiet",
        "--json", *options,
    ]  # fmt: skip
    done = run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{sample.name}: {done.stderr.strip()}", file=sys.stderr)
        raise SystemExit(done.returncode)
    with rows.open(newline="") as file:
        found = {int(row["id"]): row for row in csv.DictReader(file)}

    def column(name: str) -> np.ndarray:
        return np.array([float(found[job.id][name] or "nan") for job in sample.jobs])

    submit = np.array([job.submit_s for job in sample.jobs])
    return Outcome(column("finish_s") - submit, column("start_s") - submit, column("to_100_iterations_s"))


# --- The table -----------------------------------------------------------------------------------------------------


def rows_of(sample: Sample, runs: dict[str, Outcome]) -> list[Row]:
    """Return the goals of a sample, in the order of the table."""
    heavy = sample.load > 1
    ours, easy, las = runs["all"], sample.easy, sample.ideals["las"]
    half, none = runs["half"], runs["none"]

    def mean(result: Outcome) -> float:
        return float(result.jct_s.mean())

    def quantile(result: Outcome, part: float) -> float:
        return float(np.percentile(result.jct_s, part))

    tail = max(quantile(easy, 99), quantile(las, 99))
    wide = np.array([job.gpus >= PER_NODE for job in sample.jobs])
    soon = ~np.isnan(easy.hundred_s)
    easy_soon = float(easy.hundred_s[soon].mean())
    goal_soon = max(easy_soon / (50 if heavy else 20), SOON_S)
    gain = mean(easy) / mean(ours)
    groups = {"class": [(job.gpus, floor(log10(max(job.run_s, 1)))) for job in sample.jobs]}
    worst_class = worst(groups["class"], CLASS_JOBS, ours, easy, las)
    worst_user = worst([job.user for job in sample.jobs], USER_JOBS, ours, easy, las)
    first = float(ours.first_s[wide].mean() / easy.first_s[wide].mean())
    return [
        Row("mean, to the ideal", mean(ours) / mean(las), 1.12 if heavy else 1.10, gain),
        Row("median, to the ideal", quantile(ours, 50) / quantile(las, 50), 1.25 if heavy else 1.20,
            quantile(easy, 50) / quantile(ours, 50)),
        Row("p99, to the larger", quantile(ours, 99) / tail, 1.08, quantile(easy, 99) / quantile(ours, 99)),
        Row("half can move: mean, to backfill", mean(half) / mean(easy), 0.75 if heavy else 0.95,
            mean(easy) / mean(half)),
        Row("half can move: p99, to backfill", quantile(half, 99) / quantile(easy, 99), 1.08,
            quantile(easy, 99) / quantile(half, 99)),
        Row("none can move: mean, to backfill", mean(none) / mean(easy), 1.0, mean(easy) / mean(none)),
        Row("none can move: p99, to backfill", quantile(none, 99) / quantile(easy, 99), 1.05,
            quantile(easy, 99) / quantile(none, 99)),
        Row("class served worst, to the larger", worst_class, 1.20, gain),
        Row("user served worst, to the larger", worst_user, 1.30, gain),
        Row("first start of 8 GPUs and more, to backfill", first, 0.5 if heavy else 1.0, 1 / first),
        Row("mean to 100 iterations, to its goal", float(ours.hundred_s[soon].mean()) / goal_soon, 1.0,
            easy_soon / float(ours.hundred_s[soon].mean())),
    ]  # fmt: skip


def worst(keys: Iterable[object], least: int, ours: Outcome, easy: Outcome, las: Outcome) -> float:
    """Return the largest ratio of a group's mean to the larger of the baseline's and the ideal's."""
    members: dict[object, list[int]] = defaultdict(list)
    for at, key in enumerate(keys):
        members[key].append(at)
    groups = [rows for rows in members.values() if len(rows) >= least]
    ratios = [ours.jct_s[g].mean() / max(easy.jct_s[g].mean(), las.jct_s[g].mean()) for g in groups]
    return float(max(ratios, default=0.0))


def samples_of(options: argparse.Namespace) -> Iterable[Sample]:
    """Yield the samples that count, and print those that do not."""
    trace, profiles = read_philly(needed("philly-2017-09-10.csv")), synergy_profiles()
    for days in options.days:
        history = np.array([job.gpus * job.run_s for job in trace if job.submit_s < days[0] * DAY_S])
        for load in options.load:
            counted, seed = 0, 0
            while counted < options.samples:
                if seed == MAX_SEEDS:
                    raise SystemExit(f"days {days[0]}-{days[1]}, load {load}: {counted} of {MAX_SEEDS} samples count")
                seed += 1
                jobs = draw_sample(trace, days, load, seed, profiles)
                ideals = {name: outcome_of(jobs, ideal(jobs, name, history)) for name in IDEALS}
                sample = Sample(days, load, seed, jobs, outcome_of(jobs, Easy(jobs).run()), ideals)
                if sample.gain < LEAST_GAIN:
                    print(f"{sample.name}: the ideal gains {sample.gain:.2f}: nothing to schedule, not counted")
                    continue
                counted += 1
                yield sample


def show(sample: Sample, rows: Sequence[Row]) -> None:
    """Print one sample's table."""
    las = sample.ideals["las"].jct_s.mean()
    peers = ", ".join(f"{name} {result.jct_s.mean() / las:.3f}" for name, result in sample.ideals.items())
    print(
        f"\n{sample.name}: {len(sample.jobs)} jobs; ideal mean {las / 3600:.2f} h, backfill's {sample.gain:.2f} times"
    )
    print(f"  means to ideal LAS: {peers}")
    for row in rows:
        word = "ok" if row.ok else "MISSED"
        print(
            f"  {row.name:45s} {row.figure:8.3f}  limit {row.limit:5.2f}  {word:6s}  gain over backfill {row.gain:.2f}"
        )
    sys.stdout.flush()


def pair(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """Return a reader of numbers between colons."""
    return lambda text: tuple(kind(part) for part in text.split(":"))


def main() -> int:
    """Run the samples, two simulations at once, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=pair(int), action="append", help="FIRST:LAST day of a window; may be repeated")
    parser.add_argument("--load", type=float, action="append", help="offered load; may be repeated")
    parser.add_argument("--samples", type=int, default=2, help="samples of each window and load")
    parser.add_argument("--move-s", type=float, default=60.0, help="time that a move takes of its GPUs, in seconds")
    parser.add_argument("--ablate", action="store_true", help="repeat the table with each part of the default changed")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("simulate", nargs="*", help="after --: options of cadenza simulate, in place of the default's")
    options = parser.parse_args()
    options.days, options.load = options.days or WINDOWS, options.load or LOADS
    samples = list(samples_of(options))
    found = tables("the default", samples, options.move_s, options.simulate)
    missed = sum(not row["ok"] for table in found for row in table["rows"])
    for name, words in ABLATIONS.items() if options.ablate else ():
        found += tables(name, samples, options.move_s, [*options.simulate, *words])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    return 1 if missed else 0


def tables(variant: str, samples: Sequence[Sample], move_s: float, words: Sequence[str]) -> list[dict[str, Any]]:
    """Print and return the tables of all samples with these options of ``cadenza simulate``."""
    print(f"\n== {variant}{': ' if words else ''}{' '.join(words)}")
    began, found, met, total = time.monotonic(), [], 0, 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        asked = [
            {name: pool.submit(simulated, sample, part, move_s, words, Path(folder)) for name, part in MOVABLE.items()}
            for sample in samples
        ]
        for sample, runs in zip(samples, asked, strict=True):
            rows = rows_of(sample, {name: future.result() for name, future in runs.items()})
            show(sample, rows)
            met, total = met + sum(row.ok for row in rows), total + len(rows)
            shown = [{**asdict(row), "ok": row.ok} for row in rows]
            found.append({"variant": variant, "sample": sample.name, "gain": sample.gain, "rows": shown})
    print(f"\n{variant}: {met} of {total} rows met; {time.monotonic() - began:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
