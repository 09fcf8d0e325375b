"""Removal of the data caches that killed processes leave in shared memory (``CachedDataset``).

Any user can create these names and the agent runs as root, so it removes only directories that belong to the job's user
and follows no symbolic link.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its content is checked before removal


def name_of(uid: int, job: int) -> str:
    """Return the client's name for the directory of a job's caches."""
    return f"cadenza-{uid}-job{job}"


def remove(uid: int, job: int, folder: Path = SHARED_MEMORY) -> bool:
    """Remove the caches of a job that has left; return False if it has none, or if another user owns the directory.

    A process that still uses them keeps their memory until it ends.
    """
    try:
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        name = name_of(uid, job)
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
            log.warning("left alone: %s is not a directory of uid %d", name, uid)
            return False
        # In a sticky directory only this user can replace it, and rmtree compares the directory that it opens.
        shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
        log.info("removed the caches that a job left: %s", name)
        return True
    finally:
        os.close(parent)


def remove_soon(uid: int, job: int) -> None:
    """Remove them in a thread: freeing many GB takes seconds."""
    if (SHARED_MEMORY / name_of(uid, job)).exists():
        threading.Thread(target=remove, args=(uid, job), name="cadenza-caches", daemon=True).start()
