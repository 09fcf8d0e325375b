#!/usr/bin/env python3
"""Run the same training jobs on plain Slurm and on Slurm with Cadenza, and compare.

Two nodes of four GPUs each, in containers on this machine. The processors play the GPUs: steps are paced
to the duration that the list states, so that a few cores can stand in for eight GPUs. Everything else is
real: Slurm, its daemons and its accounting, PyTorch, and every part of Cadenza. While the image builds, the simulator
predicts the figures; the tables at the end compare. Exit code 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clock
import metrics
import timeline
from demo_cluster import DemoCluster, allocations, result_of
from predict import predict
from screen import LiveView, console, figures_table, large_errors, predictions_table, verdicts
from workload import Job, WorkloadError, read_jobs

from cluster import ROOT, ClusterError, prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from demo_cluster import Queued

HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "demo.toml"
FILES = {"favorable": "jobs.csv", "unfavorable": "unfavorable.csv"}
GPUS = 8
PLAIN, CADENZA = "plain Slurm", "Cadenza"
POLL_S = 1.0
SETTLE_S = 30.0
REST_S = 3.0
GONE_S = 15.0
"""A job that is neither in the queue nor has left a result for this long has failed."""
PATIENCE_S = 600.0
"""Longest time that one list may take."""
ABOUT = """[bold]Cadenza's demo[/]: 2 nodes x 4 GPUs in containers, real Slurm, real PyTorch training on
simulated GPUs of 64 MB, whose contents leave and come back with each turn.
{cores} cores play {gpus} GPUs: each training step is paced to the duration that its list states
({paces} ms), so costs smaller than a step's slack do not show. Jobs with 4 GPUs, and most with 2,
are one process; {ddp} of the {jobs} jobs are two data-parallel ranks (torchrun, gloo)."""


@dataclass
class Progress:
    """One list on its way: what has been submitted, as id and time by name, and what has ended."""

    jobs: Sequence[Job]
    begin_s: float
    ids: dict[str, int]
    submitted: dict[str, float]
    reports: dict[str, dict[str, Any]]
    seen_s: dict[str, float]
    """When each job was last seen in the queue."""

    @property
    def text(self) -> str:
        """The counts."""
        return f"{len(self.ids)} of {len(self.jobs)} jobs submitted, {len(self.reports)} finished"


def play(cluster: DemoCluster, jobs: Sequence[Job], name: str, *, shown: bool = True) -> metrics.Run:
    """Submit a list at its times, wait for its end, and return the records."""
    title = f"{CADENZA if cluster.shared else PLAIN}, {name} list"
    with LiveView(cluster, title, shown=shown) as view:
        settle(view)
        progress = Progress(jobs, clock.now(), {}, {}, {}, {})
        while len(progress.reports) < len(jobs):
            submit_due(cluster, progress)
            collect(cluster, progress, view.queue)
            view.show(clock.now() - progress.begin_s, progress.text)
            clock.sleep(POLL_S)
    return record(cluster, progress, title)


def settle(view: LiveView) -> None:
    """Wait until the cluster is watched and has come to rest."""
    deadline_s = clock.now() + SETTLE_S
    while not view.ready and clock.now() < deadline_s:
        clock.sleep(POLL_S)
    clock.sleep(REST_S)


def submit_due(cluster: DemoCluster, progress: Progress) -> None:
    """Submit every job whose time has come."""
    for job in progress.jobs:
        now = clock.now()
        if job.job not in progress.ids and job.submit_s <= now - progress.begin_s:
            progress.submitted[job.job] = now
            progress.ids[job.job] = cluster.submit(job)
            progress.seen_s[job.job] = clock.now()


def collect(cluster: DemoCluster, progress: Progress, queue: tuple[Queued, ...] | None) -> None:
    """Take in the reports of ended jobs; raise ClusterError when one left none, or all take too long."""
    queued = {row.id for row in queue or ()}
    for job in progress.jobs:
        if job.job not in progress.ids or job.job in progress.reports:
            continue
        report = cluster.report(job)
        if report is not None:
            progress.reports[job.job] = report
        elif progress.ids[job.job] in queued:
            progress.seen_s[job.job] = clock.now()
        elif clock.now() - progress.seen_s[job.job] > GONE_S:
            number = progress.ids[job.job]
            raise ClusterError(f"job {number} ({job.job}) ended without a result:\n{cluster.end_of_log(job)}")
    if clock.now() - progress.begin_s > PATIENCE_S:
        raise ClusterError(f"after {PATIENCE_S:g} s: {progress.text}")


def record(cluster: DemoCluster, progress: Progress, title: str) -> metrics.Run:
    """Return the finished list with the stretches and switches of its jobs."""
    results = tuple(result_of(job, progress.reports[job.job], progress.submitted[job.job]) for job in progress.jobs)
    if not cluster.shared:
        return metrics.Run(title, GPUS, results, allocations(progress.jobs, progress.reports))
    clock.sleep(2 * POLL_S)  # the last stretches reach the store with the agents' next words
    names = {number: name for name, number in progress.ids.items()}
    return metrics.Run(title, GPUS, results, *cluster.recorded(names))


def play_all(options: argparse.Namespace, lists: Mapping[str, Sequence[Job]]) -> dict[str, tuple[metrics.Run, ...]]:
    """Start both clusters, play every list on both at once, and return the runs on plain Slurm and under Cadenza."""
    plain, shared = DemoCluster(f"{options.name}-plain", shared=False), DemoCluster(options.name, shared=True)
    with ThreadPoolExecutor(2) as pool:
        try:
            starts = pool.submit(plain.start, 1, None), pool.submit(shared.start, options.lanes, SETTINGS)
            for start in starts:
                start.result()
            runs: dict[str, tuple[metrics.Run, ...]] = {}
            for name, jobs in lists.items():
                other = pool.submit(play, plain, jobs, name, shown=False)
                under_cadenza = play(shared, jobs, name)
                runs[name] = other.result(), under_cadenza
            return runs
        finally:
            plain.down()
            shared.down()


def compare(
    name: str, runs: tuple[metrics.Run, ...], predicted: Mapping[str, Mapping[str, float]], out: Path
) -> list[metrics.Check]:
    """Print one list's table, write its plot and its numbers, and return its promises."""
    plain, shared = runs
    before, after = metrics.figures(plain), metrics.figures(shared)
    sides = {PLAIN: before, CADENZA: after}
    console.print(figures_table(f"{name} list, {before.jobs} jobs", sides, predicted))
    for sentence in large_errors(sides, predicted):
        console.print(sentence, style="bold red")
    timeline.plot(runs, out / f"{name}.png")
    numbers = {"plain": metrics.as_json(plain), "cadenza": metrics.as_json(shared), "predicted": predicted}
    (out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"time line: {out / f'{name}.png'}   numbers: {out / f'{name}.json'}\n")
    check = metrics.check_unfavorable if name == "unfavorable" else metrics.check_favorable
    return [*check(before, after), *metrics.check_runs(plain, shared)]


