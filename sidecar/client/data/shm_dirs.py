"""Private directories of a job's caches in shared memory, their users, and their removal (stdlib only)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cadenza.sidecar.client.errors import CacheUnsafeError, DataUsageError

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - directories made below it are private to the user
USERS = "users"
"""File with a shared lock of every process of the cache; a lock ends with its process in any case."""
EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB


def job_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return a key common to all local ranks of this job: the Slurm job, else torchrun's run, else this process.

    >>> job_key({"SLURM_JOB_ID": "17"})
    'job17'
    """
    if job := environ.get("SLURM_JOB_ID"):
        return f"job{job}"
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        return f"run{run}-{environ.get('MASTER_PORT', '')}"
    return f"pid{os.getpid()}"


def job_directory(job: str, directory: str | Path = SHARED_MEMORY, uid: int | None = None) -> Path:
    """Return the directory of a job's caches, ``cadenza-UID-JOB``; raise DataUsageError for a bad name."""
    return Path(directory, f"cadenza-{os.geteuid() if uid is None else uid}-{_component(job)}")


def remove(job: str, directory: str | Path = SHARED_MEMORY, uid: int | None = None) -> bool:
    """Remove all caches of a job by its key, such as ``job17``, used or not; return False when there are none.

    The memory is free once processes that still use them have ended. Needs the user's rights or root's.
    """
    path = job_directory(job, directory, uid)
    if not path.is_dir() or path.is_symlink():
        return False
    shutil.rmtree(path, ignore_errors=True)  # follows no symbolic link
    return True


class CacheDirectory:
    """One cache's directory, in use by this process until ``leave()``; the last process to leave removes it.

    The first process finds it empty: files left by killed processes are removed. Raises CacheUnsafeError when
    the directory is not the user's own with mode 0700, OSError when it cannot be made.
    """

    def __init__(self, directory: str | Path, job: str, name: str) -> None:
        self._job = job_directory(job, directory)
        self.path = self._job / _component(name)
        self._pid = os.getpid()
        self._users = -1
        _directories.add(self)

    def enter(self, prepare: Callable[[Path], object]) -> None:
        """Begin to use the directory; ``prepare`` fills it when no other process uses it."""
        while self._users < 0:
            for path in (self._job, self.path):
                _own(path)
            with contextlib.suppress(FileNotFoundError):  # the last process has just left: make it again
                self._users = self._join(prepare)

    def _join(self, prepare: Callable[[Path], object]) -> int:
        """Return a descriptor with a shared lock, or -1 when the directory was removed before it was locked."""
        users = os.open(self.path / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, EXCLUSIVE)
                # The last user may have removed the file between open and lock: such a lock keeps no one out.
                if os.fstat(users).st_nlink:
                    prepare(self.path)
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                return users
        except BaseException:
            os.close(users)
            raise
        os.close(users)
        return -1

    def leave(self) -> None:
        """Stop using the directory, and remove it if no other process uses it. A second call does nothing."""
        users, self._users = self._users, -1
        if users < 0:
            return
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                fcntl.flock(users, EXCLUSIVE)
                shutil.rmtree(self.path, ignore_errors=True)
                self._job.rmdir()  # stays while other caches are in it
        os.close(users)

    def forget(self) -> None:
        """Give up the directory in a forked child: the parent uses it, and its end must not wait for the child's."""
        if self._users >= 0:
            # A lock of flock(2) belongs to the open file: while the child has it open, the parent's lock stays.
            os.close(self._users)
            self._users = -1


def _own(path: Path) -> None:
    """Make a private directory, or check that an existing one is private; its parent is made but not checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise CacheUnsafeError(
            f"{path} is not a directory of user {os.geteuid()} with mode 0700: remove it, or give another directory"
        )


def _component(name: str) -> str:
    """Return a name that can be one directory's; raise DataUsageError for others."""
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise DataUsageError(f"{name!r} cannot be a directory's name: leave out slashes")
    return name


_directories: weakref.WeakSet[CacheDirectory] = weakref.WeakSet()


def _forget_parents() -> None:
    """Give up the parent's directories in a forked child."""
    for directory in list(_directories):
        directory.forget()


os.register_at_fork(after_in_child=_forget_parents)


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold a file's exclusive lock; each process, and each competing thread, needs a descriptor of its own."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
