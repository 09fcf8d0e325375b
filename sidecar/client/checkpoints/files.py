"""Files that survive a crash, and whose damage shows in their size and CRC-32; stdlib only."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.errors import SaveError

PIECE_BYTES = 1 << 20
"""Bytes that are read at once; for smaller writes another thread would cost more than it saves."""
POLYNOMIAL = 0xEDB88320
"""Polynomial of the CRC-32 of IEEE 802.3, lowest bit first: bit 31 - k stands for x**k."""


@dataclass(frozen=True)
class Entry:
    """Size in bytes and CRC-32 of an intact file (the CRC-32 of zlib and IEEE 802.3)."""

    nbytes: int
    crc32: int


class Sink:
    """A new file with a checksum of the bytes written; ``torch.save`` can write to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._crc32 = self._nbytes = 0
        self._summing = ThreadPoolExecutor(1, "cadenza-crc32")
        self.error: OSError | None = None
        """The first error; torch.save raises another one in its place."""

    def write(self, data: Any) -> int:
        """Write all of the bytes, or raise OSError."""
        view = memoryview(data).cast("B")
        try:
            if view.nbytes < PIECE_BYTES:
                self._sum(view)
                self._put(view)
            else:  # sum in another thread: neither holds the interpreter's lock during its work
                summed = self._summing.submit(self._sum, view)
                try:
                    self._put(view)
                finally:
                    summed.result()  # the caller may change the bytes after this
        except OSError as error:
            self.error = self.error or error
            raise
        return view.nbytes

    def _sum(self, view: memoryview) -> None:
        self._crc32 = zlib.crc32(view, self._crc32)

    def _put(self, view: memoryview) -> None:
        """Write all; a disk that is nearly full takes a part before it refuses the rest."""
        done = 0
        while done < view.nbytes:
            done += self._file.write(view[done:])
        self._nbytes += done

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""

    def finish(self) -> Entry:
        """Sync the file to the disk and return its entry."""
        os.fsync(self._file.fileno())
        return Entry(self._nbytes, self._crc32)

    def close(self) -> None:
        """Close the file."""
        self._summing.shutdown()
        self._file.close()


def write_new(path: Path, fill: Callable[[Sink], object]) -> Entry:
    """Write a new file and sync it to the disk; raise SaveError with its path and the cause when that fails."""
    sink: Sink | None = None
    try:
        sink = Sink(path)
        fill(sink)
        return sink.finish()
    except Exception as error:
        cause = (sink and sink.error) or error
        if isinstance(cause, OSError):
            raise SaveError(f"{path}: {cause.strerror or cause}") from error
        raise
    finally:
        if sink is not None:
            sink.close()


def entry_of(path: Path) -> Entry:
    """Read a file and return its entry; raise OSError."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "cadenza-crc32") as executor:
        size = os.fstat(file.fileno()).st_size
        middle = size // 2
        second = executor.submit(_part, file.fileno(), middle, size)
        return joined(_part(file.fileno(), 0, middle), second.result())


def _part(file: int, start: int, end: int) -> Entry:
    """Read a part of a file; reading and summing do not hold the interpreter's lock."""
    crc32, position = 0, start
    piece = memoryview(bytearray(min(PIECE_BYTES, end - start)))
    while count := os.preadv(file, [piece[: end - position]], position):
        crc32 = zlib.crc32(piece[:count], crc32)
        position += count
    return Entry(position - start, crc32)


def joined(first: Entry, second: Entry) -> Entry:
    """Return the entry of two adjacent parts: CRC(A B) = CRC(A) x**(8 |B|) + CRC(B), as in zlib's crc32_combine."""
    power, square, left = 1 << 31, 1 << 23, second.nbytes
    while left:
        power = _product(power, square) if left & 1 else power
        square, left = _product(square, square), left >> 1
    return Entry(first.nbytes + second.nbytes, _product(power, first.crc32) ^ second.crc32)


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo POLYNOMIAL."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= other if one >> bit & 1 else 0
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return product


def damage(path: Path, expected: Entry) -> str | None:
    """Return a description of a file's damage, None when it is intact."""
    try:
        size = path.stat().st_size
        if size != expected.nbytes:
            return f"{path.name} has {size} bytes instead of {expected.nbytes}"
        entry = entry_of(path)
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    if entry != expected:
        return f"{path.name} has CRC-32 {entry.crc32:08x} instead of {expected.crc32:08x}"
    return None


def sync_directory(path: Path) -> None:
    """Sync a directory's names to the disk; a file's own fsync does not (fsync(2), "Notes")."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
