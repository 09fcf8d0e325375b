"""What a job's data caches leave in shared memory when its processes were killed, and its removal (``CachedDataset``).

The names are anybody's to make, and the agent is root: only a directory of the job's own user is touched, and no
symbolic link is followed.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what is in it is checked before it is touched


def name_of(uid: int, job: int) -> str:
    """Return what the client calls the directory of a job's caches."""
    return f"cadenza-{uid}-job{job}"


def remove(uid: int, job: int, folder: Path = SHARED_MEMORY) -> bool:
    """Remove the caches of a job that has left; False when it has none, or when the directory is not its user's.

    A process that still uses them keeps their memory until it ends.
    """
    try:
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _remove(parent, name_of(uid, job), uid)
    finally:
        os.close(parent)


def remove_soon(uid: int, job: int) -> None:
    """Remove them in a thread of its own: to free many GB takes seconds."""
    if (SHARED_MEMORY / name_of(uid, job)).exists():
        threading.Thread(target=remove, args=(uid, job), name="cadenza-caches", daemon=True).start()


def _remove(parent: int, name: str, uid: int) -> bool:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        log.warning("left alone: %s is not a directory of uid %d", name, uid)
        return False
    # In a sticky directory nobody but this user can put another thing in its place, and rmtree compares what it opens.
    shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
    log.info("removed the caches that a job left: %s", name)
    return True
