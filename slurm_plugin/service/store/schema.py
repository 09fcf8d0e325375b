"""The tables of the store; opening, checking and, if it is corrupt, putting aside its file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cadenza.policies.core.decision import Memory
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.service.store.record_codec import UNREADABLE, decode_undo

VERSION = 5
MODE = 0o640
"""The record names jobs, users and commands: the service's user and its group read it."""

UNDO = """\
CREATE TABLE IF NOT EXISTS undo (only INTEGER PRIMARY KEY CHECK (only = 0), at_s REAL NOT NULL, record BLOB NOT NULL)"""
"""One row, which is all that must survive a crash; the other tables may be lost. It is the same in every version."""
TABLES = """\
CREATE TABLE settings (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, text TEXT NOT NULL);
CREATE TABLE rounds (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, settings INTEGER,
    base INTEGER /* key frame from which it is told; NULL: it is whole */,
    snapshot BLOB NOT NULL, before BLOB NOT NULL, decision BLOB NOT NULL, memory BLOB NOT NULL,
    seconds REAL);
CREATE INDEX rounds_base ON rounds (base, number);
CREATE TABLE actions (
    id INTEGER PRIMARY KEY, round INTEGER NOT NULL, at_s REAL NOT NULL, kind TEXT NOT NULL,
    job INTEGER, restart INTEGER, node TEXT, reason TEXT NOT NULL, action TEXT NOT NULL,
    allowed INTEGER NOT NULL, rule TEXT NOT NULL, ok INTEGER, error TEXT NOT NULL DEFAULT '',
    verified TEXT, verified_s REAL);
CREATE INDEX actions_job ON actions (job, id);
CREATE INDEX actions_open ON actions (id) WHERE ok = 1 AND verified IS NULL;
CREATE TABLE reasons (
    job INTEGER NOT NULL, restart INTEGER NOT NULL, at_s REAL NOT NULL, round INTEGER NOT NULL,
    reason TEXT NOT NULL, PRIMARY KEY (job, restart));
CREATE TABLE switches (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, host TEXT NOT NULL, job INTEGER NOT NULL,
    restart INTEGER NOT NULL, kind TEXT NOT NULL, boundary_s REAL NOT NULL, copy_s REAL NOT NULL,
    total_s REAL NOT NULL, bytes INTEGER NOT NULL, iteration_p99_s REAL, note TEXT NOT NULL);
CREATE INDEX switches_job ON switches (job, id);
CREATE TABLE leases (
    id INTEGER PRIMARY KEY, host TEXT NOT NULL, job INTEGER NOT NULL, restart INTEGER NOT NULL,
    gpus TEXT NOT NULL /* JSON list */, from_s REAL NOT NULL, to_s REAL NOT NULL);
CREATE INDEX leases_job ON leases (job, id);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, host TEXT NOT NULL,
    job INTEGER, restart INTEGER, detail TEXT NOT NULL);
CREATE TABLE watched (hour INTEGER PRIMARY KEY, seconds REAL NOT NULL, idle_gpu_s REAL NOT NULL);
CREATE TABLE first_starts (
    job INTEGER PRIMARY KEY, user TEXT NOT NULL, at_s REAL NOT NULL, gpus INTEGER NOT NULL, wait_s REAL NOT NULL,
    ended_s REAL, slowdown REAL, account TEXT NOT NULL, qos TEXT NOT NULL, partition TEXT NOT NULL,
    gpu_type TEXT NOT NULL, managed INTEGER NOT NULL, limit_s REAL, waited_s REAL, held_s REAL);
CREATE TABLE hours (
    hour INTEGER NOT NULL, job INTEGER NOT NULL, restart INTEGER NOT NULL, user TEXT NOT NULL,
    managed INTEGER NOT NULL, gpu_s REAL NOT NULL DEFAULT 0, further_gpu_s REAL NOT NULL DEFAULT 0,
    queue_s REAL NOT NULL DEFAULT 0, turn_s REAL NOT NULL DEFAULT 0, yields INTEGER NOT NULL DEFAULT 0,
    held_s REAL NOT NULL DEFAULT 0, PRIMARY KEY (job, restart, hour)) WITHOUT ROWID;
CREATE INDEX hours_hour ON hours (hour);
CREATE TABLE starts (
    job INTEGER PRIMARY KEY, user TEXT NOT NULL, at_s REAL NOT NULL, submit_s REAL NOT NULL,
    partition TEXT NOT NULL, gpus INTEGER NOT NULL, num_nodes INTEGER NOT NULL, free_s REAL,
    delay_s REAL NOT NULL);
CREATE TABLE effects (
    decision INTEGER NOT NULL, kind TEXT NOT NULL, job INTEGER NOT NULL, restart INTEGER NOT NULL,
    user TEXT NOT NULL, at_s REAL NOT NULL, reason TEXT NOT NULL, was TEXT NOT NULL, now TEXT NOT NULL,
    predicted REAL, before_s REAL, after_s REAL, gain REAL, verdict TEXT NOT NULL, detail TEXT NOT NULL,
    ended_s REAL, mark_step INTEGER, mark_held_s REAL NOT NULL, PRIMARY KEY (decision, job)) WITHOUT ROWID;
CREATE INDEX effects_job ON effects (job, at_s);
CREATE INDEX effects_open ON effects (decision) WHERE ended_s IS NULL;
CREATE TABLE learned (name TEXT PRIMARY KEY, at_s REAL NOT NULL, record TEXT NOT NULL) WITHOUT ROWID;
"""
"""All tables. ``cadenza report --since`` reads ``watched`` to ``effects``. They are small enough to be kept when
the rounds are gone, and their hours count from the epoch. ``learned`` holds beliefs about profiles."""

