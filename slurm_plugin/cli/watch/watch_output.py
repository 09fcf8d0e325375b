"""The screen of ``cadenza watch``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cadenza.policies.core.text import printable
from cadenza.sidecar.clock import local
from cadenza.slurm_plugin.report.units import HOUR_S, NARROW, about, number
from cadenza.slurm_plugin.simulations.watch_view import HostRow, WaitingRow, WatchView

MAX_ROWS = 20
"""Rows of each table on the screen; ``--json`` has all."""


FIGURES = frozenset({"JOB", "GPUS", "IDLE", "HIDDEN", "WAITED"})
"""Columns that a narrow terminal does not cut."""


def screen(view: WatchView) -> RenderableType:
    """Return the whole screen for one look."""
    return Group(
        _headline(view), *_totals(view), Text(), _host_table(view.hosts), Text(), _waiting_table(view.waiting), Text(),
        *_decision(view), Text(), *(Text(printable(note, 1000), style="dim") for note in view.notes),
    )  # fmt: skip


def _headline(view: WatchView) -> Text:
    line = Text(f"{printable(view.cluster)}  {local(view.at_s)}", style="bold")
    line.append(f"   {view.gpus} GPUs, {view.held_gpus} in use, {view.idle_gpus} idle", style="not bold")
    line.append(f"   {len(view.waiting)} jobs wait", style="not bold")
    if view.idle_waiting_gpus:
        line.append(f"   {view.idle_waiting_gpus} GPUs idle while a job waits that fits", style="yellow")
    return line


def _totals(view: WatchView) -> Iterator[Text]:
    sums = view.totals
    slowdown = "" if sums.mean_bounded_slowdown is None else f", bounded slowdown {sums.mean_bounded_slowdown:.1f}"
    yield Text(
        f"since {local(sums.since_s)}, {_h(sums.watched_s)} hours watched: {_h(sums.idle_gpu_s)} GPU hours idle while "
        f"a job waited that fits, {_h(sums.waiting_job_s)} hours of waiting, {sums.ended} runs ended{slowdown}"
    )
    for row in sums.widths:
        wait = "" if row.wait_s is None else f", waited {_time(row.wait_s)} on average"
        yield Text(f"  {row.width}: {row.started} first starts{wait}")


def _host_table(hosts: Sequence[HostRow]) -> Table:
    """Return the hosts with idle or hidden GPUs, most idle ones first."""
    rows = sorted((row for row in hosts if row.idle or row.hidden or row.closed), key=lambda row: -row.idle)
    table = _table("HOST", "GPUS", "IDLE", "HIDDEN", "")
    for row in rows[:MAX_ROWS]:
        table.add_row(printable(row.name), str(row.gpus), str(row.idle), str(row.hidden or ""), printable(row.closed))
    return _cut(table, len(rows))


def _waiting_table(jobs: Sequence[WaitingRow]) -> Table:
    table = _table("JOB", "USER", "GPUS", "WAITED", "REASON", "ITS GPUS ARE IDLE")
    for row in jobs[:MAX_ROWS]:
        table.add_row(
            str(row.job), printable(row.user), str(row.gpus), _time(row.waited_s), printable(row.reason),
            "yes" if row.fits else "",
        )  # fmt: skip
    return _cut(table, len(jobs))


def _decision(view: WatchView) -> Iterator[Text]:
    yield Text("If all jobs kept checkpoints, Cadenza would now let:", style="bold")
    for step in view.steps[:MAX_ROWS]:
        yield Text(f"  job {step.job} {printable(step.action)} ({printable(step.reason, 1000)})")
    if len(view.steps) > MAX_ROWS:
        yield Text(f"  … and {len(view.steps) - MAX_ROWS} more", style="dim")
    if not view.steps:
        yield Text("  all jobs stay where they are", style="dim")


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=name in FIGURES, overflow="fold")
    return table


def _cut(table: Table, rows: int) -> Table:
    if rows > MAX_ROWS:
        table.caption, table.caption_justify = f"… and {rows - MAX_ROWS} more", "left"
    return table


def _h(seconds: float) -> str:
    return number(seconds / HOUR_S)


def _time(seconds: float) -> str:
    return about(seconds).replace(NARROW, " ")
