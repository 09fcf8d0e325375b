"""A sweep as a table and as values for JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from cadenza.slurm_plugin.sweep.controller import best_of

if TYPE_CHECKING:
    from rich.table import Table

    from cadenza.slurm_plugin.sweep.controller import Head
    from cadenza.slurm_plugin.sweep.journal import Book, TrialState

ROWS = 40
"""Rows of a live table; the best come first."""


def summary(head: Head, book: Book) -> dict[str, Any]:
    """Return a sweep's state as plain values."""
    best = best_of(book.trials.values(), head.plan)
    return {
        "sweep": head.id,
        "goal": head.plan.goal,
        "target": head.plan.target,
        "states": dict(Counter(word(trial) for trial in book.trials.values())),
        "best": None if best is None else plain(best, head),
        "reached": book.target,
    }


def plain(trial: TrialState, head: Head) -> dict[str, Any]:
    """Return one configuration as plain values."""
    values = trial.values
    return {
        "number": trial.number,
        "config": trial.config,
        "job": trial.job,
        "state": word(trial),
        "why": trial.why,
        "step": values[-1][0] if values else None,
        "value": values[-1][1] if values else None,
        "best": trial.best(head.plan.goal),
        "behind": trial.behind,
    }


def word(trial: TrialState) -> str:
    """Return what a trial does now in one word."""
    if trial.ended:
        return trial.state
    if trial.why:
        return "stopping"
    if trial.state == "live":
        return "pending" if trial.slurm in ("", "PENDING") else "running"
    return "new"


def table(head: Head, book: Book, *, trouble: str = "", rows: int = ROWS) -> Table:
    """Return a table of the configurations, the best first."""
    from rich.table import Table  # noqa: PLC0415 (slow, and not needed for JSON)

    counts = Counter(word(trial) for trial in book.trials.values())
    title = f"{head.id}: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    found = Table(title=title, caption=trouble or None)
    for name in ("configuration", "job", "state", "step", "last", "best", ""):
        found.add_column(name, overflow="fold")
    for trial in _ranked(head, book)[:rows]:
        found.add_row(*_row(trial, head))
    return found


def _ranked(head: Head, book: Book) -> list[TrialState]:
    sign = -1 if head.plan.goal == "max" else 1

    def rank(trial: TrialState) -> tuple[bool, float]:
        value = trial.best(head.plan.goal)
        return value is None, sign * (value or 0.0)

    return sorted(book.trials.values(), key=rank)


def _row(trial: TrialState, head: Head) -> tuple[str, ...]:
    values, best = trial.values, trial.best(head.plan.goal)
    config = " ".join(f"{name}={value}" for name, value in trial.config.items())
    return (
        f"{trial.number}: {config}",
        str(trial.job or ""),
        word(trial),
        str(values[-1][0]) if values else "",
        f"{values[-1][1]:.5g}" if values else "",
        f"{best:.5g}" if best is not None else "",
        trial.why or ("makes way" if trial.behind and not trial.ended else ""),
    )
