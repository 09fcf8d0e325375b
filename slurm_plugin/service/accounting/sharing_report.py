"""Summary of a period: GPU hours and waiting time by user, and outcomes of decisions (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TypeVar

import msgspec

from cadenza.policies.simulator.figures import WIDTHS
from cadenza.slurm_plugin.service.accounting.effects import KINDS, Effect, Kind
from cadenza.slurm_plugin.service.accounting.usage import FirstStart, HourRow, Start

MAX_UNDONE = 50


class Sums(msgspec.Struct, frozen=True):
    """GPU time and waiting time of some jobs, in seconds and GPU seconds."""

    jobs: int = 0
    gpu_s: float = 0.0
    """A GPU that several jobs use at once counts in equal parts."""
    further_gpu_s: float = 0.0
    """The part on further lanes, which plain Slurm could not have given to these jobs at that moment."""
    queue_s: float = 0.0
    """Pending for want of resources."""
    turn_s: float = 0.0
    """Started, and waiting for a turn: the price of sharing."""
    early_starts: int = 0
    """Jobs that waited less because they started on a further lane."""
    saved_s: float = 0.0
    """The queue time that they saved, see ``usage.Start``."""
    yields: int = 0
    tunes: int = 0
    packs: int = 0
    moves: int = 0
    """Migrations and resizes."""

    @property
    def net_s(self) -> float:
        """Return the waiting saved less the waiting for turns."""
        return self.saved_s - self.turn_s


class Row(msgspec.Struct, frozen=True):
    """The sums of one user, or of one job of a user."""

    user: str
    sums: Sums
    job: int | None = None


class KindRow(msgspec.Struct, frozen=True):
    """Outcomes of the decisions of one kind; gains are throughput after over before."""

    kind: Kind
    decided: int
    kept: int
    undone: int
    unknown: int
    measuring: int
    predicted: float | None
    """Median of the decisions that were also measured."""
    gain: float | None
    """Measured median; for packs that of all their jobs together, where turns are 1."""


class WidthRow(msgspec.Struct, frozen=True):
    """First starts and ends of the jobs of one number of GPUs; means, None without any."""

    width: str
    started: int
    wait_s: float | None
    """Time in the queue before the first start."""
    ended: int
    bounded_slowdown: float | None


class ReplayRow(msgspec.Struct, frozen=True):
    """Mean waits of some jobs that ended: in all, and in a simulation of Slurm alone with the same submissions."""

    jobs: str
    ended: int
    waited_s: float
    slurm_waited_s: float


class Replay(msgspec.Struct, frozen=True):
    """A period's jobs in a simulation of Slurm alone."""

    rows: tuple[ReplayRow, ...]
    """Empty where there were too many jobs, or none."""
    jobs: int
    left_out: int
    """Jobs that the nodes of today cannot hold."""


class SharingReport(msgspec.Struct, frozen=True):
    """Benefit and price of sharing between two moments, seconds since the epoch."""

    since_s: float
    until_s: float
    watched_s: float
    """The part of that time that is on record."""
    total: Sums
    users: tuple[Row, ...]
    """Most GPU time first."""
    jobs: tuple[Row, ...]
    others: Sums
    """Jobs that did not opt in."""
    idle_gpu_s: float
    """GPU seconds idle while a job waited that fits; of all users."""
    idle_waiting_gpus: float
    """The same as a mean number of GPUs, over the time on record."""
    widths: tuple[WidthRow, ...]
    """All jobs, also those that did not opt in."""
    kinds: tuple[KindRow, ...]
    undone: tuple[Effect, ...]
    """Newest first."""
    replay: Replay | None = None


class Record(msgspec.Struct, frozen=True):
    """The store's rows of a period; ``watched``: seconds on record by hour."""

    since_s: float
    until_s: float
    watched: Mapping[int, float]
    hours: Sequence[HourRow]
    starts: Sequence[Start]
    effects: Sequence[Effect]
    first_starts: Sequence[FirstStart] = ()
    idle_gpu_s: float = 0.0


