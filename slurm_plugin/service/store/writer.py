"""The store's writer: rounds written ahead of their actions, verifications, and the agents' reports."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cadenza.policies.core.actions import Action, DrainNode, OpenNode, Outcome
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.guard import Guarded
from cadenza.policies.round import Clock
from cadenza.sidecar.orders import LeaseLog, Switched
from cadenza.slurm_plugin.service.agents.agent_registry import Event
from cadenza.slurm_plugin.service.store import record_codec, schema
from cadenza.slurm_plugin.service.store.job_accounting import JobAccounting
from cadenza.slurm_plugin.service.store.verification import verdict

log = logging.getLogger(__name__)

ACTION_COLUMNS = "round, at_s, kind, job, restart, node, reason, action, allowed, rule"


class SqliteStore:
    """``policies.round.Store`` over one sqlite file in WAL mode; the only writer of that file.

    Methods raise ``sqlite3.Error`` when the disk fails; a round that cannot be written down does not act.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.put_aside: Path | None = None
        """New path of a corrupt predecessor that was moved when this store was opened."""
        self._clock = clock
        self._link = self._open()
        self._settings = self._last_id("settings")
        self._memory = self._read_memory()
        self._last_blocked: frozenset[tuple[bytes, str]] = frozenset()
        self._snapshot = self.last_snapshot()
        self._accounting = JobAccounting(self._link, self._snapshot)

    @property
    def fresh(self) -> bool:
        """True if no round is on record, so that the memory is empty."""
        return self._last_id("rounds") is None

    def close(self) -> None:
        """Close the file; its write-ahead file is merged into it."""
        self._link.close()

    # --- policies.round.Store ------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Return the memory of the last recorded decision; an empty one in a fresh store."""
        return self._memory

    def last_snapshot(self) -> ClusterSnapshot | None:
        """Return the snapshot of the last recorded round; None in a fresh store."""
        row = self._link.execute("SELECT snapshot FROM rounds ORDER BY number DESC LIMIT 1").fetchone()
        return record_codec.decode_snapshot(record_codec.unpack(row[0])) if row else None

    def adopt(self, memory: Memory) -> None:
        """Replace the memory before the next round, as recovery does for an empty store."""
        self._memory = memory

    def begin(self, snapshot: ClusterSnapshot, decision: Decision, guarded: Sequence[Guarded], memory: Memory) -> int:
        """Verify earlier actions against ``snapshot``, then write this round down and return its number."""
        with self._transaction():
            # 1. Verdicts on earlier actions.
            self._verify(snapshot)
            # 2. The round itself, with all that a replay needs.
            written = (
                record_codec.encode_snapshot(snapshot),
                record_codec.encode_memory(self._memory),
                record_codec.encode_decision(decision),
                record_codec.encode_memory(memory),
            )
            cursor = self._link.execute(
                "INSERT INTO rounds (at_s, settings, snapshot, before, decision, memory) VALUES (?, ?, ?, ?, ?, ?)",
                (snapshot.time_s, self._settings, *map(record_codec.pack, written)),
            )
            number = int(cursor.lastrowid or 0)
            # 3. Its actions, and the reasons of all jobs.
            self._insert_actions(number, snapshot.time_s, guarded)
            self._link.executemany(
                "INSERT OR REPLACE INTO reasons (job, restart, at_s, round, reason) VALUES (?, ?, ?, ?, ?)",
                [(key.id, key.restart, snapshot.time_s, number, text) for key, text in decision.reasons.items()],
            )
            # 4. The sums for reports.
            baseline = self._accounting.observe(snapshot, self._memory)
        self._memory, self._snapshot, self._accounting.baseline = memory, snapshot, baseline
        return number

    def finish(self, number: int, outcomes: Sequence[tuple[Action, Outcome]], seconds: float) -> None:
        """Write down the outcomes of a round's actions and its duration."""
        with self._transaction():
            query = "SELECT id FROM actions WHERE round = ? AND allowed = 1 ORDER BY id"
            rows = [row[0] for row in self._link.execute(query, (number,))]
            results = [(outcome.ok, outcome.error, row) for row, (_, outcome) in zip(rows, outcomes, strict=True)]
            self._link.executemany("UPDATE actions SET ok = ?, error = ? WHERE id = ?", results)
            self._link.execute("UPDATE rounds SET seconds = ? WHERE number = ?", (seconds, number))
            baseline = self._accounting.baseline
            done = [(row, action) for row, (action, outcome) in zip(rows, outcomes, strict=True) if outcome.ok]
            if self._snapshot is not None:
                baseline = self._accounting.applied(done, self._snapshot, self._memory)
        self._accounting.baseline = baseline

    # --- the rest of the record ----------------------------------------------------------------------

    def amend(self, number: int, memory: Memory) -> None:
        """Replace the memory of a recorded round, once its outcomes are known."""
        row = record_codec.pack(record_codec.encode_memory(memory))
        self._link.execute("UPDATE rounds SET memory = ? WHERE number = ?", (row, number))
        self._memory = memory

    def use_settings(self, text: str) -> None:
        """Remember the settings that the next rounds are decided with; a replay needs them."""
        last = self._link.execute("SELECT text FROM settings WHERE id = ?", (self._settings,)).fetchone()
        if last is None or last[0] != text:
            self._settings = self._link.execute(
                "INSERT INTO settings (at_s, text) VALUES (?, ?)", (self._clock.now(), text)
            ).lastrowid

    def learned(self) -> dict[str, str]:
        """Return the beliefs learned from running jobs, as JSON by name (see ``beliefs.Record``)."""
        return dict(self._link.execute("SELECT name, record FROM learned ORDER BY name").fetchall())

    def learn(self, rows: Mapping[str, str]) -> None:
        """Replace these beliefs; one that does not change for as long as rounds are kept is deleted."""
        now_s = self._clock.now()
        with self._transaction():
            self._link.executemany(
                "INSERT OR REPLACE INTO learned (name, at_s, record) VALUES (?, ?, ?)",
                [(name, now_s, text) for name, text in rows.items()],
            )

    def record(self, messages: Iterable[Switched | LeaseLog | Event]) -> None:
        """Write down the agents' messages."""
        with self._transaction():
            for message in messages:
                row = {name: getattr(message, name) for name in message.__struct_fields__ if name != "v"}
                table = "switches" if isinstance(message, Switched) else "events"
                if isinstance(message, LeaseLog):
                    table, row["gpus"] = "leases", json.dumps(message.gpus)
                names, marks = ", ".join(row), ", ".join("?" * len(row))
                query = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 (names are ours)
                self._link.execute(query, tuple(row.values()))
                if isinstance(message, Switched) and message.kind == "yield":
                    self._accounting.yielded(message)

    def forget(self, before_s: float, kept_since_s: float | None = None) -> int:
        """Delete everything older than ``before_s`` except the last round; return the number of rows deleted.

        ``kept_since_s``: the same for the tables of reports, by default ``before_s``.
        """
        deleted = 0
        kept_s = before_s if kept_since_s is None else kept_since_s
        with self._transaction():
            for table, condition in schema.KEPT.items():
                deleted += self._link.execute(f"DELETE FROM {table} WHERE {condition}", (kept_s,)).rowcount  # noqa: S608
            for table, column in schema.TIMED.items():
                keep = " AND number < (SELECT max(number) FROM rounds)" if table == "rounds" else ""
                query = f"DELETE FROM {table} WHERE {column} < ?{keep}"  # noqa: S608 (names are ours)
                deleted += self._link.execute(query, (before_s,)).rowcount
        return deleted

    # --- inside ----------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return schema.open_writable(self.path)
        except sqlite3.DatabaseError as error:
            self.put_aside = schema.put_aside(self.path, self._clock.now())
            log.warning("%s is corrupt (%s); kept as %s, starting afresh", self.path, error, self.put_aside)
            return schema.open_writable(self.path)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._link.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._link.execute("ROLLBACK")
            raise
        self._link.execute("COMMIT")

    def _last_id(self, table: str) -> int | None:
        last = self._link.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0]  # noqa: S608
        return None if last is None else int(last)

    def _read_memory(self) -> Memory:
        row = self._link.execute("SELECT memory FROM rounds ORDER BY number DESC LIMIT 1").fetchone()
        if row is None:
            return Memory()
        # A release that was interrupted is repeated: twice does no harm, never would.
        open_rows = self._link.execute(
            "SELECT job, restart FROM actions WHERE allowed = 1 AND ok IS NULL AND kind IN ('Place', 'Release')"
        )
        unsure = {JobKey(*row) for row in open_rows.fetchall()}
        memory = record_codec.decode_memory(record_codec.unpack(row[0]))
        return replace(memory, placed=memory.placed - unsure)

    def _verify(self, snapshot: ClusterSnapshot) -> None:
        rows = self._link.execute("SELECT id, at_s, action FROM actions WHERE ok = 1 AND verified IS NULL")
        for identity, at_s, text in rows.fetchall():
            verified = verdict(record_codec.decode_action(text.encode()), snapshot, at_s)
            if verified is not None:
                self._link.execute(
                    "UPDATE actions SET verified = ?, verified_s = ? WHERE id = ?",
                    (verified, snapshot.time_s, identity),
                )

    def _insert_actions(self, number: int, at_s: float, guarded: Sequence[Guarded]) -> None:
        # Observe-only blocks the same actions each round: one row for the first time is enough.
        blocked = set()
        key: tuple[int, int] | tuple[None, None]
        for item in guarded:
            action, text = item.action, record_codec.encode_action(item.action)
            if not item.allowed:
                blocked.add((text, item.reason))
            if item.allowed or (text, item.reason) not in self._last_blocked:
                key, node = (None, None), None
                if isinstance(action, DrainNode | OpenNode):
                    node = action.node
                else:
                    key = action.job
                row = (
                    number, at_s, type(action).__name__, *key, node, action.reason, text.decode(), item.allowed,
                    item.reason,
                )  # fmt: skip
                query = f"INSERT INTO actions ({ACTION_COLUMNS}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608
                self._link.execute(query, row)
        self._last_blocked = frozenset(blocked)
