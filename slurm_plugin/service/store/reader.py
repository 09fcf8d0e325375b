"""The store's reader, for the commands: opens the file read-only, also while the service writes."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S, FirstStart, HourRow, Start
from cadenza.slurm_plugin.service.agents.agent_registry import Event
from cadenza.slurm_plugin.service.store import record_codec, schema
from cadenza.slurm_plugin.service.store.round_deltas import Frame, read_round

R = TypeVar("R", bound=msgspec.Struct)


class Round(msgspec.Struct, frozen=True):
    """One recorded round: ``before`` and ``snapshot`` under ``settings`` gave ``decision``."""

    number: int
    at_s: float
    snapshot: ClusterSnapshot
    before: Memory
    decision: Decision
    memory: Memory
    seconds: float | None
    """None: the service died before its actions were all applied."""
    settings: str
    """The settings as JSON, see ``settings.from_record``."""


class ActionRow(msgspec.Struct, frozen=True):
    """One action on record; ``job`` is None for a node's, ``ok`` None when it never left."""

    round: int
    at_s: float
    kind: str
    job: int | None
    restart: int | None
    node: str | None
    reason: str
    allowed: bool
    rule: str
    """The guard's reason for not allowing it."""
    ok: bool | None
    error: str
    verified: str | None
    """verified, failed, gone, or None while no snapshot shows it."""


class SwitchRow(msgspec.Struct, frozen=True):
    """One finished yield or resume, times in seconds; the fields of ``orders.Switched``."""

    at_s: float
    host: str
    job: int
    restart: int
    kind: str
    boundary_s: float
    copy_s: float
    total_s: float
    bytes: int
    iteration_p99_s: float | None
    note: str


class LargestState(msgspec.Struct, frozen=True):
    """Largest state that a job has moved out or saved on one host, in bytes, and the speed of all checkpoints."""

    job: int
    bytes: int
    saved_bytes_s: float | None
    """Bytes written in a second; None before a checkpoint was saved by order."""


class LeaseRow(msgspec.Struct, frozen=True):
    """One stretch in which a job held GPUs of a host."""

    host: str
    job: int
    restart: int
    gpus: tuple[int, ...]
    from_s: float
    to_s: float


class JobRecord(msgspec.Struct, frozen=True):
    """Everything on record about one job; ``job`` is its state in the last round, None if it was gone."""

    id: int
    reason: str
    reason_at_s: float | None
    job: Job | None
    actions: tuple[ActionRow, ...]
    switches: tuple[SwitchRow, ...]
    events: tuple[Event, ...]
    effects: tuple[Effect, ...] = ()
    faults: tuple[str, ...] = ()
    """Faults of the service's disk and of the job's hosts, each as a sentence."""

    @property
    def exists(self) -> bool:
        """True if any round, action or report ever named the job."""
        return bool(self.reason or self.job or self.actions or self.switches or self.events)