TIMED = {
    "actions": ("id", "at_s"),
    "reasons": ("rowid", "at_s"),
    "switches": ("id", "at_s"),
    "leases": ("id", "to_s"),
    "events": ("id", "at_s"),
}
"""Tables whose rows come in the order of time: their key, and the column with the age of a row."""

KEPT = {
    "watched": ("hour", "hour < ? / 3600.0"),
    "hours": ("job, restart, hour", "hour < ? / 3600.0"),
    "first_starts": ("job", "at_s < ?"),
    "starts": ("job", "at_s < ?"),
    "effects": ("decision, job", "at_s < ?"),
}
"""Tables for reports, which are kept longer: their key, and the condition for deleting rows."""


class NoRecordError(LookupError):
    """No round is on record yet."""


class OtherVersionError(StoreError):
    """The store is sound, and another version of Cadenza wrote it."""


def open_writable(path: Path) -> sqlite3.Connection:
    """Open or create the store for its only writer.

    Raise StoreError when the file cannot be opened or belongs to another version, and
    ``sqlite3.DatabaseError`` when its content is no longer a sound database.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE))
        path.chmod(MODE)  # before sqlite makes its companions with the same rights
        link = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
        with _closed_on_error(link):
            _prepare(link, path)
    except sqlite3.OperationalError as error:
        raise StoreError(f"{path}: {error}; check its directory, owner and free space") from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; check its directory and owner") from None
    return link


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open the store for reading, also while the service writes; raise StoreError when that is impossible.

    Without a write-ahead file there is no writer, and sqlite may not create such a file in a directory that is
    not ours: the file is opened as immutable.
    """
    try:
        link = _connect_readonly(path)
        with _closed_on_error(link):
            _check_version(link, path)
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path}: {error}; may this user read it?") from None
    return link


def read_undo(path: Path) -> Memory:
    """Return our holds, suspends, drains and SiteFactors from a store of any version.

    Raise StoreError if they cannot be read.
    """
    try:
        try:
            with closing(_connect_readonly(path)) as link:
                return undo_record(link, Memory())
        except sqlite3.OperationalError:  # as on a full disk, where sqlite cannot make the file that readers share
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=5.0)) as link:
                link.execute("PRAGMA locking_mode=EXCLUSIVE")
                return undo_record(link, Memory())
    except NoRecordError:
        return Memory()
    except (sqlite3.DatabaseError, *UNREADABLE) as error:
        raise StoreError(f"{path}: no record of our holds and suspends can be read ({error})") from None


def undo_record(link: sqlite3.Connection, rest: Memory) -> Memory:
    """Return ``rest`` with the holds, suspends and drains on record.

    Raise NoRecordError before the first round, and an error of sqlite or of ``UNREADABLE`` if the row cannot be read.
    """
    row = link.execute("SELECT record FROM undo").fetchone()
    if row is None:
        raise NoRecordError("no round is on record")
    return decode_undo(row[0], rest)


@contextmanager
def _closed_on_error(link: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        link.close()  # an open connection keeps its locks
        raise


def _connect_readonly(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise StoreError(f"{path}: no store there: run this on the machine of cadenzad, once that has started")
    still = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{still}", uri=True, timeout=5.0)


def put_aside(path: Path, now_s: float) -> Path:
    """Rename a store that cannot be used, and its companions, so that nothing is lost; return the new name."""
    aside = path.with_name(f"{path.name}.aside-{int(now_s)}")
    for suffix in ("", "-wal", "-shm"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(aside.with_name(aside.name + suffix))
    return aside


def _prepare(link: sqlite3.Connection, path: Path) -> None:
    link.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file: what is deleted leaves it
    link.execute("PRAGMA journal_mode=WAL")
    link.execute("PRAGMA synchronous=FULL")  # a round must survive power loss before its actions leave
    if link.execute("PRAGMA user_version").fetchone()[0] == 0:
        link.executescript(f"BEGIN; {TABLES} PRAGMA user_version={VERSION}; COMMIT;")
    _check_version(link, path)
    link.execute(UNDO)
    verdict = link.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


def _check_version(link: sqlite3.Connection, path: Path) -> None:
    version = link.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION:
        raise OtherVersionError(f"{path}: store version {version}, this Cadenza reads {VERSION}; name another file")
