"""The store's writer: rounds written ahead of their actions, verifications, and the agents' reports."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from cadenza.policies.core.actions import Action, NodeAction, Outcome
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.guard import Guarded
from cadenza.policies.round import Clock
from cadenza.sidecar.orders import LeaseLog, Switched
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.service.agents.agent_registry import Event
from cadenza.slurm_plugin.service.store import record_codec, round_deltas, schema
from cadenza.slurm_plugin.service.store.job_accounting import JobAccounting, News
from cadenza.slurm_plugin.service.store.round_deltas import Frame
from cadenza.slurm_plugin.service.store.verification import verdict

log = logging.getLogger(__name__)

ACTION_COLUMNS = "round, at_s, kind, job, restart, node, reason, action, allowed, rule"


CONTENT_ERRORS = (OverflowError, ValueError, sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError)
"""Errors of one message's content, such as a number of more than 64 bits."""


FRAME_S = 900.0
"""Time from one key frame to the next."""
TOLD_S, DAY_S, SLOT_S = 3600.0, 86400.0, 4 * 3600.0
"""Ages: all rounds of an hour are kept, the key frames of a day, and one key frame of each slot."""
CHUNK, STEP_S = 200, 0.05
"""Rows that are deleted at once, and the time that one step of it takes."""
PAGES = 512
"""Free pages that are given back at once."""
TOLD = """DELETE FROM rounds WHERE number IN (SELECT number FROM rounds WHERE base > 0 AND at_s < ?
 AND number < (SELECT max(number) FROM rounds) ORDER BY number LIMIT 20)"""
"""Deletes rounds that are told from key frames, the oldest first."""
FRAMES = """DELETE FROM rounds WHERE base IS NULL AND at_s < ? AND number < (SELECT max(number) FROM rounds)
 AND NOT EXISTS (SELECT 1 FROM rounds AS told WHERE told.base = rounds.number)"""
"""Deletes key frames from which no round is told any more."""
SLOTTED = """DELETE FROM rounds WHERE base IS NULL AND at_s < ? AND number < (SELECT max(number) FROM rounds)
 AND NOT EXISTS (SELECT 1 FROM rounds AS told WHERE told.base = rounds.number)
 AND EXISTS (SELECT 1 FROM rounds AS other WHERE other.base IS NULL AND other.number < rounds.number
 AND CAST(other.at_s / ? AS INTEGER) = CAST(rounds.at_s / ? AS INTEGER))"""
"""The same of those that are not the first of their slot."""
COUNTED = re.compile(r"\d+ s\b")
"""A time in a reason, which goes on by itself."""


class _Written(NamedTuple):
    """A round as JSON, each part read again before anything of it is written."""

    snapshot: bytes
    before: bytes
    decision: bytes
    memory: bytes
    undo: bytes
    base: int | None
    """The key frame that it is told from; None: it is whole."""


