"""Runs of a request, one for each seed or load, with a progress bar for long ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import HOUR, Summary, flat, over_seeds, quantile, summarize
from cadenza.policies.simulator.ideal_las import ideal_las
from cadenza.policies.simulator.load_sweep import LoadRow, highest_stable, load_rows, sweep_point, too_short
from cadenza.policies.simulator.result_file import Saved, SavedRun, SweepPoint, save_run
from cadenza.policies.simulator.run_values import GUARD, Result
from cadenza.policies.simulator.shareable import Unshareable, unshareable_jobs
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.slurm_baseline import first_come, simulate_slurm
from cadenza.policies.slurm.backfill import STRICT
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.report.metrics import comparable
from cadenza.slurm_plugin.simulations.request import Request

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PROGRESS_AFTER_S = 1.0
"""Seconds of wall time after which a run shows its progress."""
PROGRESS_INTERVAL_S = 0.1
LINES_INTERVAL_S = 10.0
MAX_LINE = 8192
COMPARED = (
    "avg_jct_h", "p50_jct_h", "p99_jct_h", "p999_jct_h", "makespan_h", "mean_bounded_slowdown", "wait_1_gpu_h",
    "wait_2_to_7_gpus_h", "wait_8_gpus_h", "wait_more_gpus_h", "idle_waiting_gpus", "time_to_100_iterations_s",
    "mean_time_to_100_iterations_s",
)  # fmt: skip
"""Figures that are compared with the baseline's; less is better for all."""


class Ideal(NamedTuple):
    """Completion times under ideal least attained service, hours."""

    avg_jct_h: float
    p50_jct_h: float
    p99_jct_h: float


@dataclass
class Results:
    """Results of a request, added run by run: one for each seed, or the points of a sweep."""

    request: Request
    gpus: int
    cpus: int
    summaries: list[Summary] = field(default_factory=list)
    runs: list[SavedRun] = field(default_factory=list)
    points: list[SweepPoint] = field(default_factory=list)
    short: bool = False
    """True if a sweep has too few arrivals to tell stable loads from others."""
    baselines: list[Summary] = field(default_factory=list)
    """The same jobs under the baseline; empty without one."""
    baseline_runs: list[SavedRun] = field(default_factory=list)
    easy: list[Summary] = field(default_factory=list)
    """The same jobs under EASY backfill, with each comparison with Slurm and each run of it."""
    ideal: list[Ideal] = field(default_factory=list)
    """The same jobs under ideal least attained service; as ``easy``."""
    jobs: int = 0
    opted_in: int = 0
    """Jobs that opted in."""
    movable: int = 0
    """Those of them that keep checkpoints."""
    unshareable: Unshareable | None = None
    """The first run's; None without sharing."""

    @property
    def ratio_to_ideal(self) -> dict[str, float | None]:
        """Return our completion times over the ideal's, of means over the seeds."""
        found: dict[str, float | None] = {}
        for name in Ideal._fields:
            ours = [value for one in self.summaries if (value := getattr(one, name)) is not None]
            base = fmean(getattr(one, name) for one in self.ideal)
            found[name] = fmean(ours) / base if len(ours) == len(self.summaries) and base else None
        return found

    @property
    def loads(self) -> tuple[LoadRow, ...]:
        """Return the sweep's rows, over all seeds."""
        return load_rows(self.points)

    def as_json(self) -> dict[str, Any]:
        """Return the result as it is printed: figures by name, for several seeds their means with intervals."""
        drawn = self.request.workload is not None
        head = {"policy": self.request.policy.name, "gpus": self.gpus, "seeds": self.request.seeds if drawn else ()}
        if self.points:
            rows = self.loads
            stable = None if self.short else highest_stable(rows)
            return {
                **head,
                "sweep": rows,
                "highest_stable_load": stable,
                "too_short": self.short,
                "points": self.points,
            }
        runs = [{"seed": run.seed, **run.summary} for run in self.runs] if len(self.runs) > 1 else []
        found = {**over_seeds(self.summaries), **head, **({"runs": runs} if runs else {})}
        found["movable_jobs"] = self.movable / self.jobs if self.jobs else None
        if self.unshareable is not None:
            found["unshareable"] = self.unshareable._asdict()
        if self.baselines:
            found["baseline"] = {"name": self.request.baseline, **over_seeds(self.baselines)}
            found["ratio_to_baseline"] = ratios(self.summaries, self.baselines)
        if self.easy:
            found["easy"] = over_seeds(self.easy)
            found["ratio_to_easy"] = ratios(self.summaries, self.easy)
        if self.ideal:
            found["ideal_las"] = {
                name: fmean(values) for name, values in zip(Ideal._fields, zip(*self.ideal, strict=True), strict=True)
            }
            found["ratio_to_ideal_las"] = self.ratio_to_ideal
        found["opted_in_jobs"] = self.opted_in / self.jobs if self.jobs else None
        found["weights"] = msgspec.structs.asdict(self.request.setup.queue.weights)
        return found


