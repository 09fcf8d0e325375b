"""One cadenzad for each store: a POSIX record lock that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from threading import Event

from cadenza.slurm_plugin.errors import AlreadyRunningError, StoreError

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux
_POLL_S = 0.25


class StoreLock:
    """The lock file of a store.

    A record lock belongs to the process: neither a fork nor an inherited descriptor keeps it after a
    ``kill -9``. A process that holds it must not open the file a second time, because closing that releases
    the lock.
    """

    def __init__(self, store: Path) -> None:
        self.path = store.with_name(store.name + ".lock")
        self._file: int | None = None

    def take(self, patience_s: float = 0.0) -> None:
        """Take the lock, waiting at most ``patience_s`` seconds for another process to release it.

        Raise AlreadyRunningError when it does not, and StoreError when there can be no lock file.
        """
        for _ in range(int(patience_s / _POLL_S)):
            try:
                self._take()
            except AlreadyRunningError:
                Event().wait(_POLL_S)
            else:
                return
        self._take()

    def _take(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}; is its directory ours?") from None
        if not _try_lock(descriptor):
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise AlreadyRunningError(f"{self.path}: cadenzad with pid {owner} owns this store; stop it first")
        with suppress(OSError):  # only a note for the next one; a full disk has no room for it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._file = descriptor

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def owner(self) -> int | None:
        """Return the pid of the living process that has the lock, or None, without taking the lock."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
        finally:
            os.close(descriptor)
        return None if kind == fcntl.F_UNLCK else int(pid)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True
