"""A sweep in the foreground: a live table, a line per event, or JSON; and its results as plain values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cadenza.sidecar import clock
from cadenza.slurm_plugin.cli.common import console, emit, say
from cadenza.slurm_plugin.sweep.controller import Head, Sweep, best_of
from cadenza.slurm_plugin.sweep.journal import SweepState, TrialState
from cadenza.slurm_plugin.sweep.study import StudySource

if TYPE_CHECKING:
    from rich.table import Table

INTERRUPTED = 130
MAX_ROWS = 40
"""Rows of a live table; the best come first."""


def control(sweep: Sweep, *, as_json: bool) -> None:
    """Control a sweep until it is over, then exit.

    Exit codes: 0 for a reached target or, without a target, any result; otherwise 1; 130 after Ctrl-C.
    """
    show = _show_json if as_json else _show_table if console().is_terminal else _show_lines
    try:
        show(sweep)
    except KeyboardInterrupt:
        say("", f"cadenza: its jobs keep running; `cadenza sweep run {sweep.directory}` continues", err=True)
        sys.exit(INTERRUPTED)
    best, target = sweep.best(), sweep.plan.target
    if not as_json:
        verdict = "" if target is None else f"; the target was {'' if sweep.state.target else 'not '}reached"
        say(best_so_far(sweep.head, sweep.state) + (verdict if best else ""))
    sys.exit(int((best if target is None else sweep.state.target) is None))


def ticks(sweep: Sweep) -> Iterator[list[TrialState]]:
    """Yield the trials that ended in each pass over the sweep, until it is over."""
    if sweep.head.study is not None:
        yield from StudySource(sweep, sweep.head.study).ticks()
        return
    while True:
        yield sweep.tick()
        if sweep.over:
            return
        clock.sleep(sweep.plan.poll_s)


def _show_json(sweep: Sweep) -> None:
    """Print a line of JSON after each change."""
    last: dict[str, Any] = {}
    for _ in ticks(sweep):
        values = summary(sweep.head, sweep.state)
        if values != last:
            emit("cadenza.sweep-progress/1", values)
            sys.stdout.flush()
        last = values


def _show_lines(sweep: Sweep) -> None:
    """Print a line for each configuration that ended, and for each problem with Slurm."""
    problem: str | None = None
    for ended in ticks(sweep):
        for trial in ended:
            value = trial.best(sweep.plan.goal)
            result = "no value reported" if value is None else f"best {value:g}"
            reason = f" ({trial.stop_reason})" if trial.stop_reason else ""
            say(f"configuration {trial.number}: {trial.state}, {result}{reason}")
        if sweep.notice:
            say(f"cadenza: {sweep.notice}", err=True)
        if sweep.problem != problem:
            problem = sweep.problem
            say(f"cadenza: {problem or 'Slurm answers again'}", err=True)


def _show_table(sweep: Sweep) -> None:
    from rich.live import Live  # noqa: PLC0415 (slow, and not needed elsewhere)

    with Live(console=console(), auto_refresh=False) as live:
        for _ in ticks(sweep):
            live.update(table(sweep.head, sweep.state, problem=sweep.problem or sweep.notice or None), refresh=True)


def best_so_far(head: Head, state: SweepState) -> str:
    """Return a sentence on the best configuration."""
    best = best_of(state.trials.values(), head.plan)
    if best is None:
        return "no configuration has reported a value"
    values = " ".join(f"{name}={value}" for name, value in best.config.items())
    return f"best: configuration {best.number} (job {best.job}): {best.best(head.plan.goal):g} with {values}"


def summary(head: Head, state: SweepState) -> dict[str, Any]:
    """Return a sweep's state as plain values."""
    best = best_of(state.trials.values(), head.plan)
    return {
        "sweep": head.id,
        "goal": head.plan.goal,
        "target": head.plan.target,
        "states": dict(Counter(activity(trial) for trial in state.trials.values())),
        "best": None if best is None else plain(best, head),
        "reached": state.target,
    }


def plain(trial: TrialState, head: Head) -> dict[str, Any]:
    """Return one configuration as plain values."""
    values = trial.values
    return {
        "number": trial.number,
        "config": trial.config,
        "job": trial.job,
        "state": activity(trial),
        "why": trial.stop_reason or "",
        "step": values[-1][0] if values else None,
        "value": values[-1][1] if values else None,
        "best": trial.best(head.plan.goal),
        "behind": trial.behind,
    }


def activity(trial: TrialState) -> str:
    """Return the trial's current activity as one word."""
    if trial.ended:
        return trial.state
    if trial.stop_reason:
        return "stopping"
    if trial.state == "live":
        return "pending" if trial.slurm in ("", "PENDING") else "running"
    return "new"


def table(head: Head, state: SweepState, *, problem: str | None = None, rows: int = MAX_ROWS) -> Table:
    """Return a table of the configurations, the best first."""
    from rich.table import Table  # noqa: PLC0415 (slow, and not needed for JSON)

    def rank(trial: TrialState) -> tuple[bool, float]:
        value = trial.best(head.plan.goal) or 0.0
        return trial.best(head.plan.goal) is None, -value if head.plan.goal == "max" else value

    counts = Counter(activity(trial) for trial in state.trials.values())
    title = f"{head.id}: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    result = Table(title=title, caption=problem, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("CONFIGURATION", "JOB", "STATE", "STEP", "LAST", "BEST", ""):
        result.add_column(name, overflow="fold", no_wrap=name not in {"CONFIGURATION", ""})
    for trial in sorted(state.trials.values(), key=rank)[:rows]:
        values, best = trial.values, trial.best(head.plan.goal)
        config = " ".join(f"{name}={value}" for name, value in trial.config.items())
        result.add_row(
            f"{trial.number}: {config}",
            str(trial.job or ""),
            activity(trial),
            str(values[-1][0]) if values else "",
            f"{values[-1][1]:.5g}" if values else "",
            f"{best:.5g}" if best is not None else "",
            trial.stop_reason or ("yields to better ones" if trial.behind and not trial.ended else ""),
        )
    return result