def ratios(ours: Sequence[Summary], theirs: Sequence[Summary]) -> dict[str, float | None]:
    """Return each compared figure over the other's, of means over the seeds.

    None where one lacks it, or where theirs is too small to compare with.
    """
    found: dict[str, float | None] = {}
    jct_h = fmean([row.avg_jct_h for row in theirs if row.avg_jct_h is not None] or [0.0])
    for key in COMPARED:
        pair = [[value for row in rows if (value := flat(row)[key]) is not None] for rows in (ours, theirs)]
        whole = all(len(values) == len(ours) for values in pair)
        base = fmean(pair[1]) if whole and pair[1] else 0.0
        found[key] = fmean(pair[0]) / base if whole and pair[1] and comparable(key, base, jct_h) else None
    return found


def run_request(request: Request, progress: Callable[[float, int], None] | None = None) -> Results:
    """Run everything and return the results; raise InputError where jobs and cluster do not go together.

    ``progress`` is called in place of a progress bar, with the simulated time in seconds and the jobs that have ended.
    """
    whole = [node for node in request.nodes if node.lane == 0]
    found = Results(request, sum(node.gpus for node in whole), sum(node.cpus for node in whole))
    work = [(load, seed) for load in request.loads or (None,) for seed in request.seeds]
    for number, (load, seed) in enumerate(work, 1):
        jobs = request.jobs(seed, load)
        title = f"run {number} of {len(work)}" if len(work) > 1 else "simulating"
        result = _simulated(request, jobs, title, progress)
        if load is not None:
            found.short = found.short or too_short(jobs)
            found.points.append(sweep_point(load, seed, jobs, result, request.window))
            continue
        summary = summarize(result, request.window, synergy=request.setup.synergy)
        found.summaries.append(summary)
        found.runs.append(save_run(result, seed if request.workload else None, asdict(summary)))
        found.jobs += len(jobs)
        found.opted_in += sum(job.managed for job in jobs)
        found.movable += sum(job.checkpoints and job.managed for job in jobs)
        if request.baseline:
            base = _baseline(request, jobs)
            found.baselines.append(summarize(base, request.window, synergy=request.setup.synergy))
            found.baseline_runs.append(save_run(base, found.runs[-1].seed, asdict(found.baselines[-1])))
        if request.baseline == "slurm" or request.alone:
            first = first_come(jobs, request.nodes, request.setup)
            found.easy.append(summarize(first, request.window, synergy=request.setup.synergy))
            jct_s = sorted(ideal_las(jobs, found.gpus)[slice(*request.window) if request.window else slice(None)])
            found.ideal.append(Ideal(fmean(jct_s) / HOUR, quantile(jct_s, 0.5) / HOUR, quantile(jct_s, 0.99) / HOUR))
        if found.unshareable is None and request.shared:
            found.unshareable = unshareable_jobs(jobs, request.nodes, between_users=request.shared == "between users")
    return found


def _baseline(request: Request, jobs: tuple[TraceJob, ...]) -> Result:
    """Return the baseline's run of the same jobs on the nodes without lanes."""
    if request.baseline == "slurm":
        return simulate_slurm(jobs, request.nodes, request.setup)
    if not request.setup.synergy:
        return first_come(jobs, request.nodes, request.setup, STRICT)
    setup = replace(request.setup, lanes=1, rounds_on_events=False, guard=GUARD)
    whole = tuple(node for node in request.nodes if node.lane == 0)
    rules = PolicySettings(partitions=frozenset({PARTITION}), backfill=False)
    return simulate(jobs, whole, build("fifo", "proportional", "none", rules), setup)


