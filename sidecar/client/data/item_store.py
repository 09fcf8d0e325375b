"""Items of a dataset in two shared files: an index, and the items in a row; nothing is evicted.

``items`` holds records of a head (magic, CRC-32 of the rest of the head and of the payload, item, payload's length)
and the payload. Records are only added at the end, and the last ones go first when the budget is lowered, so the
file has no holes and its length is exact. ``index`` holds a header of 8-byte words and two words per item: offset
plus one, and length, of its record; 0 while it has none. Writers hold the index's lock. Readers do not, and accept a
record only if its head and checksum are right.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Union

from cadenza.sidecar.client.data.shm_dirs import locked
from cadenza.sidecar.client.errors import DataUsageError

Buffer = Union[bytes, bytearray, memoryview]

MAGIC = 0x43414431  # "CAD1"
HEAD = struct.Struct("=IIQQ")
TAIL = struct.Struct("=QQ")
"""The checksummed part of the head: item and length."""
LAYOUT = 1
WORD = 8
VERSION, LENGTH, KIND, BUDGET, USED, ITEMS, HITS, MISSES, UNFIT, FULL = range(10)
"""Words of the index's header. KIND is a checksum of the dataset's class name; FULL is 1 after memory ran short."""
STATS = (LENGTH, ITEMS, USED, BUDGET, HITS, MISSES, UNFIT, FULL)
HEADER_WORDS = 32
MAX_RECORD = 2**31 - 4096
"""Most bytes that one call of Linux reads or writes, read(2); a larger item is not admitted."""
OUT_OF_SPACE = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Stats:
    """Contents and hits of a cache, of all its processes together; sizes in bytes.

    ``unfit`` counts reads of items that the format cannot store, which are misses too; ``short`` is true after memory
    ran short: nothing more is admitted until the budget changes.
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
        """Share of all reads answered from the cache; 0 before the first read."""
        return self.hits / max(1, self.hits + self.misses)

    def since(self, earlier: Stats) -> Stats:
        """Return these statistics with only the reads after ``earlier``, so that ``hit_rate`` covers only them."""
        hits, misses, unfit = self.hits - earlier.hits, self.misses - earlier.misses, self.unfit - earlier.unfit
        return replace(self, hits=hits, misses=misses, unfit=unfit)


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
        """Close the files."""
        for descriptor in (self._index, self._items):
            if descriptor >= 0:
                os.close(descriptor)
        self._index = self._items = self._pid = -1
        self._words = memoryview(b"")

    def check(self, length: int, kind: int, name: str) -> None:
        """Raise DataUsageError unless the files have this layout and cache this dataset."""
        self.open()
        words = self._words
        if [words[VERSION], words[LENGTH], words[KIND]] != [LAYOUT, length, kind]:
            raise DataUsageError(
                f"{self.path} caches another dataset ({words[LENGTH]} items) than {name} ({length} items): give each"
                " dataset of a job its own name"
            )

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[memoryview]:
        """Yield the words under the lock, which one thread of one process holds at a time."""
        self.open()
        with self._guard, locked(self._index):
            yield self._words

    # --- reading -------------------------------------------------------------------------------------------

    def read(self, item: int) -> memoryview | None:
        """Return an item's payload in new memory; None when it is absent or damaged."""
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
        if filled == length:
            magic, check, owner, size = HEAD.unpack_from(record)
            whole = (magic, owner, size) == (MAGIC, item, length - HEAD.size)
            if whole and zlib.crc32(memoryview(record)[HEAD.size - TAIL.size :]) == check:
                return memoryview(record)[HEAD.size :]
        # Remove the entry of a damaged record; its bytes stay counted until the budget is lowered.
        with self._exclusive() as words:
            if words[at] == start:
                words[at] = 0
                words[ITEMS] -= 1
        return None

    # --- writing -------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that may still be added; read without the lock, to avoid offers that will be refused."""
        self.open()
        words = self._words
        return 0 if words[FULL] else max(0, words[BUDGET] - words[USED] - HEAD.size)

    def offer(self, item: int, payload: Sequence[Buffer]) -> bool:
        """Add an item if it is new, fits into the budget and memory allows it; return whether it was added."""
        length = HEAD.size + sum(len(part) for part in payload)
        if length > min(self.room + HEAD.size, MAX_RECORD):
            return False
        body = b"".join(payload)
        check = zlib.crc32(body, zlib.crc32(TAIL.pack(item, len(body))))
        record = HEAD.pack(MAGIC, check, item, len(body)) + body
        with self._exclusive() as words:
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
        """Write a record at the end; return False, with the file unchanged, when memory is short."""
        os.ftruncate(self._items, offset)  # left by a writer that was killed before it counted
        try:
            os.posix_fallocate(self._items, offset, len(record))  # all or nothing, before anything is written
            written = os.pwrite(self._items, record, offset)
        except OSError as error:
            os.ftruncate(self._items, offset)
            if error.errno not in OUT_OF_SPACE:
                raise
            return False
        return written == len(record)

    def resize(self, budget: int) -> None:
        """Change the budget, for all processes; the items added last are dropped until the rest fits."""
        with self._exclusive() as words:
            words[BUDGET], words[FULL] = budget, 0
            if words[USED] <= budget:
                return
            entries = words[HEADER_WORDS:]
            end = count = 0
            for at in range(0, len(entries), 2):
                stop = entries[at] - 1 + entries[at + 1] if entries[at] else 0
                if stop > budget:
                    entries[at] = 0
                elif stop:
                    end, count = max(end, stop), count + 1
            os.ftruncate(self._items, end)
            words[USED], words[ITEMS] = end, count

    def count(self, hits: int, misses: int, unfit: int = 0) -> None:
        """Add to the counts of all processes."""
        with self._exclusive() as words:
            words[HITS] += hits
            words[MISSES] += misses
            words[UNFIT] += unfit

    def stats(self) -> Stats:
        """Return all counts, of one moment."""
        with self._exclusive() as words:
            length, items, used, budget, hits, misses, unfit, full = (words[at] for at in STATS)
        return Stats(length, items, used, budget, hits, misses, unfit, bool(full))
