"""A sweep under control in the foreground: a live table, or a line for each thing that happened."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from cadenza.sidecar import clock
from cadenza.slurm_plugin.cli.common import console, emit
from cadenza.slurm_plugin.cli.sweep.sweep_show import summary, table
from cadenza.slurm_plugin.sweep.controller import Sweep
from cadenza.slurm_plugin.sweep.journal import TrialState
from cadenza.slurm_plugin.sweep.study import Asked

INTERRUPTED = 130


def control(sweep: Sweep, *, as_json: bool) -> None:
    """Control a sweep until it is over; exit code 1 when nothing came of it, 130 on Ctrl-C."""
    try:
        show = _emit if as_json else _live if console().is_terminal else _tell
        show(sweep)
    except KeyboardInterrupt:
        click.echo(f"\ncadenza: the jobs run on; `cadenza sweep resume {sweep.directory}` goes on", err=True)
        sys.exit(INTERRUPTED)
    if not as_json:
        click.echo(closing(sweep))
    sys.exit(int(not fine(sweep)))


def fine(sweep: Sweep) -> bool:
    """Whether the sweep has what it was to find: its target, or without one any result."""
    return sweep.book.target is not None if sweep.plan.target is not None else sweep.best() is not None


def closing(sweep: Sweep) -> str:
    """Return the sweep's result as one line."""
    best = sweep.best()
    if best is None:
        return "no configuration has reported anything"
    found = "" if sweep.plan.target is None else f"; the target was {'' if sweep.book.target else 'not '}reached"
    return f"best: configuration {best.number}, {best.best(sweep.plan.goal):g}, {best.config}{found}"


def ticks(sweep: Sweep) -> Iterator[list[TrialState]]:
    """Yield those that ended at each look at the sweep, until it is over."""
    if sweep.head.study is not None:
        yield from Asked(sweep, sweep.head.study).ticks()
        return
    while True:
        yield sweep.tick()
        if sweep.over:
            return
        clock.sleep(sweep.plan.poll_s)


def _emit(sweep: Sweep) -> None:
    """Print a line of JSON whenever anything has changed."""
    last: dict[str, Any] = {}
    for _ in ticks(sweep):
        now = summary(sweep.head, sweep.book)
        if now != last:
            emit(now)
            sys.stdout.flush()
        last = now


def _tell(sweep: Sweep) -> None:
    """Print a line for each configuration that ended, and for each trouble with Slurm."""
    trouble = ""
    for ended in ticks(sweep):
        for trial in ended:
            value = trial.best(sweep.plan.goal)
            shown = "nothing reported" if value is None else f"best {value:g}"
            click.echo(f"configuration {trial.number}: {trial.state}, {shown}{f' ({trial.why})' if trial.why else ''}")
        if sweep.trouble != trouble:
            trouble = sweep.trouble
            click.echo(f"cadenza: {trouble or 'Slurm answers again'}", err=True)


def _live(sweep: Sweep) -> None:
    from rich.live import Live  # noqa: PLC0415 (slow, and not needed elsewhere)

    with Live(console=console(), auto_refresh=False) as live:
        for _ in ticks(sweep):
            live.update(table(sweep.head, sweep.book, trouble=sweep.trouble), refresh=True)
