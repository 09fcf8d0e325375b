"""The demo's screen: a live view while a list runs, the tables of figures, and the verdicts."""

from __future__ import annotations

import threading
from typing import IO, TYPE_CHECKING, Self

import msgspec
from demo_cluster import Queued
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cadenza.slurm_plugin.views.cluster_view import TopView
from cadenza.slurm_plugin.views.top_screen import Screen as TopScreen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from demo_cluster import DemoCluster
    from metrics import Check, Figures

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=160)
LINE_EVERY_S = 15.0
"""Without a terminal, a line of progress is printed this often, and the whole view now and then."""
VIEWS_EVERY = 3
LOOK_EVERY_S = 2.0
MAX_ERROR = 0.25
"""A prediction that is further off is said to be wrong."""


class LiveView:
    """The running cluster on screen: plain Slurm's queue, or ``cadenza top`` as it runs on the controller."""

    def __init__(self, cluster: DemoCluster, title: str, *, shown: bool = True) -> None:
        self.queue: tuple[Queued, ...] | None = None
        """Slurm's queue a moment ago; None before the first look."""
        self._cluster = cluster
        self._title = title
        self._shown = shown
        self._top: TopView | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._sources = {self._read_queue: cluster.watch_queue(LOOK_EVERY_S)}
        if cluster.shared:
            self._sources[self._read_top] = cluster.watch(LOOK_EVERY_S)
        self._lines = 0
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        for read, source in self._sources.items():
            threading.Thread(target=read, args=(source.stdout,), daemon=True).start()
        if console.is_terminal and self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for source in self._sources.values():
            source.kill()
            source.wait()
        self._cluster.stop_watching()

    @property
    def ready(self) -> bool:
        """True once the queue and the decisions were read: starting to watch should cost the run nothing."""
        return self.queue is not None and (self._top is not None or not self._cluster.shared)

    def show(self, at_s: float, progress: str) -> None:
        """Bring the screen up to date; ``at_s`` are seconds since the list began."""
        if not self._shown:
            return
        head = Text.assemble((self._title, "bold"), f"   {at_s:4.0f} s   {progress}")
        body = TopScreen(self._top) if self._top else queue_table(self.queue or ())
        if console.is_terminal:
            self._live.update(Group(head, body), refresh=True)
        elif at_s >= self._next_line_s:
            self._next_line_s = at_s + LINE_EVERY_S
            console.print(Group(head, body) if self._lines % VIEWS_EVERY == 1 else head)
            self._lines += 1

    def _read_top(self, lines: IO[str]) -> None:
        for line in lines:
            self._top = msgspec.json.decode(line, type=TopView)

    def _read_queue(self, lines: IO[str]) -> None:
        rows: list[Queued] = []
        for line in lines:
            if line.strip():
                rows.append(Queued.of(line))
            else:
                self.queue, rows = tuple(rows), []


def queue_table(queue: Sequence[Queued]) -> Table:
    """Return Slurm's queue as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("JOB", "USER", "NAME", "STATE", "NODE", "REASON"):
        table.add_column(name)
    for row in queue:
        style = "green" if row.state == "RUNNING" else "dim"
        table.add_row(str(row.id), row.user, row.name, row.state.lower(), row.node, row.reason, style=style)
    return table


def figures_table(title: str, sides: Mapping[str, Figures], predicted: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the figures of each side with their predictions, with the errors of these."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in sides:
        table.add_column(name, justify="right")
        table.add_column("predicted", justify="right", style="dim")
        table.add_column("error", justify="right")
    for label, field, scale, unit in ROWS:
        cells = []
        for name, side in sides.items():
            guess = predicted[name].get(field)
            off = error(guess, getattr(side, field))
            color = "bold red" if off is not None and abs(off) > MAX_ERROR else ""
            text = Text("" if off is None else f"{off:+.0%}", color)
            cells += [number(getattr(side, field), scale, unit), number(guess, scale, unit) if guess else "", text]
        table.add_row(label, *cells)
    return table


def predictions_table(title: str, predicted: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the predictions alone, before anything has run."""
    table = Table(title=title, title_justify="left")
    for name in ("", *predicted):
        table.add_column(name, justify="right" if name else "left")
    for label, field, scale, unit in ROWS:
        if all(field in side for side in predicted.values()):
            table.add_row(label, *(number(side[field], scale, unit) for side in predicted.values()))
    return table


def error(predicted: float | None, measured: float | None) -> float | None:
    """Return the relative error of a prediction; None without one.

    >>> error(12, 10), error(None, 10)
    (0.2, None)
    """
    return predicted / measured - 1 if predicted and measured else None


def large_errors(sides: Mapping[str, Figures], predicted: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence for each side whose predictions are far off, with these."""
    sentences = []
    for name, side in sides.items():
        errors = {label: error(predicted[name].get(field), getattr(side, field)) for label, field, _, _ in ROWS}
        large = [f"{label} {off:+.0%}" for label, off in errors.items() if off is not None and abs(off) > MAX_ERROR]
        if large:
            sentences.append(f"the simulator is more than {MAX_ERROR:.0%} off on {name}: {', '.join(large)}")
    return sentences


ROWS = (
    ("time to first 100 iterations, mean", "time_to_100_s", 1, "s"),
    ("job completion time, mean", "jct_mean_s", 1, "s"),
    ("job completion time, p95", "jct_p95_s", 1, "s"),
    ("first submission to last end", "makespan_s", 1, "s"),
    ("iterations per second, all jobs", "iterations_per_s", 1, ""),
    ("GPU time held by a job", "gpu_holding", 100, "%"),
    ("yields", "yields", 1, "#"),
    ("order to boundary, p50", "boundary_p50_s", 1e3, "ms"),
    ("order to boundary, p99", "boundary_p99_s", 1e3, "ms"),
    ("yield, p50", "yield_p50_s", 1e3, "ms"),
    ("yield, p99", "yield_p99_s", 1e3, "ms"),
    ("resume, p50", "resume_p50_s", 1e3, "ms"),
    ("resume, p99", "resume_p99_s", 1e3, "ms"),
)


def number(value: float | None, scale: float, unit: str) -> str:
    """Return one cell; the unit ``#`` is a count.

    >>> number(0.5, 100, "%"), number(None, 1, "s"), number(3, 1, "#")
    ('50.0 %', '-', '3')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if unit == "#" else f"{value * scale:.1f} {unit}".rstrip()


def verdicts(checks: Sequence[Check]) -> RenderableType:
    """Return one line a promise."""
    lines = [
        Text.assemble(("ok   " if check.ok else "FAIL ", "green" if check.ok else "bold red"), check.text)
        for check in checks
    ]
    return Group(*lines)
