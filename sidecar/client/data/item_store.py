"""Items of a dataset in two shared files: an index, and the items one after the other; nothing is evicted.

``items`` holds records of a head (magic, CRC-32 of the rest of the head and of the payload, item, payload's length)
and the payload. Records are only ever added at the end, and the last ones go first when the budget is lowered, so
that the file is as long as what it holds and its length is exact. ``index`` holds a header of 8-byte words and two
words an item, offset plus one and length of its record, 0 while it has none. Writers hold the index's lock; readers
do not, and take a record only if its head and checksum are right.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cadenza.sidecar.client.data.errors import DataUsageError
from cadenza.sidecar.client.data.shm_dirs import locked

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = 0x43414431  # "CAD1"
HEAD = struct.Struct("=IIQQ")
TAIL = struct.Struct("=QQ")
"""The checksummed part of the head: item and length."""
LAYOUT = 1
WORD = 8
VERSION, LENGTH, KIND, BUDGET, USED, ITEMS, HITS, MISSES, UNFIT, FULL = range(10)
"""Words of the index's header. KIND is a checksum of what the dataset is called; FULL is 1 after memory ran short."""
STATS = (LENGTH, ITEMS, USED, BUDGET, HITS, MISSES, UNFIT, FULL)
HEADER_WORDS = 32
MAX_RECORD = 2**31 - 4096
"""The most bytes that one call of Linux reads or writes, read(2); a larger item is not admitted."""
NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Stats:
    """What a cache holds and did, of all its processes together; sizes in bytes.

    ``unfit`` counts reads of items that the format cannot hold, which are misses too; ``short`` says that memory ran
    short and that nothing more is admitted until the budget changes.
    """

    length: int
    items: int
    used: int
    budget: int
    hits: int
    misses: int
    unfit: int
    short: bool

    @property
    def hit_rate(self) -> float:
        """Reads that were answered from the cache over all reads; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def since(self, earlier: Stats) -> Stats:
        """Return the same with the reads counted from an earlier look on: ``hit_rate`` is then of these alone."""
        return Stats(
            self.length,
            self.items,
            self.used,
            self.budget,
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.unfit - earlier.unfit,
            self.short,
        )


def create(path: Path, length: int, kind: int, budget: int) -> None:
    """Make the two files, empty, in place of any that are there."""
    for name in ("index", "items"):
        (path / name).unlink(missing_ok=True)
        os.close(os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    head = [0] * HEADER_WORDS
    head[VERSION], head[LENGTH], head[KIND], head[BUDGET] = LAYOUT, length, kind, budget
    with (path / "index").open("r+b") as index:
        index.write(struct.pack(f"={HEADER_WORDS}Q", *head))
        index.truncate(WORD * (HEADER_WORDS + 2 * length))


class Store:
    """One process's view of the files; after a fork the child opens its own. Raises OSError when they are gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = -1
        self._guard = threading.Lock()
        self._index = self._items = -1
        self._words = memoryview(b"")

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return Store, (self.path,)

    def open(self) -> None:
        """Open the files for this process, unless it has."""
        if self._pid == os.getpid():
            return
        self.close()
        self._guard = threading.Lock()  # another thread may have held it when this process was forked
        self._index = os.open(self.path / "index", os.O_RDWR | os.O_CLOEXEC)
        self._items = os.open(self.path / "items", os.O_RDWR | os.O_CLOEXEC)
        self._words = memoryview(mmap.mmap(self._index, 0)).cast("Q")
        self._pid = os.getpid()

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in (self._index, self._items):
            if descriptor >= 0:
                os.close(descriptor)
        self._index = self._items = self._pid = -1
        self._words = memoryview(b"")

    def check(self, length: int, kind: int, name: str) -> None:
        """Raise DataUsageError unless the files are of this layout and of such a dataset."""
        self.open()
        words = self._words
        if [words[VERSION], words[LENGTH], words[KIND]] != [LAYOUT, length, kind]:
            raise DataUsageError(
                f"{self.path} caches another dataset ({words[LENGTH]} items) than {name} ({length} items): give each"
                " dataset of a job its own name"
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[memoryview]:
        """Hold the lock and have the words: of this process's threads, and then of all processes, one."""
        self.open()
        with self._guard, locked(self._index):
            yield self._words

    # --- reading -------------------------------------------------------------------------------------------

    def read(self, item: int) -> memoryview | None:
        """Return an item's payload in memory of its own; None when it is not there, or not as it was written."""
        self.open()
        at = HEADER_WORDS + 2 * item
        start, length = self._words[at], self._words[at + 1]
        if not start:
            return None
        record = bytearray(length if HEAD.size <= length <= self._words[BUDGET] else HEAD.size)
        try:
            filled = os.preadv(self._items, [record], start - 1)
        except (OSError, OverflowError):
            filled = -1
        if filled == length and _intact(record, item):
            return memoryview(record)[HEAD.size :]
        self._drop(item, start)
        return None

    # --- writing -------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that may still be added: a look without the lock, to spare the work of offering in vain."""
        self.open()
        words = self._words
        return 0 if words[FULL] else max(0, words[BUDGET] - words[USED] - HEAD.size)

    def offer(self, item: int, payload: Sequence[Buffer]) -> bool:
        """Add an item if it is not there, fits into the budget, and memory allows it; whether it was added."""
        length = HEAD.size + sum(len(part) for part in payload)
        if length > min(self.room + HEAD.size, MAX_RECORD):
            return False
        record = _record(item, b"".join(payload))
        with self._alone() as words:
            used, at = words[USED], HEADER_WORDS + 2 * item
            if words[at] or words[FULL] or used + length > words[BUDGET]:
                return False
            if not self._append(record, used):
                words[FULL] = 1
                return False
            # In this order: a process killed in between leaves bytes that are counted, and no entry without bytes.
            words[USED] = used + length
            words[at + 1] = length
            words[at] = used + 1
            words[ITEMS] += 1
        return True

    def _append(self, record: bytes, offset: int) -> bool:
        """Write a record at the end; False, and the file as before, when memory is short."""
        os.ftruncate(self._items, offset)  # what a writer killed before it counted has left
        try:
            os.posix_fallocate(self._items, offset, len(record))  # all or nothing, before anything is written
            written = os.pwrite(self._items, record, offset)
        except OSError as error:
            os.ftruncate(self._items, offset)
            if error.errno not in NO_ROOM:
                raise
            return False
        return written == len(record)

    def resize(self, budget: int) -> None:
        """Change the budget, for all processes; what was added last is dropped until the rest fits."""
        with self._alone() as words:
            words[BUDGET], words[FULL] = budget, 0
            if words[USED] <= budget:
                return
            entries = words[HEADER_WORDS:]
            end = kept = 0
            for at in range(0, len(entries), 2):
                stop = entries[at] - 1 + entries[at + 1] if entries[at] else 0
                if stop > budget:
                    entries[at] = 0
                elif stop:
                    end, kept = max(end, stop), kept + 1
            os.ftruncate(self._items, end)
            words[USED], words[ITEMS] = end, kept

    def _drop(self, item: int, start: int) -> None:
        """Forget an entry that leads to nothing good; its bytes stay counted until the budget is lowered."""
        with self._alone() as words:
            at = HEADER_WORDS + 2 * item
            if words[at] == start:
                words[at] = 0
                words[ITEMS] -= 1

    def count(self, hits: int, misses: int, unfit: int = 0) -> None:
        """Add to what all processes have counted."""
        with self._alone() as words:
            words[HITS] += hits
            words[MISSES] += misses
            words[UNFIT] += unfit

    def stats(self) -> Stats:
        """Return all counts, of one moment."""
        with self._alone() as words:
            length, items, used, budget, hits, misses, unfit, full = (words[at] for at in STATS)
        return Stats(length, items, used, budget, hits, misses, unfit, bool(full))


def _record(item: int, payload: bytes) -> bytes:
    """Return a record: the head and the payload."""
    check = zlib.crc32(payload, zlib.crc32(TAIL.pack(item, len(payload))))
    return HEAD.pack(MAGIC, check, item, len(payload)) + payload


def _intact(record: bytearray, item: int) -> bool:
    """Whether a record is this item's, whole and unchanged."""
    check: int
    magic, check, owner, length = HEAD.unpack_from(record)
    if (magic, owner, length) != (MAGIC, item, len(record) - HEAD.size):
        return False
    return zlib.crc32(memoryview(record)[HEAD.size - TAIL.size :]) == check
