"""``cadenza report --since``: what sharing brought, from the service's store, as JSON, on screen or as a page."""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING

from rich.table import Table as RichTable

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.cli.common import local
from cadenza.slurm_plugin.cli.jobs.why import effect_sentence
from cadenza.slurm_plugin.report.sheet import Card, Cell, Column, Sheet, Table
from cadenza.slurm_plugin.report.units import number
from cadenza.slurm_plugin.service.accounting.sharing_report import (
    KindRow,
    Record,
    Row,
    SharingReport,
    Sums,
    sharing_report,
)
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from cadenza.slurm_plugin.service.accounting.effects import Effect
    from cadenza.slurm_plugin.service.store.reader import StoreReader

MOST_JOBS = 50
"""Rows of the page's table of jobs; ``--json`` has all."""

HOURS = (
    "GPU hours: while a job could use its GPUs; a GPU that several used at once counts in equal parts. On further "
    "lanes: the part that plain Slurm could not have given to these jobs at that moment."
)
SAVED = (
    "Saved: from a job's start on a further lane until lane 0 had enough GPUs for it (free, or given to a job "
    "submitted later), less the longest that a job on lane 0 had waited for turns by then."
)
NET = "Net: waiting saved less waiting for turns; below zero, sharing cost more waiting than it saved."


# --- From the store ------------------------------------------------------------------------------------------


def gather(reader: StoreReader, since_s: float, until_s: float, user: str | None) -> SharingReport:
    """Return what sharing brought in the whole hours between two moments, as far as they are on record.

    Raise InputError, exit code 2, when nothing is on record there, or nothing of the user.
    """
    last_s = reader.last_round_s()
    watched = reader.watched()
    from_s, to_s = floor(since_s / HOUR_S) * HOUR_S, min(ceil(until_s / HOUR_S) * HOUR_S, last_s)
    here = {hour: seconds for hour, seconds in watched.items() if from_s <= hour * HOUR_S < to_s}
    if not here:
        raise InputError(f"{reader.path}: nothing on record from {local(since_s)} to {local(until_s)}{_span(watched)}")
    hours = reader.hours(from_s, to_s)
    users = sorted({row.user for row in hours})
    if user is not None and user not in users:
        raise InputError(
            f"--user {user}: no job of theirs from {local(from_s)} to {local(to_s)}; on record: {', '.join(users)}"
        )
    starts, effects = reader.starts(from_s, to_s), reader.effects(from_s, to_s)
    return sharing_report(Record(from_s, to_s, here, hours, starts, effects), user)


def _span(watched: dict[int, float]) -> str:
    if not watched:
        return "; is cadenzad running?"
    return f"; on record: {local(min(watched) * HOUR_S)} to {local((max(watched) + 1) * HOUR_S)}"


# --- For people ------------------------------------------------------------------------------------------------


def summary(found: SharingReport) -> str:
    """Return what sharing brought, in plain sentences."""
    total = found.total
    part = f" ({total.further_gpu_s / total.gpu_s:.0%})" if total.gpu_s else ""
    return (
        f"{_many(total.jobs, 'job')} of {_many(len(found.users), 'user')} had {_h(total.gpu_s)} GPU hours, "
        f"{_h(total.further_gpu_s)} of them{part} on further lanes. {_many(total.early_starts, 'early start')} there "
        f"saved {_h(total.saved_s)} hours in the queue; jobs waited {_h(total.turn_s)} hours for turns: "
        f"{_h(total.net_s)} hours net."
    )


def sheet(found: SharingReport, title: str) -> Sheet:
    """Return the page's content."""
    total = found.total
    watched = found.watched_s / max(found.until_s - found.since_s, 1.0)
    facts = (f"{local(found.since_s)} to {local(found.until_s)}", f"{min(watched, 1.0):.0%} of it on record")
    cards = (
        Card("GPU hours", _h(total.gpu_s), "h", "of jobs that share", f"{_h(total.further_gpu_s)} on further lanes; "
             f"jobs that do not share had {_h(found.others.gpu_s)}."),
        Card("Waiting saved", _h(total.saved_s), "h", "in the queue", f"by {_many(total.early_starts, 'start')} on "
             f"further lanes; {_h(total.queue_s)} hours of queueing were left."),
        Card("Waiting for turns", _h(total.turn_s), "h", "the price", f"in {total.yields} yields."),
        Card("Net", _h(total.net_s), "h", "saved less price", summary(found)),
    )  # fmt: skip
    return Sheet(title, facts, cards, tuple(_tables(found)), (HOURS, SAVED, NET))


