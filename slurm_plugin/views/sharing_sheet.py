"""``cadenza report --since``: the effect of sharing from the service's store, as JSON, on screen or as a page."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cadenza.sidecar.clock import local
from cadenza.slurm_plugin.report.sheet import Card, Cell, Column, Sheet, Table
from cadenza.slurm_plugin.report.units import number
from cadenza.slurm_plugin.service.accounting.sharing_report import Replay, SharingReport, Sums
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S
from cadenza.slurm_plugin.service.own_jobs import recorded_report
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.views.job_sentences import effect_sentence
from cadenza.slurm_plugin.views.replayed_slurm import Cluster, replayed

MAX_JOBS = 50
"""Rows of the page's table of jobs; ``--json`` has all."""
NOTES = (
    (
        "Waited: all of a job's time in the queue, also after it made way, and waiting for turns. Replayed Slurm: the "
        "same submissions under Slurm alone, simulated with the weights, tiers and QOS of the last round on record; "
        "shares count as equal, and limits do not count."
    ),
    (
        "GPU hours: time in which jobs could use their GPUs; a GPU used by several jobs at once counts in equal parts. "
        "On further lanes: the part that plain Slurm could not have given to these jobs at that moment."
    ),
    (
        "Saved: time from a job's start on a further lane until lane 0 had enough GPUs for it (free, or given to a job "
        "submitted later), less the longest wait for turns of a job on lane 0 until then."
    ),
    "Net: waiting saved less waiting for turns; below zero, sharing cost more waiting than it saved.",
    (
        "Wait: in the queue before the first start. Bounded slowdown: completion time over the larger of run time and "
        "60 s."
    ),
)
JOB, USER = Column("Job"), Column("User", text=True)
FIGURES = (
    Column("GPU hours"), Column("on further lanes"), Column("Queued", "h"), Column("Saved", "h"),
    Column("Turns", "h waited"), Column("Net", "h saved"), Column("Yields"), Column("Moves"), Column("Packs"),
    Column("Tunes"),
)  # fmt: skip
WIDTH_COLUMNS = (
    Column("Jobs", text=True), Column("First starts"), Column("Wait", "h, mean"), Column("Ended"),
    Column("Bounded slowdown", "mean"),
)  # fmt: skip
REPLAY_COLUMNS = (
    Column("Jobs", text=True), Column("Ended"), Column("Waited", "h, mean"), Column("in a replayed Slurm", "h, mean"),
)  # fmt: skip
KIND_COLUMNS = (
    Column("Kind", text=True), Column("Decided"), Column("Kept"), Column("Undone"), Column("Not measured"),
    Column("In progress"), Column("Promised", "median"), Column("Measured", "median"),
)  # fmt: skip
UNDONE_COLUMNS = (Column("When", text=True), JOB, USER, Column("Change", text=True))


def gather(reader: StoreReader, since_s: float, until_s: float, user: str | None) -> SharingReport:
    """Return the effect of sharing in the recorded whole hours between two moments.

    Raise InputError if nothing, or nothing of the user, is on record there.
    """
    found = recorded_report(reader, since_s, until_s, user)
    last = reader.round()
    if user is not None or last is None:  # the jobs of one user say nothing of the queue
        return found
    cluster = Cluster(last.snapshot.nodes, last.snapshot.site)
    starts = reader.first_starts(found.since_s, found.until_s)
    return msgspec.structs.replace(found, replay=replayed(starts, cluster, found.since_s, found.until_s))


def summary(report: SharingReport) -> str:
    """Return the effect of sharing in plain sentences."""
    total, replay = report.total, report.replay
    sentences = [f"{_many(total.jobs, 'job')} of {_many(len(report.users), 'user')} had {_h(total.gpu_s)} GPU hours."]
    if replay is not None and replay.rows:
        whole = replay.rows[0]
        sentences.append(
            f"{_many(whole.ended, 'job')} ended, and waited {_h(whole.waited_s)} hours on average; in a replayed Slurm "
            f"of the same submissions they wait {_h(whole.slurm_waited_s)}."
        )
    if total.further_gpu_s or total.turn_s:
        part = f" ({total.further_gpu_s / total.gpu_s:.0%})" if total.gpu_s else ""
        sentences.append(
            f"{_h(total.further_gpu_s)} of the GPU hours{part} were on further lanes. "
            f"{_many(total.early_starts, 'early start')} there saved {_h(total.saved_s)} hours in the queue; jobs "
            f"waited {_h(total.turn_s)} hours for turns: {_h(total.net_s)} hours net."
        )
    sentences.append(
        f"{number(report.idle_waiting_gpus)} GPUs on average, {_h(report.idle_gpu_s)} GPU hours, were idle while a job "
        "waited that fits."
    )
    return " ".join(sentences)


