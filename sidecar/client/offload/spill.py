"""Move of storages to a file on a disk of the node when host memory is short; all are on disk before any is freed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from cadenza.sidecar.client.errors import MoveError, RestoreError
from cadenza.sidecar.client.offload import device, device_streams
from cadenza.sidecar.client.offload.host_memory import HostBuffer, as_bytes, storage_in
from cadenza.sidecar.client.offload.storages import Segment

WINDOW_BYTES = 16 * 2**20
"""Size of the host memory through which all bytes pass."""
SYNC_BYTES = 256 * 2**20
"""Bytes written between two syncs; a sync drops them from the page cache, which counts as the job's memory."""


def refusal(directory: str, nbytes: int, ranks: int) -> str | None:
    """Return the reason why ``ranks`` processes cannot write ``nbytes`` each into a directory, if they cannot."""
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        return f"spill directory {directory}: {error.strerror}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"spill directory {directory} is not writable"
    free = disk.f_bavail * disk.f_frsize
    if nbytes * ranks <= free:
        return None
    return f"spill directory {directory}: {nbytes * ranks >> 20} MiB are needed and {free >> 20} MiB are free"


class SpillFile:
    """One move of segments to a file without a name, so that it never outlives the process."""

    def __init__(self, segments: Sequence[Segment], directory: str) -> None:
        """Allocate the whole file; raise MoveError when the disk is too full."""
        self._segments = segments
        self._window = HostBuffer()
        self._device = next((one.storage.device for one in segments if device.of(one.storage.device)), None)
        nbytes = sum(segment.nbytes for segment in segments)
        with contextlib.ExitStack() as undo:
            try:
                self._file = undo.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0))
                # A sparse file would show a full disk only in the middle of the move.
                os.posix_fallocate(self._file.fileno(), 0, max(nbytes, 1))
            except OSError as error:
                raise MoveError(f"no {nbytes >> 20} MiB in {Path(directory)}: {error.strerror}") from None
            undo.pop_all()

    def offload(self) -> None:
        """Write all, sync, then release; on failure nothing moved. Raises MoveError, or torch's errors."""
        self.write([segment.storage for segment in self._segments])
        # Nothing is released before the last byte is on the disk: until then the GPU has the only good copy.
        for segment in self._segments:
            segment.storage.resize_(0)

    def write(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Write the content of each segment, which is in one of these storages, and sync.

        On failure there is no file any more. Raises MoveError, or torch's errors.
        """
        file, synced, end = self._file.fileno(), 0, 0
        try:
            for place, raw, window in self._pieces(storages):
                window.copy_(raw)
                _transfer(lambda data, at: os.pwrite(file, data, at), window, place)
                end = place + window.nbytes
                if end - synced >= SYNC_BYTES:
                    synced = _settle(file, synced, end)
            _settle(file, synced, end)
        except OSError as error:
            self.close()
            raise MoveError(f"the state could not be written to disk: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def restore(self) -> None:
        """Give the storages their memory and content again and free the disk; on failure no storage has memory.

        Raises RestoreError when the file cannot be read, and torch's errors when a device is too full.
        """
        file = self._file.fileno()
        try:
            for segment in self._segments:
                with device_streams.allocating_on(segment.storage.device, segment.stream):
                    segment.storage.resize_(segment.nbytes)
            for place, raw, window in self._pieces([segment.storage for segment in self._segments]):
                _transfer(lambda data, at: os.preadv(file, [data], at), window, place)
                raw.copy_(window)
        except BaseException as error:
            for segment in self._segments:
                segment.storage.resize_(0)
            if isinstance(error, OSError):
                raise RestoreError(f"the state cannot be read back from disk: {error.strerror}") from None
            raise
        self.close()

    def host_storages(self) -> Iterator[tuple[Segment, torch.UntypedStorage]]:
        """Yield each segment with its content, mapped from the file; changes do not reach the file."""
        mapping, place = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY), 0
        for segment in self._segments:
            yield segment, storage_in(mapping, place, segment.nbytes)
            place += segment.nbytes

    def close(self) -> None:
        """Free the disk and the window."""
        self._file.close()
        self._window.free()

    def _pieces(self, storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the pieces of all storages: offset in the file, bytes, and a window of that size."""
        window, place = self._window.reserve(WINDOW_BYTES, self._device), 0
        with torch.no_grad():
            for storage in storages:
                for piece in torch.split(as_bytes(storage), WINDOW_BYTES):
                    yield place, piece, window[: piece.nbytes]
                    place += piece.nbytes


def _transfer(call: Callable[[memoryview, int], int], window: torch.Tensor, offset: int) -> None:
    """Write or read the whole window at an offset of the file, in as many calls as it takes."""
    # Torch itself shows a tensor's bytes to NumPy only.
    left = memoryview((ctypes.c_char * window.nbytes).from_address(window.data_ptr())).cast("B")
    while left:
        count = call(left, offset)
        if not count:
            raise OSError(0, "the file is too short")
        left, offset = left[count:], offset + count


def _settle(file: int, start: int, end: int) -> int:
    """Wait until a range is on the disk, drop it from the page cache, and return its end."""
    # The kernel drops clean pages only (posix_fadvise(2)), and pages of the file count as the job's memory.
    os.fdatasync(file)
    os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
    return end
