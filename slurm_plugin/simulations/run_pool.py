"""Runs of a what-if next to each other, one process each, with one progress bar and an estimate of the time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from cadenza.policies.simulator.figures import Summary
from cadenza.policies.simulator.result_file import encode
from cadenza.policies.simulator.shareable import Unshareable
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.simulations.request import Site, read_request
from cadenza.slurm_plugin.simulations.runner import progress_bar, run_request, saved

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

MIN_JOBS_APART = 2_000
"""Shorter runs are over before another process has started."""
REPORT_S = 0.5
TIMED_JOBS, TIMED_S = 500, 4.0
"""Jobs of the first run that is timed for an estimate; seconds after which no longer one follows."""


@dataclass(frozen=True)
class Task:
    """One simulation: the options of ``cadenza simulate``, and the site that it runs on."""

    options: Mapping[str, Any]
    arguments: tuple[str, ...]
    site: Site


@dataclass(frozen=True)
class Outcome:
    """Result of a task as ``cadenza simulate --save`` writes it, its figures, and the wall time of the run.

    ``easy``: figures of EASY on the same jobs, with a run of Slurm alone only.
    """

    saved: bytes
    summary: Summary
    unshareable: Unshareable | None
    wall_s: float
    easy: Summary | None = None


def run_task(task: Task, progress: Callable[[float, int], None] | None = None) -> Outcome:
    """Return the outcome of one simulation; raise InputError where jobs and cluster do not go together."""
    began_s = SystemClock().monotonic()
    request = replace(read_request(task.options, task.arguments, task.site), baseline=None)
    results = run_request(request, progress)
    wall_s = SystemClock().monotonic() - began_s
    return Outcome(
        encode(saved(results)), results.summaries[0], results.unshareable, wall_s, next(iter(results.easy), None)
    )


def run_tasks(tasks: Sequence[Task], *, quiet: bool) -> list[Outcome]:
    """Return the outcomes of simulations of the same jobs; long ones run at once, as far as there are CPUs."""
    jobs = len(tasks[0].site.jobs)
    if jobs < MIN_JOBS_APART or _cpus() == 1:
        return [run_task(task) for task in tasks]
    context = get_context("spawn")
    reports: SimpleQueue[tuple[int, int]] = context.SimpleQueue()
    with (
        ProcessPoolExecutor(
            min(_cpus(), len(tasks)), mp_context=context, initializer=_report_to, initargs=(reports,)
        ) as pool,
        progress_bar(quiet=quiet) as bar,
    ):
        # The last ones, in which most jobs can move, take the longest, so they begin first.
        futures: list[Future[Outcome]] = [pool.submit(_run_apart, *row) for row in reversed([*enumerate(tasks)])][::-1]
        bars = [bar.add_task(str(task.options["label"]), total=jobs) for task in tasks] if bar is not None else []
        if bar is not None:
            bar.start()
        while wait(futures, REPORT_S).not_done or not reports.empty():
            while not reports.empty():
                number, ended = reports.get()
                if bar is not None:
                    bar.update(bars[number], completed=ended)
        return [future.result() for future in futures]


def estimate_s(tasks_of: Callable[[int], Sequence[Task]], jobs: int) -> tuple[float, float, int]:
    """Return the least and the most wall seconds that ``run_tasks`` is expected to take, and the jobs timed for it.

    ``tasks_of`` returns the tasks with as many of the jobs. Their number is doubled until the runs take long enough to
    tell. The least grows with the number of jobs, the most with its square: each round looks at the queue, and the few
    jobs begin without the one that weeks build up.
    """
    count = min(TIMED_JOBS, jobs)
    while True:
        spent_s = [run_task(replace(task, options={**task.options, "quiet": True})).wall_s for task in tasks_of(count)]
        if sum(spent_s) > TIMED_S or count > jobs / 4:
            whole_s = max(*spent_s, sum(spent_s) / _cpus())
            return whole_s * jobs / count, whole_s * (jobs / count) ** 2, count
        count *= 2


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


# --- In a process of its own -----------------------------------------------------------------------------

_reports: list[SimpleQueue[tuple[int, int]]] = []


def _report_to(reports: SimpleQueue[tuple[int, int]]) -> None:
    _reports[:] = [reports]


def _run_apart(number: int, task: Task) -> Outcome:
    """Run a task, and report how many of its jobs have ended, a few times a second."""
    clock, next_s = SystemClock(), 0.0

    def progress(_time_s: float, ended: int) -> None:
        nonlocal next_s
        if (now_s := clock.monotonic()) >= next_s:
            next_s = now_s + REPORT_S
            _reports[0].put((number, ended))

    return run_task(replace(task, options={**task.options, "quiet": True}), progress)