def sheet(report: SharingReport, title: str) -> Sheet:
    """Return the contents of the page."""
    total = report.total
    watched = report.watched_s / max(report.until_s - report.since_s, 1.0)
    facts = (f"{local(report.since_s)} to {local(report.until_s)}", f"{min(watched, 1.0):.0%} of it on record")
    cards = (
        *_replay_card(report.replay),
        Card("GPU hours", _h(total.gpu_s), "h", "of jobs that share", f"{_h(total.further_gpu_s)} on further lanes; "
             f"jobs that do not share had {_h(report.others.gpu_s)}."),
        Card("Waiting saved", _h(total.saved_s), "h", "in the queue", f"by {_many(total.early_starts, 'start')} on "
             f"further lanes; {_h(total.queue_s)} hours of queueing were left."),
        Card("Waiting for turns", _h(total.turn_s), "h", "the price", f"in {total.yields} yields."),
        Card("Net", _h(total.net_s), "h", "saved less price", summary(report)),
        Card("Idle GPUs", number(report.idle_waiting_gpus), "GPUs", "while a job waited that fits",
             f"{_h(report.idle_gpu_s)} GPU hours, of all users."),
    )  # fmt: skip
    return Sheet(title, facts, cards, tuple(_tables(report)), NOTES)


def _replay_card(replay: Replay | None) -> Iterator[Card]:
    if replay is not None and replay.rows:
        whole = replay.rows[0]
        yield Card("Waits", _h(whole.waited_s), "h", "on average", f"of {_many(whole.ended, 'job')} that ended; "
                   f"{_h(whole.slurm_waited_s)} h in a replayed Slurm of the same submissions.")  # fmt: skip
    elif replay is not None and replay.jobs:
        yield Card(
            "Waits", "", "", "not replayed", f"{_many(replay.jobs, 'job')} are too many: cadenza whatif takes them."
        )


def _tables(report: SharingReport) -> Iterator[Table]:
    if report.replay is not None:
        replays = [
            (Cell(row.jobs), _count(row.ended), _mean(row.waited_s, HOUR_S), _mean(row.slurm_waited_s, HOUR_S))
            for row in report.replay.rows
        ]
        yield Table("replay", "Waits of the jobs that ended", REPLAY_COLUMNS, tuple(replays))
    users = [(Cell(row.user), _count(row.sums.jobs), *_figures(row.sums)) for row in report.users]
    yield Table("users", "By user", (USER, Column("Jobs"), *FIGURES), tuple(users))
    widths = [
        (
            Cell(row.width),
            _count(row.started),
            _mean(row.wait_s, HOUR_S),
            _count(row.ended),
            _mean(row.bounded_slowdown),
        )
        for row in report.widths
    ]
    yield Table("widths", "By number of GPUs, all jobs", WIDTH_COLUMNS, tuple(widths))
    kinds = [
        (
            Cell(row.kind),
            *map(_count, (row.decided, row.kept, row.undone, row.unknown, row.measuring)),
            *(Cell("") if ratio is None else Cell(f"{ratio:.2f}x", ratio) for ratio in (row.predicted, row.gain)),
        )
        for row in report.kinds
        if row.decided
    ]
    yield Table("decisions", "Measured decisions", KIND_COLUMNS, tuple(kinds))
    undone = [
        (Cell(local(one.at_s), one.at_s), Cell(str(one.key), one.job), Cell(one.user), Cell(effect_sentence(one)))
        for one in report.undone
    ]
    yield Table("undone", "Undone, newest first", UNDONE_COLUMNS, tuple(undone))
    largest = sorted(report.jobs, key=lambda row: -row.sums.gpu_s)[:MAX_JOBS]
    title = f"By job, the {MAX_JOBS} with most GPU hours" if len(report.jobs) > MAX_JOBS else "By job"
    jobs = [(Cell(str(row.job), row.job), Cell(row.user), *_figures(row.sums)) for row in largest]
    yield Table("jobs", title, (JOB, USER, *FIGURES), tuple(jobs))


def _figures(sums: Sums) -> Iterator[Cell]:
    for seconds in (sums.gpu_s, sums.further_gpu_s, sums.queue_s, sums.saved_s, sums.turn_s, sums.net_s):
        yield Cell(_h(seconds), round(seconds, 3))
    yield from map(_count, (sums.yields, sums.moves, sums.packs, sums.tunes))


def _mean(value: float | None, unit: float = 1.0) -> Cell:
    return Cell("") if value is None else Cell(number(value / unit), value)


def _count(value: int) -> Cell:
    return Cell(str(value), value)


def _h(seconds: float) -> str:
    return number(seconds / HOUR_S)


def _many(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
