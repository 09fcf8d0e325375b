#!/usr/bin/env python3
"""Run the same training jobs on plain Slurm and on Slurm with Cadenza, and compare.

Two nodes of four GPUs each, in containers on this machine. The processors play the GPUs: steps are paced
to the duration that the list states, so that a few cores can stand in for eight GPUs. Everything else is
real: Slurm, its daemons and its accounting, PyTorch, and every part of Cadenza. Exit code 1 when a promise
is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clock
import metrics
import timeline
from cluster import ROOT, Cluster, ClusterError, allocations, prepare, result_of
from screen import LiveView, console, figures_table, verdicts
from workload import Job, WorkloadError, read_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster import Queued

HERE = Path(__file__).resolve().parent
GPUS = 8
POLL_S = 1.0
SETTLE_S = 30.0
REST_S = 3.0
GONE_S = 15.0
"""A job that is neither in the queue nor has left a result for this long has failed."""
PATIENCE_S = 600.0
"""Longest time that one list may take."""
ABOUT = """[bold]Cadenza's demo[/]: 2 nodes x 4 GPUs in containers, real Slurm, real PyTorch training on the CPU.
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


def play(cluster: Cluster, jobs: Sequence[Job], title: str) -> metrics.Run:
    """Submit a list at its times, wait for its end, and return what was recorded."""
    with LiveView(cluster, title) as view:
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


def submit_due(cluster: Cluster, progress: Progress) -> None:
    """Submit every job whose time has come."""
    for job in progress.jobs:
        now = clock.now()
        if job.job not in progress.ids and job.submit_s <= now - progress.begin_s:
            progress.submitted[job.job] = now
            progress.ids[job.job] = cluster.submit(job)
            progress.seen_s[job.job] = clock.now()


def collect(cluster: Cluster, progress: Progress, queue: tuple[Queued, ...] | None) -> None:
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
            raise ClusterError(f"job {number} ({job.job}) ended without a result:\n{cluster.log(job)}")
    if clock.now() - progress.begin_s > PATIENCE_S:
        raise ClusterError(f"after {PATIENCE_S:g} s: {progress.text}")


def record(cluster: Cluster, progress: Progress, title: str) -> metrics.Run:
    """Return the finished list with the stretches and switches of its jobs."""
    results = tuple(result_of(job, progress.reports[job.job], progress.submitted[job.job]) for job in progress.jobs)
    if not cluster.shared:
        return metrics.Run(title, GPUS, results, allocations(progress.jobs, progress.reports))
    clock.sleep(2 * POLL_S)  # the last stretches reach the store with the agents' next words
    names = {number: name for name, number in progress.ids.items()}
    return metrics.Run(title, GPUS, results, *cluster.recorded(names))


def side(
    cluster: Cluster, lanes: int, settings: Path | None, lists: dict[str, Sequence[Job]]
) -> dict[str, metrics.Run]:
    """Start one cluster, play every list on it, and remove it."""
    kind = "Cadenza" if cluster.shared else "plain Slurm"
    cluster.up(lanes, settings)
    try:
        return {name: play(cluster, jobs, f"{kind}, {name} list") for name, jobs in lists.items()}
    finally:
        cluster.down()


def compare(name: str, plain: metrics.Run, shared: metrics.Run, out: Path) -> list[metrics.Check]:
    """Print one list's table, write its plot and its numbers, and return its promises."""
    before, after = metrics.figures(plain), metrics.figures(shared)
    console.print(figures_table(f"{name} list, {before.jobs} jobs", before, after))
    timeline.plot((plain, shared), out / f"{name}.png")
    text = json.dumps({"plain": metrics.as_json(plain), "cadenza": metrics.as_json(shared)}, indent=1)
    (out / f"{name}.json").write_text(text + "\n")
    console.print(f"time line: {out / f'{name}.png'}   numbers: {out / f'{name}.json'}\n")
    check = metrics.check_unfavourable if name == "unfavourable" else metrics.check_favourable
    return [*check(before, after), *metrics.check_runs(plain, shared)]


def introduce(lists: dict[str, Sequence[Job]], cores: int) -> None:
    """Say what is real and what is not."""
    jobs = [job for each in lists.values() for job in each]
    paces = "-".join(f"{pace * 1e3:.0f}" for pace in sorted({job.iteration_s for job in jobs}))
    ddp = sum(job.ranks > 1 for job in jobs)
    console.print(ABOUT.format(cores=cores, gpus=GPUS, paces=paces, ddp=ddp, jobs=len(jobs)))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["favourable", "unfavourable"], help="run one of the lists")
    parser.add_argument("--lanes", type=int, default=4, help="lanes of each node under Cadenza (default: 4)")
    parser.add_argument("--name", default="demo", help="the cluster's name (default: demo)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results", help="where plots and numbers go (default: results)"
    )
    return parser.parse_args()


def run(options: argparse.Namespace) -> list[metrics.Check]:
    """Play all lists on both clusters and return every promise."""
    files = {"favourable": HERE / "jobs.csv", "unfavourable": HERE / "unfavourable.csv"}
    lists: dict[str, Sequence[Job]] = {
        name: read_jobs(path) for name, path in files.items() if options.only in (None, name)
    }
    introduce(lists, len(os.sched_getaffinity(0)))
    prepare()
    plain = side(Cluster(options.name, shared=False), 1, None, lists)
    shared = side(Cluster(options.name, shared=True), options.lanes, HERE / "demo.toml", lists)
    options.out.mkdir(parents=True, exist_ok=True)
    return [check for name in lists for check in compare(name, plain[name], shared[name], options.out)]


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