def _tables(found: SharingReport) -> Iterator[Table]:
    yield Table("users", "By user", (Column("User", text=True), *COLUMNS), tuple(_user_row(row) for row in found.users))
    kinds = tuple(_kind_row(row) for row in found.kinds if row.decided)
    yield Table("decisions", "Decisions, by what was measured", KIND_COLUMNS, kinds)
    yield Table("undone", "Undone, newest first", UNDONE_COLUMNS, tuple(_undone_row(one) for one in found.undone))
    most = sorted(found.jobs, key=lambda row: -row.sums.gpu_s)[:MOST_JOBS]
    title = f"By job, the {MOST_JOBS} with most GPU hours" if len(found.jobs) > MOST_JOBS else "By job"
    yield Table(
        "jobs", title, (Column("Job"), Column("User", text=True), *COLUMNS[1:]), tuple(_job_row(row) for row in most)
    )


COLUMNS = (
    Column("Jobs"), Column("GPU hours"), Column("on further lanes"), Column("Queued", "h"), Column("Saved", "h"),
    Column("Turns", "h waited"), Column("Net", "h saved"), Column("Yields"), Column("Moves"), Column("Packs"),
    Column("Tunes"),
)  # fmt: skip
KIND_COLUMNS = (
    Column("Kind", text=True), Column("Decided"), Column("Kept"), Column("Undone"), Column("Not measured"),
    Column("Under way"), Column("Promised", "median"), Column("Measured", "median"),
)  # fmt: skip
UNDONE_COLUMNS = (
    Column("When", text=True), Column("Job"), Column("User", text=True), Column("What", text=True),
)  # fmt: skip


def _user_row(row: Row) -> tuple[Cell, ...]:
    return (Cell(row.user), _count(row.sums.jobs), *_figures(row.sums))


def _job_row(row: Row) -> tuple[Cell, ...]:
    return (Cell(str(row.job), row.job), Cell(row.user), *_figures(row.sums))


def _figures(sums: Sums) -> Iterator[Cell]:
    for seconds in (sums.gpu_s, sums.further_gpu_s, sums.queue_s, sums.saved_s, sums.turn_s, sums.net_s):
        yield Cell(_h(seconds), round(seconds, 3))
    yield from map(_count, (sums.yields, sums.moves, sums.packs, sums.tunes))


def _kind_row(row: KindRow) -> tuple[Cell, ...]:
    counts = map(_count, (row.decided, row.kept, row.undone, row.unknown, row.measuring))
    return (Cell(row.kind), *counts, _ratio(row.predicted), _ratio(row.gain))


def _undone_row(one: Effect) -> tuple[Cell, ...]:
    return Cell(local(one.at_s), one.at_s), Cell(str(one.key), one.job), Cell(one.user), Cell(effect_sentence(one))


def _count(value: int) -> Cell:
    return Cell(str(value), value)


def _ratio(value: float | None) -> Cell:
    return Cell("") if value is None else Cell(f"{value:.2f}x", value)


def _h(seconds: float) -> str:
    return number(seconds / HOUR_S)


def _many(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def show(found: Sheet, said: str, out: Console) -> None:
    """Print the same on a console."""
    out.print(f"{found.title}: {', '.join(found.facts)}")
    out.print(said)
    for table in found.tables:
        if table.rows and table.key != "jobs":
            out.print(_printed(table))
    for note in found.notes:
        out.print(note, style="dim")


def _printed(table: Table) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        shown.add_column(f"{column.name}\n{column.note}".rstrip(), justify="left" if column.text else "right")
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    return shown
