"""What sharing brought within a time: GPU hours and waiting by user, and what became of decisions (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Protocol, TypeVar

import msgspec

from cadenza.slurm_plugin.service.accounting.effects import Effect, Kind
from cadenza.slurm_plugin.service.accounting.usage import Start
from cadenza.slurm_plugin.service.store.reader import HourRow

SCHEMA = "cadenza.sharing/1"
KINDS: tuple[Kind, ...] = ("tune", "pack", "migrate", "resize")
MOST_UNDONE = 50


class Sums(msgspec.Struct, frozen=True):
    """What jobs had and waited for, in seconds and GPU seconds."""

    jobs: int = 0
    gpu_s: float = 0.0
    """A GPU that several jobs use at once counts in equal parts."""
    further_gpu_s: float = 0.0
    """The part on further lanes: hours that plain Slurm could not have given to these jobs at that moment."""
    queue_s: float = 0.0
    """Pending for want of resources."""
    turn_s: float = 0.0
    """Started, and waiting for a turn: the price of sharing."""
    early_starts: int = 0
    """Jobs that started on a further lane, and were spared waiting by it."""
    saved_s: float = 0.0
    """The queue waiting that they were spared, see ``usage.Start``."""
    yields: int = 0
    tunes: int = 0
    packs: int = 0
    moves: int = 0
    """Migrations and resizes."""

    @property
    def net_s(self) -> float:
        """Return what is left of the waiting saved when the waiting for turns is taken off."""
        return self.saved_s - self.turn_s


class Row(msgspec.Struct, frozen=True):
    """The sums of one user, or of one job of a user."""

    user: str
    sums: Sums
    job: int | None = None


class KindRow(msgspec.Struct, frozen=True):
    """What became of the decisions of one kind; gains are throughput after over before."""

    kind: Kind
    decided: int
    kept: int
    undone: int
    unknown: int
    measuring: int
    predicted: float | None
    """The median of those that were also measured."""
    gain: float | None
    """The median as measured; of packs, of all their jobs together, where turns are 1."""


class Brought(msgspec.Struct, frozen=True):
    """The answer to what sharing brought between two moments, seconds since the epoch."""

    since_s: float
    until_s: float
    watched_s: float
    """How much of that time is on record."""
    total: Sums
    users: tuple[Row, ...]
    """Most GPU time first."""
    jobs: tuple[Row, ...]
    others: Sums
    """Jobs that did not opt in."""
    kinds: tuple[KindRow, ...]
    undone: tuple[Effect, ...]
    """Newest first."""
    schema: str = SCHEMA


class Record(msgspec.Struct, frozen=True):
    """What the store has of a time; ``watched``: seconds on record by hour."""

    since_s: float
    until_s: float
    watched: Mapping[int, float]
    hours: Sequence[HourRow]
    starts: Sequence[Start]
    effects: Sequence[Effect]


def brought(record: Record, user: str | None = None) -> Brought:
    """Return what sharing brought within a record's time, to everybody or to one user."""
    mine = _of_user(record, user)
    jobs = _by_job(mine)
    users = _grouped(jobs)
    others = [row for row in mine.hours if not row.managed]
    return Brought(
        record.since_s,
        record.until_s,
        sum(record.watched.values()),
        _sum(row.sums for row in users),
        users,
        jobs,
        _job_sums(others, (), (), mine),
        tuple(_kind(kind, mine.effects) for kind in KINDS),
        tuple(one for one in mine.effects if one.verdict == "undone")[:MOST_UNDONE],
    )


def _of_user(record: Record, user: str | None) -> Record:
    if user is None:
        return record
    return msgspec.structs.replace(
        record,
        hours=[row for row in record.hours if row.user == user],
        starts=[row for row in record.starts if row.user == user],
        effects=[row for row in record.effects if row.user == user],
    )


def _by_job(record: Record) -> tuple[Row, ...]:
    hours = _each(row for row in record.hours if row.managed)
    starts, effects = _each(record.starts), _each(record.effects)
    keys = sorted(hours.keys() | starts.keys() | effects.keys())
    return tuple(
        Row(key[0], _job_sums(hours.get(key, ()), starts.get(key, ()), effects.get(key, ()), record), key[1])
        for key in keys
    )


class _Owned(Protocol):
    """A record of one job of a user."""

    @property
    def user(self) -> str:
        """Return the job's user."""
        ...

    @property
    def job(self) -> int:
        """Return the job's id."""
        ...


R = TypeVar("R", bound=_Owned)


def _each(rows: Iterable[R]) -> dict[tuple[str, int], list[R]]:
    found: defaultdict[tuple[str, int], list[R]] = defaultdict(list)
    for row in rows:
        found[row.user, row.job].append(row)
    return found


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


def _grouped(jobs: Sequence[Row]) -> tuple[Row, ...]:
    names = sorted({row.user for row in jobs})
    rows = [Row(name, _sum(row.sums for row in jobs if row.user == name)) for name in names]
    return tuple(sorted(rows, key=lambda row: -row.sums.gpu_s))


def _sum(parts: Iterable[Sums]) -> Sums:
    rows = [msgspec.structs.astuple(part) for part in parts]
    return Sums(*map(sum, zip(*rows, strict=True))) if rows else Sums()


def _kind(kind: Kind, effects: Sequence[Effect]) -> KindRow:
    """Return what became of one kind of decisions; a pack has a row for each of its jobs and counts once."""
    mine = list({effect.decision: effect for effect in effects if effect.kind == kind}.values())
    measured = [one for one in mine if one.gain is not None]
    words = [one.verdict for one in mine]
    return KindRow(
        kind,
        len(mine),
        words.count("kept"),
        words.count("undone"),
        words.count("unknown"),
        words.count(""),
        _median([one.predicted for one in measured if one.predicted is not None]),
        _median([one.gain for one in measured if one.gain is not None]),
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