def _simulated(
    request: Request, jobs: tuple[TraceJob, ...], title: str, report: Callable[[float, int], None] | None = None
) -> Result:
    window = request.window
    if not request.alone and window is not None and window[1] > len(jobs):
        raise InputError(f"--set window: ends at {window[1]}, and there are {len(jobs)} jobs")
    stopwatch = SystemClock().monotonic
    with progress_bar(quiet=bool(request.words["quiet"])) as bar:
        watch = _Watch(bar, title, window[1] if window else len(jobs), stopwatch())

        def progress(time_s: float, ended: int) -> None:
            watch.at(stopwatch(), time_s, ended)

        if request.alone:
            return simulate_slurm(jobs, request.nodes, request.setup, progress=report or progress)
        return simulate(
            jobs, request.nodes, request.policy, request.setup, stopwatch=stopwatch, progress=report or progress
        )


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress | ProgressLines | None]:
    """Yield a progress bar on standard error, removed at the end; lines without a terminal; None if quiet."""
    from rich.progress import Progress  # noqa: PLC0415

    from cadenza.slurm_plugin.terminal import Terminal  # noqa: PLC0415

    console = Terminal(stderr=True)
    if quiet:
        yield None
        return
    bar = Progress(console=console, transient=True) if console.is_terminal else ProgressLines(SystemClock().monotonic)
    try:
        yield bar
    finally:
        bar.stop()


def note(line: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(printable(line, MAX_LINE) + "\n")


class ProgressLines:
    """Progress for a log: a line for each run once in a while, by the calls of a bar."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.tasks: list[ProgressLine] = []
        self._monotonic = monotonic

    def add_task(self, description: str, *, total: int) -> TaskID:
        """Add a run of so many jobs, and return its number."""
        number = cast("TaskID", len(self.tasks))
        self.tasks.append(ProgressLine(number, description, total, self._monotonic() + LINES_INTERVAL_S))
        return number

    def update(self, number: TaskID, *, completed: int, description: str | None = None) -> None:
        """Say how many jobs of a run have ended, unless it was said a short time ago."""
        task, now_s = self.tasks[number], self._monotonic()
        if now_s >= task.next_s:
            self.tasks[number] = task._replace(next_s=now_s + LINES_INTERVAL_S)
            note(f"{description or task.description}: {completed} of {task.total} jobs have ended")

    def start(self) -> None:
        """Do nothing: a log needs no drawing."""

    stop = start


class ProgressLine(NamedTuple):
    """One run of ``ProgressLines``, and the time of its next line."""

    id: TaskID
    description: str
    total: int
    next_s: float


class _Watch:
    """Shows how far a run is, a few times a second, once it has taken a while."""

    def __init__(self, bar: Progress | ProgressLines | None, title: str, jobs: int, now_s: float) -> None:
        self._bar = bar
        self._title = title
        self._jobs = jobs
        self._next_s = now_s + PROGRESS_AFTER_S

    def at(self, now_s: float, time_s: float, ended: int) -> None:
        """Show that ``ended`` jobs have ended at a simulated time."""
        if self._bar is None or now_s < self._next_s:
            return
        if not self._bar.tasks:
            self._bar.start()
            self._bar.add_task(self._title, total=self._jobs)
        self._next_s = now_s + PROGRESS_INTERVAL_S
        task = self._bar.tasks[0]
        self._bar.update(task.id, completed=ended, description=f"{self._title}, day {time_s / 86400:.1f}")


def saved(results: Results) -> Saved:
    """Return the result as ``cadenza report`` reads it."""
    request = results.request
    classes = {name: profile.task for name, profile in request.profiles.items() if profile.task}
    return Saved(
        request.label, request.arguments, results.gpus, results.cpus, tuple(results.runs), tuple(results.points),
        classes, request.baseline or "", tuple(results.baseline_runs),
    )  # fmt: skip
