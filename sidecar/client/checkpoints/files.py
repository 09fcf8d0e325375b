"""Writes files so that they survive a crash, and tells a damaged one by its size and CRC-32; stdlib only."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.checkpoints.errors import SaveError

PIECE = 1 << 20
"""Bytes that are summed and written in turn: they stay in the processor's cache in between."""


@dataclass(frozen=True)
class Entry:
    """What a file must be to be intact: its size in bytes and its CRC-32 (that of zlib and IEEE 802.3)."""

    nbytes: int
    crc32: int


class Sink:
    """A new file that sums what is written to it; ``torch.save`` takes it for a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._crc32 = self._nbytes = 0
        self.error: OSError | None = None
        """What went wrong first; torch.save raises something else in its place."""

    def write(self, data: Any) -> int:
        """Write all of the bytes, or raise OSError."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, view.nbytes, PIECE):
                self._put(view[start : start + PIECE])
        except OSError as error:
            self.error = self.error or error
            raise
        return view.nbytes

    def _put(self, piece: memoryview) -> None:
        """Write one piece; a disk that is nearly full takes a part of it before it refuses the rest."""
        self._crc32 = zlib.crc32(piece, self._crc32)
        done = 0
        while done < piece.nbytes:
            done += self._file.write(piece[done:])
        self._nbytes += done

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""

    def finish(self) -> Entry:
        """Bring the file to the disk."""
        os.fsync(self._file.fileno())
        return Entry(self._nbytes, self._crc32)

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()


def write_new(path: Path, fill: Callable[[Sink], object]) -> Entry:
    """Write a new file and bring it to the disk; raise SaveError, naming it and the cause, when that fails."""
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
    """Read a file and return what it is; raise OSError."""
    crc32 = nbytes = 0
    piece = memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc32 = zlib.crc32(piece[:count], crc32)
            nbytes += count
    return Entry(nbytes, crc32)


def what_is_wrong(path: Path, expected: Entry) -> str:
    """Return what is wrong with a file, or an empty text when it is intact."""
    try:
        size = path.stat().st_size
        if size != expected.nbytes:
            return f"{path.name} has {size} bytes instead of {expected.nbytes}"
        found = entry_of(path)
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    if found != expected:
        return f"{path.name} has CRC-32 {found.crc32:08x} instead of {expected.crc32:08x}"
    return ""


def sync_directory(path: Path) -> None:
    """Bring a directory's names to the disk: a file's own fsync does not (fsync(2), "Notes")."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
