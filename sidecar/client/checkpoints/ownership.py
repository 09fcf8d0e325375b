"""Owner of a directory of checkpoints: the job in each marker, and the lock that keeps a second writer out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.errors import InUseError, OtherJobError, SaveError

ADOPT_ENV = "CADENZA_ADOPT"
LOCK = ".lock"
SAME_JOB_WAIT_S, OTHER_WAIT_S = 120.0, 5.0
"""Longest waits for a directory: for an earlier start of the same job, whose host may be dead and whose lock a server
of NFSv4 then keeps for 90 s; and for any other process, which may just be ending."""
POLL_S = 0.2
_BUSY = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Owner:
    """The job that saved a checkpoint; ``job`` is "" outside Slurm, and an array's task is ``ID_TASK``."""

    job: str = ""
    cluster: str = ""
    user: str = ""
    command: str = ""
    """Digest of the command line."""

    def fields(self) -> dict[str, str]:
        """Return the fields as they stand in a marker."""
        return dict(vars(self))

    def is_other(self, job: Owner) -> bool:
        """Return whether this is another job than ``job``: a process outside Slurm is none, a requeue is the same."""
        clusters = {self.cluster, job.cluster} - {""}
        return bool(self.job and job.job) and (self.job != job.job or len(clusters) > 1)

    def __str__(self) -> str:
        """Name the job."""
        if not self.job:
            return f"a process of {self.user or 'an unknown user'} outside Slurm"
        return f"job {self.job}" + (f" of {self.user}" if self.user else "")


def read_owner(fields: object) -> Owner:
    """Return the owner that a marker or a lock names."""
    given = fields if isinstance(fields, Mapping) else {}
    return Owner(*(str(given.get(name, "")) for name in ("job", "cluster", "user", "command")))


def owner_here(environ: Mapping[str, str] = os.environ) -> Owner:
    """Return the owner of what this process saves."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")
    command = "\0".join(getattr(sys, "orig_argv", sys.argv))  # orig_argv came with Python 3.10
    return Owner(
        job=job,
        cluster=environ.get("SLURM_CLUSTER_NAME", "") if job else "",
        user=environ.get("SLURM_JOB_USER") or environ.get("USER") or str(os.getuid()),
        command=hashlib.sha256(command.encode(errors="surrogateescape")).hexdigest()[:16],
    )


def check_owner(path: Path, found: Owner, here: Owner) -> None:
    """Raise OtherJobError when a checkpoint is another job's, unless its user said that this job takes it over."""
    if not found.is_other(here) or os.environ.get(ADOPT_ENV) == "1":
        return
    command = "the same command" if found.command == here.command else "another command"
    raise OtherJobError(
        f"{path} is of {found} ({command}), this is {here}: to continue from it on purpose, call restore(adopt=True) "
        f"or submit with {ADOPT_ENV}=1 (sbatch --export=ALL,{ADOPT_ENV}=1); else give this job a directory of its own"
    )


class WriterLock:
    """The right to write a directory: a POSIX record lock of this process on its file ``.lock`` (fcntl(2)).

    The kernel, or over NFS the server's lock manager, releases it when the process or its host has ended. Such locks
    do not exclude within a process; there the last keeper of a directory takes it over from the one before.
    """

    def __init__(self, directory: Path, owner: Owner, displaced: Callable[[], None]) -> None:
        self._directory, self._owner = directory, owner
        self._displaced = displaced
        """Called when a later keeper of this process takes over; it raises InUseError while this one writes."""
        self._key = os.path.realpath(directory)
        self._file = -1
        self._warned = False

    def hold(self, wait: Callable[[float], object], *, make: bool) -> bool:
        """Take the lock, or see that it is still there; raise InUseError when another process keeps it.

        Without ``make``, a directory that is missing or read-only needs none: nothing is written there. Returns whether
        an earlier process of the same job has had it.
        """
        with _registered:
            before = _held.get(self._key)
            if before is not None and before is not self:
                before._displaced()  # noqa: SLF001 - of this class
                # Closing any descriptor of the file in this process drops the lock (fcntl(2)), so this one moves on.
                self._file, before._file = before._file, -1  # noqa: SLF001
            _held[self._key] = self
        if not self._open(make=make):
            return False
        waited, limit = 0.0, OTHER_WAIT_S
        while not self._try():
            holder, told = self._holder()
            limit = SAME_JOB_WAIT_S if holder.job and holder.job == self._owner.job else OTHER_WAIT_S
            if waited >= limit:
                self.release()
                raise InUseError(
                    f"{self._directory}: {told} ({holder}) saves its checkpoints there, and two writers would destroy "
                    f"each other's: end it, or use another directory; if its host will never come back, remove "
                    f"{self._directory / LOCK}"
                )
            if not waited:
                _log.warning("%s: waiting up to %.0f s for %s (%s) to end", self._directory, limit, told, holder)
            waited += POLL_S
            wait(POLL_S)
        before_this, _ = self._holder()
        self._sign()
        return bool(before_this.job) and before_this.job == self._owner.job

    def release(self) -> None:
        """Let another writer in."""
        with _registered:
            if _held.get(self._key) is self:
                del _held[self._key]
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = -1

    def forget(self) -> None:
        """Drop the lock's file in a forked child, which has no lock by it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self, *, make: bool) -> bool:
        """Open the file unless it is open and still in its place; return False if there is nothing to lock."""
        path = self._directory / LOCK
        if self._file >= 0:
            with contextlib.suppress(OSError):
                # A lock on a file that was removed from its directory keeps no one out who opens the name anew.
                if os.path.samestat(os.fstat(self._file), path.stat()):
                    return True
            os.close(self._file)
            self._file = -1
        try:
            if make:
                self._directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if not make:
                return False
            if error.errno in (errno.EACCES, errno.EPERM) and os.access(self._directory, os.W_OK):
                self._warn(f"{path} is another user's")
                return False
            raise SaveError(f"{error.filename or path}: {error.strerror}") from error
        return True

    def _try(self) -> bool:
        """Lock the file; return False if another process has it. A file system without locks is said once."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _NO_LOCKS:
                raise SaveError(f"{self._directory / LOCK}: {error.strerror}") from error
            self._warn(f"its file system has no locks ({error.strerror})")
        return True

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s: %s: that no other process saves there is not checked", self._directory, cause)

    def _sign(self) -> None:
        """Write who has the lock into its file; a full disk does not matter."""
        text = json.dumps({**self._owner.fields(), "host": platform.node(), "pid": os.getpid()}).encode()
        with contextlib.suppress(OSError):
            if os.pread(self._file, len(text) + 1, 0) != text:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, text, 0)

    def _holder(self) -> tuple[Owner, str]:
        """Return the owner of the process that has the lock, and its name."""
        fields: Any = {}
        with contextlib.suppress(OSError, ValueError):
            fields = json.loads(os.pread(self._file, 4096, 0))
        fields = fields if isinstance(fields, dict) else {}
        return read_owner(fields), f"process {fields.get('pid', '?')} on {fields.get('host', 'an unknown host')}"


_registered = threading.RLock()
_held: dict[str, WriterLock] = {}
"""Locks of this process by real path."""


def _after_fork() -> None:
    """Forget the parent's locks in a forked child."""
    global _registered  # noqa: PLW0603 - another thread of the parent may have held it
    _registered = threading.RLock()
    for lock in _held.values():
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
