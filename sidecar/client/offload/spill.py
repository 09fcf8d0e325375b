"""Moves storages to a file on a disk of the node when host memory is short: all are safe there before any goes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cadenza.sidecar.client.errors import MoveError, RestoreError
from cadenza.sidecar.client.offload.host_memory import Arena, whole
from cadenza.sidecar.client.offload.storages import Segment

WINDOW = 16 * 2**20
"""Host memory, in bytes, through which everything passes on its way."""
CACHED = 256 * 2**20
"""Bytes after which what was written is synced and leaves the page cache, which counts as the job's memory."""


def refusal(directory: str, nbytes: int, ranks: int) -> str:
    """Return why ``ranks`` processes cannot write ``nbytes`` each into a directory, or ""."""
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        return f"spill directory {directory}: {error.strerror}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"spill directory {directory} is not writable"
    free = disk.f_bavail * disk.f_frsize
    if nbytes * ranks <= free:
        return ""
    return f"spill directory {directory}: {nbytes * ranks >> 20} MiB are needed and {free >> 20} MiB are free"


class Spilled:
    """One move of segments to a file that has no name, so that it goes with the process whatever happens."""

    def __init__(self, segments: Sequence[Segment], directory: str) -> None:
        """Take the file's whole size on the disk; raise MoveError when there is no room for it."""
        self._segments = segments
        self._window = Arena()
        self._pinned = any(segment.storage.device.type == "cuda" for segment in segments)
        nbytes = sum(segment.nbytes for segment in segments)
        with contextlib.ExitStack() as undo:
            try:
                self._file = undo.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0))
                os.posix_fallocate(self._file.fileno(), 0, max(nbytes, 1))
            except OSError as error:
                raise MoveError(f"no {nbytes >> 20} MiB in {Path(directory)}: {error.strerror}") from None
            undo.pop_all()

    def out(self) -> None:
        """Write all, sync, then release; on failure nothing moved. Raises MoveError, or what torch raises."""
        file, synced, end = self._file.fileno(), 0, 0
        try:
            for place, raw, window in self._pieces():
                window.copy_(raw)
                end = place + _write(file, window, place)
                if end - synced >= CACHED:
                    synced = _settle(file, synced, end)
            _settle(file, synced, end)
        except OSError as error:
            self.close()
            raise MoveError(f"the state could not be written to disk: {error.strerror}") from None
        except (RuntimeError, MemoryError):
            self.close()
            raise
        for segment in self._segments:
            segment.storage.resize_(0)

    def back(self) -> None:
        """Give the storages their memory and content again, and the disk its room; on failure none has any.

        Raises RestoreError when the file cannot be read, and what torch raises when a device is too full.
        """
        try:
            for segment in self._segments:
                segment.storage.resize_(segment.nbytes)
            for place, raw, window in self._pieces():
                _read(self._file.fileno(), window, place)
                raw.copy_(window)
        except OSError as error:
            raise RestoreError(f"the state cannot be read back from disk: {error.strerror}") from None
        except (RuntimeError, MemoryError):
            for segment in self._segments:
                segment.storage.resize_(0)
            raise
        self.close()

    def close(self) -> None:
        """Give the disk's room and the window back."""
        self._file.close()
        self._window.free()

    def _pieces(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the pieces of all storages: place in the file, bytes, and as much of the window."""
        window, place = self._window.reserve(WINDOW, pinned=self._pinned), 0
        with torch.no_grad():
            for segment in self._segments:
                for piece in torch.split(whole(segment.storage), WINDOW):
                    yield place, piece, window[: piece.nbytes]
                    place += piece.nbytes


def _write(file: int, window: torch.Tensor, place: int) -> int:
    """Write the window at a place; return its bytes."""
    left = _memory(window)
    while left:
        count = os.pwrite(file, left, place)
        left, place = left[count:], place + count
    return window.nbytes


def _read(file: int, window: torch.Tensor, place: int) -> None:
    """Fill the window from a place."""
    left = _memory(window)
    while left:
        count = os.preadv(file, [left], place)
        if not count:
            raise OSError(0, "the file is too short")
        left, place = left[count:], place + count


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a host tensor's bytes for as long as it lives; torch itself shows them to NumPy only."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _settle(file: int, start: int, end: int) -> int:
    """Wait until a range is on the disk, drop it from the page cache, and return its end."""
    os.fdatasync(file)
    os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
    return end