def introduce(lists: dict[str, Sequence[Job]], cores: int) -> None:
    """Print which parts are real."""
    jobs = [job for each in lists.values() for job in each]
    paces = "-".join(f"{pace * 1e3:.0f}" for pace in sorted({job.iteration_s for job in jobs}))
    ddp = sum(job.ranks > 1 for job in jobs)
    console.print(ABOUT.format(cores=cores, gpus=GPUS, paces=paces, ddp=ddp, jobs=len(jobs)))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FILES), help="run one of the lists")
    parser.add_argument("--lanes", type=int, default=4, help="lanes of each node under Cadenza (default: 4)")
    parser.add_argument("--name", default="demo", help="the cluster's name (default: demo)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results", help="where plots and numbers go (default: results)"
    )
    return parser.parse_args()


def run(options: argparse.Namespace) -> list[metrics.Check]:
    """Predict, play all lists on both clusters, compare, and return every promise."""
    files = {name: HERE / file for name, file in FILES.items() if options.only in (None, name)}
    lists: dict[str, Sequence[Job]] = {name: read_jobs(path) for name, path in files.items()}
    introduce(lists, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(prepare)
        settings = tomllib.loads(SETTINGS.read_text())
        predicted = {
            name: {PLAIN: predict(jobs), CADENZA: predict(jobs, lanes=options.lanes, settings=settings)}
            for name, jobs in lists.items()
        }
        for name, sides in predicted.items():
            console.print(predictions_table(f"{name} list, PREDICTED by the simulator", sides))
        prepared.result()
    runs = play_all(options, lists)
    options.out.mkdir(parents=True, exist_ok=True)
    return [check for name in lists for check in compare(name, runs[name], predicted[name], options.out)]


def main() -> int:
    """Run the demo and return its exit code."""
    try:
        checks = run(arguments())
    except WorkloadError as error:
        console.print(f"demo: {error}", style="red")
        return 2
    except ClusterError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1
    console.print(verdicts(checks))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