def host_faults(snapshot: ClusterSnapshot, nodes: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the faults of the hosts of these nodes, by default of all: silent agents, and what agents report."""
    hosts = {node.host for node in snapshot.nodes if (node.lane if nodes is None else node.name in nodes)}
    faults: list[str] = []
    for host in snapshot.hosts:
        if not host.agent_alive and host.name in hosts:
            faults.append(f"the agent of {host.name} {host.refused or 'is silent'}")
        elif nodes is None or host.name in hosts:
            faults += (f"{host.name}: {fault}" for fault in host.faults)
    return tuple(faults)


FULL_BYTES = 1 << 20
"""A file system with less room than this is full."""
ROUNDS = "SELECT rounds.*, settings.text AS text FROM rounds LEFT JOIN settings ON settings.id = settings"


MAX_UNREADABLE = 20
"""Unreadable rounds after which the last one that can be read is no longer looked for."""


MANY_OLDER = 10_000
"""Rows in a row that are older than a period, after which none of it is looked for."""


class StoreReader:
    """Read access; raises StoreError when the file is missing, unreadable or corrupt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._link = schema.open_readonly(path)
        self._link.row_factory = sqlite3.Row
        self._frame: Frame | None = None
        """The key frame of the round that was read last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._link.close()

    def round(self, number: int | None = None) -> Round | None:
        """Return one round, by default the last that can be read; None when there is none on record (any more)."""
        where = f"ORDER BY number DESC LIMIT {MAX_UNREADABLE}" if number is None else "WHERE number = ?"
        for row in self._rows(f"{ROUNDS} {where}", () if number is None else (number,)):
            try:
                return self._read(row)
            except record_codec.UNREADABLE as error:
                if number is not None:
                    raise StoreError(f"{self.path}: round {number} cannot be read: {error}") from None
        return None

    def job_record(self, job: int, limit: int = 20, last: Round | None = None) -> JobRecord:
        """Return everything about a job id, newest rows first, at most ``limit`` of each kind.

        ``last``: the last round, which takes a second to read on a large cluster; by default it is read.
        """
        rows = self._rows("SELECT reason, at_s, round FROM reasons WHERE job = ? ORDER BY at_s DESC LIMIT 1", (job,))
        last = last or self.round()
        reason, reason_at_s = (rows[0]["reason"], rows[0]["at_s"]) if rows else ("", None)
        live = [key for key in (last.decision.reasons if last else ()) if key.id == job]
        if last is not None and live and last.number >= (rows[0]["round"] if rows else 0):
            # The table has it without the seconds that have gone on since.
            reason, reason_at_s = last.decision.reasons[max(live)], last.at_s
        mine = [one for one in (last.snapshot.jobs if last else ()) if one.key.id == job]
        newest = max(mine, key=lambda one: one.key.restart, default=None)
        if newest is not None and newest.profile is not None:  # siblings refer to each other
            newest = replace(newest, profile=replace(newest.profile, siblings={}))
        return JobRecord(
            job,
            reason,
            reason_at_s,
            newest,
            self.actions(job=job, limit=limit),
            self.switches(job=job, limit=limit),
            self.events(job=job, limit=limit),
            self.effects(job=job, limit=limit),
            (*self.faults(), *(host_faults(last.snapshot, newest.nodes) if last and newest else ())),
        )

    def faults(self) -> tuple[str, ...]:
        """Return the faults of the record's file system, each as a sentence."""
        if shutil.disk_usage(self.path.parent).free >= FULL_BYTES:
            return ()
        return (f"the disk of {self.path} is full: cadenzad does nothing that it cannot write down",)

    def owner(self, job: int, last: Round | None = None) -> tuple[str, str] | None:
        """Return user and account of a job that runs now, else of the one that last had this id; None if none had it.

        ``last``: the last round, by default read.
        """
        last = last or self.round()
        owners = [(one.user, one.account) for one in (last.snapshot.jobs if last else ()) if one.key.id == job]
        return owners[0] if owners else self.past_owner(job)

    def past_owner(self, job: int) -> tuple[str, str] | None:
        """Return user and account of the job that last had this id in an hour on record; "" for an account unknown."""
        rows = self._rows(
            "SELECT user, coalesce(account, '') AS account FROM hours LEFT JOIN first_starts USING (job, user)"
            " WHERE job = ? ORDER BY hour DESC LIMIT 1",
            (job,),
        )
        return (rows[0]["user"], rows[0]["account"]) if rows else None

    def actions(self, since_s: float = 0.0, job: int | None = None, limit: int = 1000) -> tuple[ActionRow, ...]:
        """Return actions, newest first; of a job also those on several jobs, whose rows have the first one's number."""
        if job is None:
            return self._table("actions", "at_s", ActionRow, (since_s, job, limit))
        query = (
            "SELECT * FROM actions WHERE at_s >= ? AND (job = ? OR (kind IN ('MakeWay', 'Pack') AND EXISTS (SELECT 1"
            " FROM json_each(action, '$.jobs') WHERE json_extract(value, '$[0]') = ?))) ORDER BY id DESC LIMIT ?"
        )
        return self._structs(ActionRow, query, (since_s, job, job, limit))

    def switches(self, since_s: float = 0.0, job: int | None = None, limit: int = 1000) -> tuple[SwitchRow, ...]:
        """Return yields and resumes, newest first."""
        return self._table("switches", "at_s", SwitchRow, (since_s, job, limit))

    def largest_state(self) -> LargestState | None:
        """Return the largest state on record; None before a job has yielded."""
        query = (
            "SELECT job, bytes, (SELECT total(bytes) / total(copy_s) FROM switches"
            " WHERE kind = 'checkpoint' AND bytes > 0 AND copy_s > 0) AS saved_bytes_s"
            " FROM switches WHERE kind IN ('yield', 'checkpoint') AND bytes > 0 ORDER BY bytes DESC LIMIT 1"
        )
        return next(iter(self._structs(LargestState, query)), None)

    def leases(
        self, since_s: float = 0.0, job: int | None = None, limit: int = 100_000, host: str | None = None
    ) -> tuple[LeaseRow, ...]:
        """Return ended lease stretches that reach past ``since_s``, newest first; ``host``: those on this host only."""
        return self._table("leases", "to_s", LeaseRow, (since_s, job, limit), host)

    def events(self, since_s: float = 0.0, job: int | None = None, limit: int = 1000) -> tuple[Event, ...]:
        """Return the agents' changes, newest first."""
        return self._table("events", "at_s", Event, (since_s, job, limit))

    # --- rows for reports ----------------------------------------------------------------------------------

    def effects(
        self, since_s: float = 0.0, until_s: float = float("inf"), job: int | None = None, limit: int = 1_000_000
    ) -> tuple[Effect, ...]:
        """Return the effects of decisions on jobs, newest first."""
        query = (
            "SELECT * FROM effects WHERE at_s >= ? AND at_s < ? AND (? IS NULL OR job = ?)"
            " ORDER BY at_s DESC, decision DESC, job LIMIT ?"
        )
        return self._structs(Effect, query, (since_s, until_s, job, job, limit))

    def job_hours(self, job: int) -> tuple[HourRow, ...]:
        """Return GPU time and waiting of one job, hour by hour."""
        return self._structs(HourRow, "SELECT * FROM hours WHERE job = ? ORDER BY restart, hour", (job,))

    def hours(self, since_s: float, until_s: float) -> tuple[HourRow, ...]:
        """Return GPU time and waiting of jobs in the hours that begin within a period."""
        query = "SELECT * FROM hours WHERE hour >= ? AND hour < ? ORDER BY job, restart, hour"
        return self._structs(HourRow, query, (since_s / HOUR_S, until_s / HOUR_S))

    def starts(self, since_s: float, until_s: float) -> tuple[Start, ...]:
        """Return the starts on further lanes that may have saved waiting within a period."""
        query = "SELECT * FROM starts WHERE at_s < ? AND (free_s IS NULL OR free_s >= ?) ORDER BY job"
        return self._structs(Start, query, (until_s, since_s))

    def first_starts(self, since_s: float, until_s: float) -> tuple[FirstStart, ...]:
        """Return the jobs that had started before the end of a period, and had not ended at its beginning."""
        query = "SELECT * FROM first_starts WHERE at_s < ? AND (ended_s IS NULL OR ended_s >= ?) ORDER BY job"
        return self._structs(FirstStart, query, (until_s, since_s))

    def last_number(self) -> int:
        """Return the number of the last round on record; 0 before the first."""
        return int(self._rows("SELECT coalesce(max(number), 0) AS number FROM rounds", ())[0]["number"])

    def last_round_s(self) -> float:
        """Return the time of the last round on record; 0 before the first."""
        return float(self._rows("SELECT coalesce(max(at_s), 0) AS at_s FROM rounds", ())[0]["at_s"])

    def watched(self) -> dict[int, float]:
        """Return the seconds on record of each hour since the epoch."""
        return {row["hour"]: row["seconds"] for row in self._rows("SELECT * FROM watched ORDER BY hour", ())}

    def idle_gpu_s(self, since_s: float, until_s: float) -> float:
        """Return the GPU seconds idle while a job waited that fits, in the hours that begin within a period."""
        query = "SELECT coalesce(sum(idle_gpu_s), 0) AS idle_gpu_s FROM watched WHERE hour >= ? AND hour < ?"
        return float(self._rows(query, (since_s / HOUR_S, until_s / HOUR_S))[0]["idle_gpu_s"])

    # --- inside -----------------------------------------------------------------------------------------------

    def _read(self, row: sqlite3.Row) -> Round:
        base = row["base"]
        if base is not None and (self._frame is None or self._frame.number != base):
            frames = self._rows("SELECT * FROM rounds WHERE number = ?", (base,))
            if not frames:
                raise LookupError(f"its key frame {base} is gone")
            self._frame = Frame.of(frames[0])
        snapshot, before, decision, memory = read_round(row, self._frame if base is not None else None)
        return Round(row["number"], row["at_s"], snapshot, before, decision, memory, row["seconds"], row["text"] or "")

    def _table(
        self, table: str, column: str, kind: type[R], wanted: tuple[float, int | None, int], host: str | None = None
    ) -> tuple[R, ...]:
        """Return the newest rows of a period; the older ones, days of them, are not gone through.

        Rows come in order, except where an agent was cut off and tells late: hence the number of older ones.
        """
        since_s, job, limit = wanted
        where, values = ("", ()) if job is None else ("WHERE job = ?", (job,))
        found: list[R] = []
        older = 0
        with self._sound():
            query = f"SELECT * FROM {table} {where} ORDER BY id DESC"  # noqa: S608 (names are ours)
            for row in self._link.execute(query, values):
                older = older + 1 if row[column] < since_s else 0
                if older == MANY_OLDER or len(found) == limit:
                    break
                if not older and (host is None or row["host"] == host):
                    found.append(_struct(row, kind))
        return tuple(found)

    def _structs(self, kind: type[R], query: str, values: tuple[Any, ...] = ()) -> tuple[R, ...]:
        rows = self._rows(query, values)
        with self._sound():
            return tuple(_struct(row, kind) for row in rows)

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[sqlite3.Row]:
        with self._sound():
            return self._link.execute(query, values).fetchall()

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Raise StoreError for what sqlite does not read, and for rows of another content than they had."""
        try:
            yield
        except (sqlite3.DatabaseError, *record_codec.UNREADABLE) as error:
            raise StoreError(f"{self.path}: {error}") from None


def _struct(row: sqlite3.Row, kind: type[R]) -> R:
    fields = {name: row[name] for name in kind.__struct_fields__}
    if isinstance(fields.get("gpus"), str):
        fields["gpus"] = json.loads(fields["gpus"])
    return msgspec.convert(fields, kind, strict=False)
