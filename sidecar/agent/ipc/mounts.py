"""The file system that a path is on, as a process sees it, under a name that is the same on all hosts that share it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cadenza.sidecar.agent.ipc.processes import text_of

SHARED = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "orangefs", "smb3", "virtiofs"}
)
"""Types of file systems whose source names them on every host; NFS mounts of one server are one here."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def file_system_of(path: str, host: str, pid: int | None = None) -> str:
    """Return the name of the file system that a path is on; "" where that cannot be read.

    Only the names of mounts are read (proc_pid_mountinfo(5)), never the path itself, on which a look may hang.
    """
    found, length = "", -1
    for point, kind, source in _mounts(pid):
        below = path == point or path.startswith(f"{point.rstrip('/')}/")
        if below and len(point) >= length:  # of two mounts on one point the later one counts
            found, length = _name(point, kind, source, host), len(point)
    return found


def _name(point: str, kind: str, source: str, host: str) -> str:
    server, colon, _ = source.rpartition(":/")
    if kind.startswith("nfs") and colon:
        return server
    if kind in SHARED or kind.startswith("fuse."):
        return source
    return f"{host}:{source if source.startswith('/') else point}"


def _mounts(pid: int | None) -> Iterator[tuple[str, str, str]]:
    """Yield mount point, type and source of each mount that a process sees; those of this one without a ``pid``."""
    for line in text_of(Path(f"/proc/{pid or 'self'}/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) > 4 and len(rest) > 1:  # noqa: PLR2004 (the fifth is the mount point)
            yield _plain(fields[4]), rest[0], _plain(rest[1])


def _plain(text: str) -> str:
    r"""Return a name without its octal escapes.

    >>> _plain("/my\\040disk")
    '/my disk'
    """
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)
