"""Files that survive a crash and whose damage shows in size and CRC-32; their stall ends a save. Stdlib only."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cadenza.sidecar.client.errors import SaveError

T = TypeVar("T")

PIECE_BYTES = 1 << 20
"""Bytes that are read at once; for smaller writes another thread would cost more than it saves."""
WRITE_BYTES = 1 << 26
"""Bytes that are written at once; each such write that returns shows that the file system answers."""
STALL_S = 60.0
STALL_FACTOR = 4.0
"""A save is given up when its file system has done nothing for STALL_FACTOR times the job's usual save, and for at
least STALL_S."""
FIRST_BYTES_PER_S = 1e8
"""Speed from which the usual time is worked out before there was a save."""
LOOKS = 32
"""Looks at a save's progress in the time after which it is given up."""
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
            done += self._file.write(view[done : done + WRITE_BYTES])
            moved()
        self._nbytes += done

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""

    def finish(self) -> Entry:
        """Sync the file to the disk and return its entry."""
        # write(2) ends in the page cache: without the sync a host that fails takes the checkpoint with it.
        os.fsync(self._file.fileno())
        return Entry(self._nbytes, self._crc32)

    def close(self) -> None:
        """Close the file; it is on the disk already, or an error is being raised."""
        self._summing.shutdown()
        with contextlib.suppress(OSError):
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
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


class Worker(threading.Thread):
    """A thread with one piece of work on a file system, which may never answer."""

    def __init__(self, work: Callable[[], T]) -> None:
        # A system call that never returns must not keep the interpreter from its end.
        super().__init__(name="cadenza-files", daemon=True)
        self._work = work
        self.moves = 0
        """Grows as long as the file system answers."""
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and keep its result for the thread that waits."""
        try:
            self.value = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error


def moved() -> None:
    """Note that the file system has answered this thread."""
    thread = threading.current_thread()
    if isinstance(thread, Worker):
        thread.moves += 1


def wait_moving(seconds: float) -> None:
    """Wait for another process, while the file system answers."""
    threading.Event().wait(seconds)
    moved()


class Patience:
    """Does a save's work on files in threads of its own, and gives it up when the file system does not answer.

    A system call cannot be ended from outside. The thread that waits for it stays until the file system answers, or
    the process ends; what it does after that is in an unfinished checkpoint, which does not count. Until then no other
    save is begun.
    """

    def __init__(self) -> None:
        self._usual_s: list[float] = []
        self._stuck: Worker | None = None
        self.expected_bytes = 0

    @property
    def limit_s(self) -> float:
        """Longest time without any progress."""
        usual = max(self._usual_s, default=self.expected_bytes / FIRST_BYTES_PER_S)
        return max(STALL_S, STALL_FACTOR * usual)

    @property
    def stuck(self) -> bool:
        """True while the file system has not answered a save that was given up."""
        return self._stuck is not None and self._stuck.is_alive()

    def took(self, seconds: float) -> None:
        """Note the time of a complete save."""
        self._usual_s = [*self._usual_s[-4:], seconds]

    def run(self, path: Path, work: Callable[[], T]) -> T:
        """Return the result of work on a path; raise its error, or SaveError when nothing moves for too long."""
        if self._stuck is not None:
            self._await(self._stuck, path)
        worker = self._stuck = Worker(work)
        worker.start()
        self._await(worker, path)
        if worker.error is not None:
            raise worker.error
        result: T = worker.value
        return result

    def _await(self, worker: Worker, path: Path) -> None:
        """Wait for a thread; it stays the stuck one if its file system does not answer."""
        limit, idle, moves = self.limit_s, 0, worker.moves
        while idle < LOOKS:
            worker.join(limit / LOOKS)
            if not worker.is_alive():
                self._stuck = None
                return
            idle = idle + 1 if worker.moves == moves else 0
            moves = worker.moves
        raise SaveError(f"{path}: the file system has not answered for {limit:.0f} s, so this save is given up")
