"""The store's part for reports: what jobs had and waited for, hour by hour, and what decisions did to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from cadenza.policies.core.actions import Action
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.sidecar.orders import Switched
from cadenza.slurm_plugin.service.accounting import effects, usage
from cadenza.slurm_plugin.service.accounting.effects import Effect, Marks
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S, Spent, Start


@dataclass(frozen=True, slots=True)
class Known:
    """What the next round is compared with."""

    snapshot: ClusterSnapshot | None = None
    starts: tuple[Start, ...] = ()
    """Those for which lane 0 has not been free yet."""
    effects: tuple[Effect, ...] = ()
    """Those in force."""
    turns: Mapping[JobKey, float] = field(default_factory=dict)
    """How long each live job has waited for turns so far, seconds."""
    marks: Mapping[JobKey, Marks] = field(default_factory=dict)


class Accounts:
    """Writes through the store's connection, in its transactions.

    ``known`` is replaced by what a method returns only once its transaction is through.
    """

    def __init__(self, link: sqlite3.Connection, last: ClusterSnapshot | None) -> None:
        """``last``: what the last round on record saw."""
        self._link = link
        self.known = Known(last if last is not None and last.hosts else None, self._starts(), self._effects())
        self.known = replace(self.known, turns=self._turns(last))

    # --- what the store calls ------------------------------------------------------------------------------

    def observe(self, snapshot: ClusterSnapshot, memory: Memory) -> Known:
        """Write down what has happened since the last round, and return what to know from now on.

        A snapshot that was read without the agents shows no leases and says nothing. ``memory``: of the round before,
        in which what this one undoes still stands.
        """
        known = self.known
        if not snapshot.hosts:
            return known
        turns, starts = known.turns, known.starts
        if usage.counts(known.snapshot, snapshot) and known.snapshot is not None:
            turns = self._spend(known.snapshot, snapshot, memory)
            fresh = usage.started(known.snapshot, snapshot)
            starts = self._watch((*starts, *fresh), snapshot, turns)
        elif known.snapshot is not None and snapshot.time_s > known.snapshot.time_s:
            self._write_starts(usage.given_up(starts, known.snapshot.time_s))
            starts = ()
        marks = effects.marks(known.marks, snapshot, memory)
        return Known(snapshot, starts, self._advance(snapshot, memory), turns, marks)

    def applied(self, actions: Iterable[tuple[int, Action]], snapshot: ClusterSnapshot, memory: Memory) -> Known:
        """Write down what the carried-out actions of a round, by their rows, begin and undo."""
        rows = tuple(actions)
        ended = effects.overtaken(self.known.effects, (action for _, action in rows), snapshot)
        fresh = effects.begun(rows, snapshot, memory, self.known.marks)
        self._write_effects((*ended, *fresh))
        return replace(self.known, effects=_still((*self.known.effects, *ended, *fresh)))

    def yielded(self, message: Switched) -> None:
        """Count a yield of a job on a host."""
        self._link.execute(
            "INSERT INTO hours (hour, job, restart, user, managed, yields)"
            " SELECT ?, job, restart, user, managed, 1 FROM hours WHERE job = ? AND restart = ?"
            " ORDER BY hour DESC LIMIT 1 ON CONFLICT DO UPDATE SET yields = yields + 1",
            (int(message.at_s // HOUR_S), message.job, message.restart),
        )

    # --- inside --------------------------------------------------------------------------------------------

    def _spend(self, before: ClusterSnapshot, after: ClusterSnapshot, memory: Memory) -> dict[JobKey, float]:
        rows = usage.spent(before, after, memory)
        for hour, part in usage.by_hour(before.time_s, after.time_s):
            self._link.execute(
                "INSERT INTO watched VALUES (?, ?) ON CONFLICT DO UPDATE SET seconds = seconds + excluded.seconds",
                (hour, part * (after.time_s - before.time_s)),
            )
            self._link.executemany(ADD, [_hour_row(hour, part, row) for row in rows])
        return {row.key: self.known.turns.get(row.key, 0.0) + row.turn_s for row in rows}

    def _watch(
        self, starts: tuple[Start, ...], snapshot: ClusterSnapshot, turns: Mapping[JobKey, float]
    ) -> tuple[Start, ...]:
        if not starts or self.known.snapshot is None:
            return starts
        seen = usage.watched(starts, self.known.snapshot, snapshot, turns)
        old = {start.job: start for start in self.known.starts}
        self._write_starts(start for start in seen if old.get(start.job) != start)
        return tuple(start for start in seen if start.free_s is None)

    def _advance(self, snapshot: ClusterSnapshot, memory: Memory) -> tuple[Effect, ...]:
        changed = effects.advance(self.known.effects, snapshot, memory)
        self._write_effects(changed)
        return _still((*self.known.effects, *changed))

    def _write_starts(self, starts: Iterable[Start]) -> None:
        self._link.executemany(
            "INSERT OR REPLACE INTO starts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [msgspec.structs.astuple(start) for start in starts],
        )

    def _write_effects(self, found: Iterable[Effect]) -> None:
        for effect in found:
            if effect.detail == effects.REPLACED:  # says nothing, and there may be one each turn
                self._link.execute("DELETE FROM effects WHERE decision = ? AND job = ?", (effect.decision, effect.job))
            else:
                self._link.execute(PUT, msgspec.structs.astuple(effect))

    def _starts(self) -> tuple[Start, ...]:
        names = ", ".join(Start.__struct_fields__)
        rows = self._link.execute(f"SELECT {names} FROM starts WHERE free_s IS NULL")  # noqa: S608 (names are ours)
        return tuple(Start(*row) for row in rows)

    def _effects(self) -> tuple[Effect, ...]:
        names = ", ".join(Effect.__struct_fields__)
        rows = self._link.execute(f"SELECT {names} FROM effects WHERE ended_s IS NULL")  # noqa: S608 (names are ours)
        return tuple(Effect(*row) for row in rows)

    def _turns(self, last: ClusterSnapshot | None) -> dict[JobKey, float]:
        query = "SELECT coalesce(sum(turn_s), 0) FROM hours WHERE job = ? AND restart = ?"
        keys = [job.key for job in last.jobs] if last is not None else []
        return {key: self._link.execute(query, key).fetchone()[0] for key in keys}


ADD = (
    "INSERT INTO hours (hour, job, restart, user, managed, gpu_s, further_gpu_s, queue_s, turn_s)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET managed = excluded.managed,"
    " gpu_s = gpu_s + excluded.gpu_s, further_gpu_s = further_gpu_s + excluded.further_gpu_s,"
    " queue_s = queue_s + excluded.queue_s, turn_s = turn_s + excluded.turn_s"
)
PUT = (
    f"INSERT OR REPLACE INTO effects ({', '.join(Effect.__struct_fields__)})"  # noqa: S608 (names are ours)
    f" VALUES ({', '.join('?' * len(Effect.__struct_fields__))})"
)


def _hour_row(hour: int, part: float, row: Spent) -> tuple[object, ...]:
    amounts = (part * amount for amount in row[3:])
    return (hour, *row.key, row.user, row.managed, *amounts)


def _still(found: Iterable[Effect]) -> tuple[Effect, ...]:
    """Return what is in force, the last word on each."""
    last = {(effect.decision, effect.job): effect for effect in found}
    return tuple(effect for effect in last.values() if effect.ended_s is None)