class SqliteStore:
    """``policies.round.Store`` over one sqlite file in WAL mode; the only writer of that file.

    Methods raise ``sqlite3.Error`` when the disk fails; a round that cannot be written down does not act.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.put_aside: Path | None = None
        """New path of a predecessor that could not be used and was moved when this store was opened."""
        self._clock = clock
        self._link = self._open()
        self.max_bytes = inf
        """Size from which the oldest rounds are deleted."""
        self.fresh = False
        """True if nothing on record says what is ours to undo."""
        self._settings = self._last_id("settings")
        self._settings_text = ""
        self._memory = self._read_memory()
        self._checked: tuple[tuple[ClusterSnapshot, Decision, Memory], _Written] | None = None
        self._last_blocked: frozenset[tuple[bytes, str]] = frozenset()
        self._snapshot = self.last_snapshot()
        self._reasons: Mapping[JobKey, str] = {}
        self._frame: Frame | None = None
        """The last key frame of this process."""
        self._frame_s = -inf
        self._last: tuple[int, Memory, Decision] | None = None
        """The last round with its memory before and its decision, until it is a key frame or none is due."""
        self._accounting = JobAccounting(self._link, self._snapshot)

    def close(self) -> None:
        """Close the file; its write-ahead file is merged into it."""
        self._link.close()

    # --- policies.round.Store ------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Return the memory of the last recorded decision; an empty one in a fresh store."""
        return self._memory

    @property
    def news(self) -> News:
        """Findings of the last round."""
        return self._accounting.news

    def last_snapshot(self) -> ClusterSnapshot | None:
        """Return the snapshot of the last recorded round; None without one that can be read."""
        cursor = self._link.cursor()
        cursor.row_factory = sqlite3.Row
        row = cursor.execute("SELECT * FROM rounds ORDER BY number DESC LIMIT 1").fetchone()
        if row is None:
            return None
        whole = cursor.execute("SELECT * FROM rounds WHERE number = ?", (row["base"],)).fetchone()
        try:
            return round_deltas.read_round(row, Frame.of(whole) if row["base"] else None)[0]
        except record_codec.UNREADABLE as error:
            log.warning("%s: the last snapshot cannot be read (%s), going on without it", self.path, error)
            return None

    def adopt(self, memory: Memory) -> None:
        """Replace the memory before the next round, as recovery does for an empty store."""
        self._memory = memory

    def check(self, snapshot: ClusterSnapshot, decision: Decision, memory: Memory) -> None:
        """Raise an error of ``record_codec.UNREADABLE`` if a round cannot be written down and read again."""
        self._checked = (snapshot, decision, memory), self._written(snapshot, decision, memory)

    def _written(self, snapshot: ClusterSnapshot, decision: Decision, memory: Memory) -> _Written:
        memory_data, undo = record_codec.encode_memory(memory), record_codec.encode_undo(memory)
        record_codec.decode_undo(undo, record_codec.decode_memory(memory_data))
        frame = self._frame
        told = round_deltas.encode_snapshot(snapshot, frame) if frame is not None else None
        if frame is not None and told is not None:
            before = round_deltas.encode_memory(self._memory, memory)
            round_deltas.decode_memory(before, memory)
            decided = round_deltas.encode_decision(decision, memory, frame)
            return _Written(told, before, decided, memory_data, undo, frame.number)
        whole = self._whole(snapshot, self._memory, decision)
        record_codec.decode_snapshot(whole[0])
        record_codec.decode_memory(whole[1])
        record_codec.decode_decision(whole[2])
        return _Written(*whole, memory_data, undo, None)

    @staticmethod
    def _whole(snapshot: ClusterSnapshot, before: Memory, decision: Decision) -> tuple[bytes, bytes, bytes]:
        return (
            record_codec.encode_snapshot(snapshot),
            record_codec.encode_memory(before),
            record_codec.encode_decision(decision),
        )

    def begin(self, snapshot: ClusterSnapshot, decision: Decision, guarded: Sequence[Guarded], memory: Memory) -> int:
        """Verify earlier actions against ``snapshot``, then write this round down and return its number."""
        round_, checked, self._checked = (snapshot, decision, memory), self._checked, None
        fresh = checked is None or any(a is not b for a, b in zip(checked[0], round_, strict=True))
        written = self._written(*round_) if checked is None or fresh else checked[1]
        self._accounting.news = News()
        with self._transaction():
            # 1. Verdicts on earlier actions, and the settings of this round.
            self._verify(snapshot)
            last = self._link.execute("SELECT text FROM settings WHERE id = ?", (self._settings,)).fetchone()
            if self._settings_text and (last is None or last[0] != self._settings_text):
                query = "INSERT INTO settings (at_s, text) VALUES (?, ?)"
                self._settings = self._link.execute(query, (self._clock.now(), self._settings_text)).lastrowid
            # 2. The round itself, with all that a replay needs, and what is ours to undo.
            self._write_undo(written.undo)
            cursor = self._link.execute(
                "INSERT INTO rounds (at_s, settings, base, snapshot, before, decision, memory)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (snapshot.time_s, self._settings, written.base, *map(record_codec.pack, written[:4])),
            )
            number = int(cursor.lastrowid or 0)
            # 3. Its actions, and the reasons that are others than before.
            self._insert_actions(number, snapshot.time_s, guarded)
            self._link.executemany(
                "INSERT OR REPLACE INTO reasons (job, restart, at_s, round, reason) VALUES (?, ?, ?, ?, ?)",
                [
                    (key.id, key.restart, snapshot.time_s, number, text)
                    for key, text in decision.reasons.items()
                    if is_other(text, self._reasons.get(key))
                ],
            )
            # 4. The sums for reports.
            baseline = self._accounting.observe(snapshot, self._memory)
        if written.base is None:
            self._new_frame(number, snapshot, decision)
        self._last = number, self._memory, decision
        self._memory, self._snapshot, self._accounting.baseline = memory, snapshot, baseline
        self._reasons, self.fresh = decision.reasons, False
        self._read_back(written.undo)
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
        row, undo = record_codec.pack(record_codec.encode_memory(memory)), record_codec.encode_undo(memory)
        with self._transaction():
            self._write_undo(undo)
            self._link.execute("UPDATE rounds SET memory = ? WHERE number = ?", (row, number))
        self._memory = memory
        self._read_back(undo)

    def use_settings(self, text: str) -> None:
        """Write the settings down with the next round that is decided with them; a replay needs them."""
        self._settings_text = text

    def learned(self) -> dict[str, str]:
        """Return the beliefs learned from running jobs, as JSON by name, the latest last (see ``beliefs.Record``)."""
        return dict(self._link.execute("SELECT name, record FROM learned ORDER BY at_s, name").fetchall())

    def learn(self, rows: Mapping[str, str]) -> None:
        """Replace these beliefs; one that does not change for as long as rounds are kept is deleted."""
        now_s = self._clock.now()
        with self._transaction():
            self._link.executemany(
                "INSERT OR REPLACE INTO learned (name, at_s, record) VALUES (?, ?, ?)",
                [(name, now_s, text) for name, text in rows.items()],
            )

    def record(self, messages: Sequence[Switched | LeaseLog | Event]) -> int:
        """Write down the agents' messages; return how many could not be written, each because of its own content."""
        try:
            with self._transaction():
                for message in messages:
                    self._insert_message(message)
        except CONTENT_ERRORS:
            pass
        else:
            return 0
        refused = 0
        for message in messages:
            try:
                with self._transaction():
                    self._insert_message(message)
            except CONTENT_ERRORS:
                refused += 1
        return refused

    def tidy(self, before_s: float, kept_since_s: float) -> bool:
        """Do a small part of the upkeep between rounds; return whether there is more to do.

        Rounds become key frames, or are deleted by their age. Everything older than ``before_s`` is deleted except the
        last round, and the tables of reports from before ``kept_since_s``; more, the oldest first, where the file has
        its largest size.
        """
        began_s = self._clock.now()
        if self._last is not None and self._snapshot is not None and self._snapshot.time_s - self._frame_s >= FRAME_S:
            self._make_frame(*self._last, self._snapshot)
        before_s, kept_since_s = self._within_size(before_s, kept_since_s)
        for query, values in deletions(self._clock.now(), before_s, kept_since_s):
            deleted = CHUNK
            while deleted:
                if not 0 <= self._clock.now() - began_s < STEP_S:
                    return True
                with self._transaction():
                    deleted = self._link.execute(query, values).rowcount
        if self._link.execute("PRAGMA freelist_count").fetchone()[0] < PAGES:
            return False
        self._link.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
        return True

    def _make_frame(self, number: int, before: Memory, decision: Decision, snapshot: ClusterSnapshot) -> None:
        """Write the last round down as a whole."""
        whole = map(record_codec.pack, self._whole(snapshot, before, decision))
        with self._transaction():
            query = "UPDATE rounds SET base = NULL, snapshot = ?, before = ?, decision = ? WHERE number = ?"
            self._link.execute(query, (*whole, number))
        self._new_frame(number, snapshot, decision)

    def _new_frame(self, number: int, snapshot: ClusterSnapshot, decision: Decision) -> None:
        self._frame, self._frame_s = Frame(number, snapshot, decision.reasons), snapshot.time_s

    def _within_size(self, before_s: float, kept_since_s: float) -> tuple[float, float]:
        """Return the ages from which on rows are kept, a twentieth later than the oldest if the file is too large."""
        pages, free, size = (
            self._link.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        if (pages - free) * size <= self.max_bytes:
            return before_s, kept_since_s
        now_s = self._clock.now()
        oldest_s, last_s, hour = self._link.execute(
            "SELECT min(at_s), max(at_s), (SELECT min(hour) FROM hours) FROM rounds"
        ).fetchone()
        cut_s = oldest_s + (last_s - oldest_s) / 20 if oldest_s is not None else -inf
        if hour is not None and now_s - cut_s < DAY_S:  # it is the sums that are so large
            kept_since_s = max(kept_since_s, 3600.0 * hour + (now_s - 3600.0 * hour) / 20)
        return max(before_s, cut_s), kept_since_s

    # --- inside ----------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        """Open the store; one that cannot be used is put aside, and its record of what is ours taken over."""
        try:
            return schema.open_writable(self.path)
        except (sqlite3.DatabaseError, schema.OtherVersionError) as error:
            undo = None
            with suppress(StoreError):
                undo = record_codec.encode_undo(schema.read_undo(self.path))
            self.put_aside = schema.put_aside(self.path, self._clock.now())
            log.warning("%s cannot be used (%s); kept as %s, starting afresh", self.path, error, self.put_aside)
            self._link = schema.open_writable(self.path)
            if undo is not None:
                self._write_undo(undo)
            return self._link

    def _insert_message(self, message: Switched | LeaseLog | Event) -> None:
        row = {name: getattr(message, name) for name in message.__struct_fields__ if name != "v"}
        table = "switches" if isinstance(message, Switched) else "events"
        if isinstance(message, LeaseLog):
            table, row["gpus"] = "leases", json.dumps(message.gpus)
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        query = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 (names are ours)
        self._link.execute(query, tuple(row.values()))
        if isinstance(message, Switched) and message.kind == "yield":
            self._accounting.yielded(message)

    def _write_undo(self, record: bytes) -> None:
        self._link.execute("INSERT OR REPLACE INTO undo VALUES (0, ?, ?)", (self._clock.now(), record))

    def _read_back(self, record: bytes) -> None:
        row = self._link.execute("SELECT record FROM undo").fetchone()
        if row is None or row[0] != record:
            raise StoreError(f"{self.path}: the record of our holds and suspends does not read back as it was written")

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
        """Return the memory; what is ours to undo has a record of its own, the rest may be lost."""
        memory = None
        row = self._link.execute("SELECT memory FROM rounds ORDER BY number DESC LIMIT 1").fetchone()
        try:
            memory = record_codec.decode_memory(record_codec.unpack(row[0])) if row is not None else None
        except record_codec.UNREADABLE as error:
            log.warning("%s: the last memory cannot be read (%s), going on without it", self.path, error)
        try:
            memory = schema.undo_record(self._link, memory or Memory())
        except record_codec.UNREADABLE as error:
            self.fresh, memory = memory is None, memory or Memory()
            if row is not None:
                log.warning("%s: the record of our holds and suspends cannot be read (%s)", self.path, error)
        # A release that was interrupted is repeated: twice does no harm, never would.
        open_rows = self._link.execute(
            "SELECT job, restart FROM actions WHERE allowed = 1 AND ok IS NULL AND kind IN ('Place', 'Release')"
        )
        unsure = {JobKey(*row) for row in open_rows.fetchall()}
        return replace(memory, placed=memory.placed - unsure)

    def _verify(self, snapshot: ClusterSnapshot) -> None:
        rows = self._link.execute("SELECT id, at_s, kind, action FROM actions WHERE ok = 1 AND verified IS NULL")
        for identity, at_s, kind, text in rows.fetchall():
            try:
                verified = verdict(record_codec.decode_action(text.encode()), snapshot, at_s)
            except record_codec.UNREADABLE:
                verified = "gone"
            if verified is not None:
                self.news.verdicts.append((kind, verified))
                self._link.execute(
                    "UPDATE actions SET verified = ?, verified_s = ? WHERE id = ?",
                    (verified, snapshot.time_s, identity),
                )

    def _insert_actions(self, number: int, at_s: float, guarded: Sequence[Guarded]) -> None:
        # The same actions are kept in each round, by observe-only or the rate: one row for the first time is enough.
        blocked = set()
        key: tuple[int, int] | tuple[None, None]
        for item in guarded:
            action, kind = item.action, type(item.action).__name__
            key, node = (None, None), None
            if isinstance(action, NodeAction):
                node = action.node
            else:
                key = action.job
            if not item.allowed:
                same = (kind, *key, node, item.reason.partition(":")[0])
                blocked.add(same)
                if same in self._last_blocked:
                    continue
            text = record_codec.encode_action(action).decode()
            row = (number, at_s, kind, *key, node, action.reason, text, item.allowed, item.reason)
            query = f"INSERT INTO actions ({ACTION_COLUMNS}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608
            self._link.execute(query, row)
        self._last_blocked = frozenset(blocked)


def is_other(reason: str, before: str | None) -> bool:
    """Return True if a reason says more than that time has gone on."""
    return reason != before and (before is None or COUNTED.sub("", reason) != COUNTED.sub("", before))


def deletions(now_s: float, before_s: float, kept_since_s: float) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield statements that each delete some rows that are too old, with their values.

    Rows come in the order of time, so that each looks at the oldest only.
    """
    yield TOLD, (max(now_s - TOLD_S, before_s),)
    yield SLOTTED, (now_s - DAY_S, SLOT_S, SLOT_S)
    yield FRAMES, (before_s,)
    for table, (key, column) in schema.TIMED.items():
        oldest = f"SELECT {key} FROM {table} ORDER BY {key} LIMIT {CHUNK}"  # noqa: S608 (names are ours)
        yield f"DELETE FROM {table} WHERE {key} IN ({oldest}) AND {column} < ?", (before_s,)  # noqa: S608
    yield "DELETE FROM learned WHERE at_s < ?", (before_s,)
    for table, (key, condition) in schema.KEPT.items():
        some = f"SELECT {key} FROM {table} WHERE {condition} LIMIT {CHUNK}"  # noqa: S608 (names are ours)
        yield f"DELETE FROM {table} WHERE ({key}) IN ({some})", (kept_since_s,)  # noqa: S608
