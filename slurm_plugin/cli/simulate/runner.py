"""Runs of a request, one for each seed or load, with a progress bar for long ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import Summary, over_seeds, summarize
from cadenza.policies.simulator.load_sweep import LoadRow, highest_stable, load_rows, sweep_point, too_short
from cadenza.policies.simulator.result_file import SavedRun, SweepPoint, save_run
from cadenza.policies.simulator.run_values import Result
from cadenza.policies.simulator.simulation import simulate
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.simulate.request import Request

if TYPE_CHECKING:
    from rich.progress import Progress

PROGRESS_AFTER_S = 1.0
"""Seconds of wall time after which a run shows its progress."""
PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Results:
    """Results of a request: a run for each seed, or the points of a sweep."""

    request: Request
    summaries: tuple[Summary, ...]
    runs: tuple[SavedRun, ...]
    points: tuple[SweepPoint, ...]
    gpus: int
    cpus: int
    short: bool = False
    """True if a sweep has too few arrivals to tell stable loads from others."""

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
        return {**over_seeds(self.summaries), **head, **({"runs": runs} if runs else {})}


def run_request(request: Request) -> Results:
    """Run everything and return the results; raise InputError where jobs and cluster do not go together."""
    summaries: list[Summary] = []
    runs: list[SavedRun] = []
    points: list[SweepPoint] = []
    short = False
    work = [(load, seed) for load in request.loads or (None,) for seed in request.seeds]
    for number, (load, seed) in enumerate(work, 1):
        jobs = request.jobs(seed, load)
        title = f"run {number} of {len(work)}" if len(work) > 1 else "simulating"
        result = _simulated(request, jobs, title)
        if load is not None:
            short = short or too_short(jobs)
            points.append(sweep_point(load, seed, jobs, result, request.window))
            continue
        summary = summarize(result, request.window, synergy=request.setup.synergy)
        summaries.append(summary)
        runs.append(save_run(result, seed if request.workload else None, asdict(summary)))
    whole = [node for node in request.nodes if node.lane == 0]
    gpus, cpus = sum(node.gpus for node in whole), sum(node.cpus for node in whole)
    return Results(request, tuple(summaries), tuple(runs), tuple(points), gpus, cpus, short)


def _simulated(request: Request, jobs: tuple[TraceJob, ...], title: str) -> Result:
    window = request.window
    if window is not None and window[1] > len(jobs):
        raise InputError(f"--window: ends at {window[1]}, and there are {len(jobs)} jobs")
    stopwatch = SystemClock().monotonic
    with _progress(quiet=bool(request.words["quiet"])) as bar:
        watch = _Watch(bar, title, window[1] if window else len(jobs), stopwatch())

        def progress(time_s: float, ended: int) -> None:
            watch.at(stopwatch(), time_s, ended)

        return simulate(jobs, request.nodes, request.policy, request.setup, stopwatch=stopwatch, progress=progress)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress | None]:
    """Yield a progress bar on standard error, removed at the end; None without a terminal or with --quiet."""
    from rich.progress import Progress  # noqa: PLC0415

    from cadenza.slurm_plugin.cli.terminal import Terminal  # noqa: PLC0415

    console = Terminal(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    bar = Progress(console=console, transient=True)
    try:
        yield bar
    finally:
        bar.stop()


class _Watch:
    """Shows how far a run is, a few times a second, once it has taken a while."""

    def __init__(self, bar: Progress | None, title: str, jobs: int, now_s: float) -> None:
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
