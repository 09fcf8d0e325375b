"""The store's part for reports: GPU time and waiting of jobs, hour by hour, and the effects of decisions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from cadenza.policies.core.actions import Action
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.simulator.figures import bounded_slowdown
from cadenza.sidecar.orders import Switched
from cadenza.slurm_plugin.service.accounting import effects, usage
from cadenza.slurm_plugin.service.accounting.effects import Effect, Marks
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S, Spent, Start

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The values with which the next round is compared."""

    snapshot: ClusterSnapshot | None = None
    starts: tuple[Start, ...] = ()
    """Starts for which lane 0 has not been free yet."""
    effects: tuple[Effect, ...] = ()
    """Effects in force."""
    turns: Mapping[JobKey, float] = field(default_factory=dict)
    """Waiting for turns of each live job so far, seconds."""
    marks: Mapping[JobKey, Marks] = field(default_factory=dict)
    later: Mapping[JobKey, float] = field(default_factory=dict)
    """Waiting jobs whose time is counted in a later round, with since when."""
    number: int = 0
    """Number of the round."""


@dataclass(slots=True)
class News:
    """Findings of one round, for the service's metrics."""

    verdicts: list[tuple[str, str]] = field(default_factory=list)
    """Kind and verdict of each earlier action whose effect is known now."""
    spent: tuple[Spent, ...] = ()
    started: list[tuple[Job, float]] = field(default_factory=list)
    """Jobs that started for the first time, with their time in the queue in seconds."""
    ended: list[tuple[Job, float]] = field(default_factory=list)
    """Jobs that ended, with their bounded slowdown."""


