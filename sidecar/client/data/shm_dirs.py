"""Where a job's caches lie in shared memory: private directories, who uses them, and their removal (stdlib only)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cadenza.sidecar.client.data.errors import CacheUnsafeError, DataUsageError

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - what is made below it is private to the user
USERS = "users"
"""The file that every process of the cache keeps a shared lock on; locks end with their process, however it ends."""
ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB


def job_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return what all local ranks of this job have in common: the Slurm job, else torchrun's run, else this process.

    >>> job_key({"SLURM_JOB_ID": "17"})
    'job17'
    """
    if job := environ.get("SLURM_JOB_ID"):
        return f"job{job}"
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        return f"run{run}-{environ.get('MASTER_PORT', '')}"
    return f"pid{os.getpid()}"


def job_directory(job: str, directory: str | Path = SHARED_MEMORY, uid: int | None = None) -> Path:
    """Return the directory of a job's caches, ``cadenza-UID-JOB``; raise DataUsageError for an unfit name."""
    return Path(directory, f"cadenza-{os.geteuid() if uid is None else uid}-{_component(job)}")


def remove(job: str, directory: str | Path = SHARED_MEMORY, uid: int | None = None) -> bool:
    """Remove all caches of a job by its key, such as ``job17``, used or not; False when there are none.

    The memory is free once processes that still use them have ended. Needs the user's rights or root's.
    """
    path = job_directory(job, directory, uid)
    if not path.is_dir() or path.is_symlink():
        return False
    shutil.rmtree(path, ignore_errors=True)  # follows no symbolic link
    return True


class Place:
    """One cache's directory, in use by this process until ``leave()``; the last to leave removes it.

    The first to come finds it empty: what killed processes have left is removed. Raises CacheUnsafeError when
    the directory is not the user's own with mode 0700, OSError when it cannot be made.
    """

    def __init__(self, directory: str | Path, job: str, name: str) -> None:
        self._job = job_directory(job, directory)
        self.path = self._job / _component(name)
        self._pid = os.getpid()
        self._users = -1
        if not _watched:
            _watched.append(True)
            os.register_at_fork(after_in_child=_forget_parents)
        _places.add(self)

    def enter(self, prepare: Callable[[Path], object]) -> None:
        """Come to use the directory; ``prepare`` fills it when nobody else uses it."""
        while self._users < 0:
            for path in (self._job, self.path):
                _own(path)
            with contextlib.suppress(FileNotFoundError):  # the last one has just left: make it again
                self._users = self._join(prepare)

    def _join(self, prepare: Callable[[Path], object]) -> int:
        """Return a descriptor with a shared lock, or -1 when the directory was removed before it was locked."""
        users = os.open(self.path / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, ALONE)
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
        """Use the directory no more, and remove it if nobody else does. A second call does nothing."""
        users, self._users = self._users, -1
        if users < 0:
            return
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                fcntl.flock(users, ALONE)
                shutil.rmtree(self.path, ignore_errors=True)
                self._job.rmdir()  # stays while other caches are in it
        os.close(users)

    def forget(self) -> None:
        """In a forked child: the parent uses the directory, and its end must not wait for the child's."""
        if self._users >= 0:
            os.close(self._users)
            self._users = -1


def _own(path: Path) -> None:
    """Make a private directory, or check that one is; its parent is made if need be, but not checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CacheUnsafeError(
            f"{path} is not a directory of user {os.geteuid()} with mode 0700: remove it, or give another directory"
        )


def _component(name: str) -> str:
    """Return a name that can be one directory; raise DataUsageError for others."""
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise DataUsageError(f"{name!r} cannot be a directory's name: leave out slashes")
    return name


_places: weakref.WeakSet[Place] = weakref.WeakSet()
_watched: list[bool] = []
"""Non-empty once forks are watched."""


def _forget_parents() -> None:
    """In a forked child: let go of the parent's places."""
    for place in list(_places):
        place.forget()


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold a file's lock; each process, and each thread that wants it alone, needs a descriptor of its own."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