def sharing_report(record: Record, user: str | None = None) -> SharingReport:
    """Return the summary of a record's period, for all users or for one."""
    if user is not None:
        record = msgspec.structs.replace(
            record,
            hours=[row for row in record.hours if row.user == user],
            starts=[row for row in record.starts if row.user == user],
            effects=[row for row in record.effects if row.user == user],
            first_starts=[row for row in record.first_starts if row.user == user],
        )
    hours = _by_owner(row for row in record.hours if row.managed)
    starts, effects = _by_owner(record.starts), _by_owner(record.effects)
    keys = sorted(hours.keys() | starts.keys() | effects.keys())
    jobs = tuple(
        Row(key[0], _job_sums(hours.get(key, ()), starts.get(key, ()), effects.get(key, ()), record), key[1])
        for key in keys
    )
    names = sorted({row.user for row in jobs})
    users = [Row(name, _sum(row.sums for row in jobs if row.user == name)) for name in names]
    watched_s = sum(record.watched.values())
    return SharingReport(
        record.since_s,
        record.until_s,
        watched_s,
        _sum(row.sums for row in users),
        tuple(sorted(users, key=lambda row: -row.sums.gpu_s)),
        jobs,
        _job_sums([row for row in record.hours if not row.managed], (), (), record),
        record.idle_gpu_s,
        record.idle_gpu_s / watched_s if watched_s else 0.0,
        width_rows(record.first_starts, record.since_s, record.until_s),
        tuple(_kind(kind, record.effects) for kind in KINDS.values()),
        tuple(one for one in record.effects if one.verdict == "undone")[:MAX_UNDONE],
    )


R = TypeVar("R", HourRow, Start, Effect)


def _by_owner(rows: Iterable[R]) -> dict[tuple[str, int], list[R]]:
    by_owner: defaultdict[tuple[str, int], list[R]] = defaultdict(list)
    for row in rows:
        by_owner[row.user, row.job].append(row)
    return by_owner


def _job_sums(hours: Sequence[HourRow], starts: Sequence[Start], effects: Sequence[Effect], record: Record) -> Sums:
    saved = [start.saved_s(record.since_s, record.until_s) for start in starts]
    return Sums(
        jobs=len({row.job for row in hours} | {row.job for row in starts} | {row.job for row in effects}),
        gpu_s=sum(row.gpu_s for row in hours),
        further_gpu_s=sum(row.further_gpu_s for row in hours),
        queue_s=sum(row.queue_s for row in hours),
        turn_s=sum(row.turn_s for row in hours),
        early_starts=sum(one > 0.0 for one in saved),
        saved_s=sum(saved),
        yields=sum(row.yields for row in hours),
        tunes=_count(effects, "tune"),
        packs=_count(effects, "pack"),
        moves=_count(effects, "migrate", "resize"),
    )


def _count(effects: Iterable[Effect], *kinds: Kind) -> int:
    return sum(one.kind in kinds for one in effects)


def _sum(parts: Iterable[Sums]) -> Sums:
    rows = [msgspec.structs.astuple(part) for part in parts]
    return Sums(*map(sum, zip(*rows, strict=True))) if rows else Sums()


def width_rows(jobs: Sequence[FirstStart], since_s: float, until_s: float) -> tuple[WidthRow, ...]:
    """Return the waits of the jobs that started, and the slowdowns of those that ended, between two moments."""
    rows = []
    for width in WIDTHS:
        mine = [job for job in jobs if width.holds(job.gpus)]
        waits_s = [job.wait_s for job in mine if since_s <= job.at_s <= until_s]
        ends = [(job.slowdown, job.ended_s) for job in mine]
        slowdowns = [slowdown for slowdown, at_s in ends if slowdown and at_s and since_s <= at_s <= until_s]
        if waits_s or slowdowns:
            rows.append(WidthRow(width.name, len(waits_s), _mean(waits_s), len(slowdowns), _mean(slowdowns)))
    return tuple(rows)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _kind(kind: Kind, effects: Sequence[Effect]) -> KindRow:
    """Return the outcomes of one kind of decision; a pack has a row for each of its jobs and counts once."""
    mine = list({effect.decision: effect for effect in effects if effect.kind == kind}.values())
    measured = [one for one in mine if one.gain is not None]
    verdicts = [one.verdict for one in mine]
    return KindRow(
        kind,
        len(mine),
        verdicts.count("kept"),
        verdicts.count("undone"),
        verdicts.count("unknown"),
        verdicts.count(""),
        _median([one.predicted for one in measured if one.predicted is not None]),
        _median([one.gain for one in measured if one.gain is not None]),
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