class JobAccounting:
    """Writes through the store's connection, in its transactions.

    The store replaces ``baseline`` by a method's result once the transaction has succeeded.
    """

    def __init__(self, link: sqlite3.Connection, last: ClusterSnapshot | None) -> None:
        """``last``: the snapshot of the last round on record."""
        self._link = link
        self.news = News()
        starts, effects_in_force = self._open(Start, "starts", "free_s"), self._open(Effect, "effects", "ended_s")
        query = "SELECT coalesce(sum(turn_s), 0) FROM hours WHERE job = ? AND restart = ?"
        keys = [job.key for job in last.jobs] if last is not None else []
        turns = {key: link.execute(query, key).fetchone()[0] for key in keys}
        self.baseline = Baseline(last if last is not None and last.hosts else None, starts, effects_in_force, turns)

    # --- for the store -------------------------------------------------------------------------------------

    def observe(self, snapshot: ClusterSnapshot, memory: Memory) -> Baseline:
        """Write down the changes since the last round, and return the new baseline.

        A snapshot that was read without the agents shows no leases and changes nothing. ``memory``: that of the round
        before, which still has what this round undoes.
        """
        base = self.baseline
        if not snapshot.hosts:
            return base
        turns, starts, later = base.turns, base.starts, dict(base.later)
        if usage.counts(base.snapshot, snapshot) and base.snapshot is not None:
            later = usage.counted_later(base.snapshot, snapshot, base.later, base.number)
            turns = self._spend(base.snapshot, snapshot, memory, later)
            self._write_first_starts(base.snapshot, snapshot)
            starts = self._watch((*starts, *usage.started(base.snapshot, snapshot)), snapshot, turns)
        elif base.snapshot is not None and snapshot.time_s > base.snapshot.time_s:
            self._write_starts(usage.given_up(starts, base.snapshot.time_s))
            starts, later = (), {}
        changed = effects.advance(base.effects, snapshot, memory)
        self._write_effects(changed)
        marks = effects.marks(base.marks, snapshot, memory)
        in_force = _in_force((*base.effects, *changed))
        return Baseline(snapshot, starts, in_force, turns, marks, later, base.number + 1)

    def applied(self, actions: Iterable[tuple[int, Action]], snapshot: ClusterSnapshot, memory: Memory) -> Baseline:
        """Write down the effects that a round's carried-out actions, by their rows, begin and end."""
        rows = tuple(actions)
        ended = effects.overtaken(self.baseline.effects, (action for _, action in rows), snapshot)
        begun = effects.begun(rows, snapshot, memory, self.baseline.marks)
        self._write_effects((*ended, *begun))
        return replace(self.baseline, effects=_in_force((*self.baseline.effects, *ended, *begun)))

    def yielded(self, message: Switched) -> None:
        """Count a yield of a job on a host."""
        self._link.execute(
            "INSERT INTO hours (hour, job, restart, user, managed, yields)"
            " SELECT ?, job, restart, user, managed, 1 FROM hours WHERE job = ? AND restart = ?"
            " ORDER BY hour DESC LIMIT 1 ON CONFLICT DO UPDATE SET yields = yields + 1",
            (int(message.at_s // HOUR_S), message.job, message.restart),
        )

    # --- inside --------------------------------------------------------------------------------------------

    def _spend(
        self, before: ClusterSnapshot, after: ClusterSnapshot, memory: Memory, later: Mapping[JobKey, float]
    ) -> dict[JobKey, float]:
        rows, idle_s = usage.spent(before, after, memory, later), usage.idle_waiting_s(before, after, memory)
        self.news.spent = rows
        due = {key: from_s for key, from_s in self.baseline.later.items() if key not in later}
        for from_s, row in usage.waited(before, memory, due):
            self._link.executemany(ADD, _shares(row, tuple(usage.by_hour(from_s, before.time_s))))
        spans = tuple(usage.by_hour(before.time_s, after.time_s))
        for hour, part in spans:
            self._link.execute(
                "INSERT INTO watched VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET seconds = seconds + excluded.seconds,"
                " idle_gpu_s = idle_gpu_s + excluded.idle_gpu_s",
                (hour, part * (after.time_s - before.time_s), part * idle_s),
            )
        self._link.executemany(ADD, [share for row in rows for share in _shares(row, spans)])
        return {row.key: self.baseline.turns.get(row.key, 0.0) + row.turn_s for row in rows}

    def _write_first_starts(self, before: ClusterSnapshot, after: ClusterSnapshot) -> None:
        for job, at_s in usage.first_starts(before, after):
            self._link.execute(
                "INSERT OR REPLACE INTO first_starts"
                " (job, user, at_s, gpus, account, qos, partition, gpu_type, managed, limit_s, wait_s)"
                " SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(sum(queue_s), 0) FROM hours WHERE job = ?",
                (
                    job.key.id,
                    job.user,
                    at_s,
                    job.gpus,
                    job.account,
                    job.qos,
                    job.partition,
                    job.gpu_type,
                    job.opted_in,
                    job.time_limit_s,
                    job.key.id,
                ),
            )
            query = "SELECT wait_s FROM first_starts WHERE job = ?"
            self.news.started.append((job, self._link.execute(query, (job.key.id,)).fetchone()[0]))
        for ended in usage.ended(before, after):
            query = "SELECT coalesce(sum(queue_s + turn_s), 0), coalesce(sum(held_s), 0) FROM hours WHERE job = ?"
            waited_s, held_s = self._link.execute(query, (ended,)).fetchone()
            slowdown = bounded_slowdown(waited_s + held_s, held_s)
            cursor = self._link.execute(
                "UPDATE first_starts SET ended_s = ?, slowdown = ?, waited_s = ?, held_s = ?"
                " WHERE job = ? AND ended_s IS NULL",
                (after.time_s, slowdown, waited_s, held_s, ended),
            )
            if cursor.rowcount:
                self.news.ended.append((before.by_id[ended], slowdown))

    def _watch(
        self, starts: tuple[Start, ...], snapshot: ClusterSnapshot, turns: Mapping[JobKey, float]
    ) -> tuple[Start, ...]:
        if not starts or self.baseline.snapshot is None:
            return starts
        watched = usage.watched(starts, self.baseline.snapshot, snapshot, turns)
        old = {start.job: start for start in self.baseline.starts}
        self._write_starts(start for start in watched if old.get(start.job) != start)
        return tuple(start for start in watched if start.free_s is None)

    def _write_starts(self, starts: Iterable[Start]) -> None:
        self._link.executemany(
            "INSERT OR REPLACE INTO starts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [msgspec.structs.astuple(start) for start in starts],
        )

    def _write_effects(self, changed: Iterable[Effect]) -> None:
        for effect in changed:
            if effect.detail == effects.REPLACED:  # without information, and there may be one each turn
                self._link.execute("DELETE FROM effects WHERE decision = ? AND job = ?", (effect.decision, effect.job))
            else:
                self._link.execute(PUT, msgspec.structs.astuple(effect))

    def _open(self, kind: type[R], table: str, column: str) -> tuple[R, ...]:
        """Return the rows of a table whose end is not known yet."""
        names = ", ".join(kind.__struct_fields__)
        query = f"SELECT {names} FROM {table} WHERE {column} IS NULL"  # noqa: S608 (names are ours)
        return tuple(kind(*row) for row in self._link.execute(query))


ADD = (
    "INSERT INTO hours (hour, job, restart, user, managed, gpu_s, further_gpu_s, queue_s, turn_s, held_s)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET managed = excluded.managed,"
    " gpu_s = gpu_s + excluded.gpu_s, further_gpu_s = further_gpu_s + excluded.further_gpu_s,"
    " queue_s = queue_s + excluded.queue_s, turn_s = turn_s + excluded.turn_s, held_s = held_s + excluded.held_s"
)
PUT = (
    f"INSERT OR REPLACE INTO effects ({', '.join(Effect.__struct_fields__)})"  # noqa: S608 (names are ours)
    f" VALUES ({', '.join('?' * len(Effect.__struct_fields__))})"
)


def _shares(row: Spent, spans: Iterable[tuple[int, float]]) -> Iterator[tuple[Any, ...]]:
    """Yield a row of the table for each hour that a stretch of time touches."""
    for hour, part in spans:
        yield (hour, *row.key, row.user, row.managed, *(part * each for each in row[3:]))


def _in_force(versions: Iterable[Effect]) -> tuple[Effect, ...]:
    """Return the effects in force, the last version of each."""
    last = {(effect.decision, effect.job): effect for effect in versions}
    return tuple(effect for effect in last.values() if effect.ended_s is None)
