"""Identity and life of processes: peers' credentials, /proc, pidfds."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
STEPD = "slurmstepd"
GONE = frozenset({"Z", "X"})
"""States of a thread that has ended."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Identity of the other end of a Unix socket, from the kernel."""

    pid: int
    uid: int


def text_of(path: Path) -> str:
    """Return the text of one of the kernel's files, without the newline at its end; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def peer_of(connection: socket.socket) -> Peer:
    """Return the credentials that the peer had when it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    # The kernel notes these at connect(2): a message cannot claim another user or process (unix(7), SO_PEERCRED).
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def start_ticks(pid: int) -> int | None:
    """Return the process's start time in clock ticks since boot, or None if it is gone or a zombie.

    Pid and start time together identify a process for good: pids are reused, start times are not (proc_pid_stat(5)).
    A process whose first thread has ended shows Z, and lives as long as another thread of it does.
    """
    fields = _stat(f"{pid}")
    return None if not fields or (fields[0] in GONE and int(fields[17]) == 1) else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process, as Slurm's suspend does (proctrack/linuxproc and others)."""
    state = _stat(f"{pid}")[:1]
    if state == ["Z"]:  # a signal stops all threads together, and the first one has ended
        with contextlib.suppress(OSError):
            threads = (_stat(f"{pid}/task/{thread.name}")[:1] for thread in Path(f"/proc/{pid}/task").iterdir())
            state = next((one for one in threads if one and one[0] not in GONE), state)
    return state == ["T"]


def _stat(name: str) -> list[str]:
    """Return the fields of /proc/NAME/stat from the state on; empty if the process or thread is gone."""
    # A program's name may have spaces and brackets in it (proc_pid_stat(5)): the last bracket ends it.
    return text_of(Path(f"/proc/{name}/stat")).rpartition(")")[2].split()


def boot_id() -> str:
    """Return the kernel's name of this boot; start times of another boot mean nothing."""
    return text_of(Path("/proc/sys/kernel/random/boot_id"))


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent, or None if the process is gone."""
    fields = _stat(f"{pid}")
    return int(fields[1]) if fields else None


def uid_of(pid: int) -> int:
    """Return the user of a process; root's uid if it is gone."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return 0


def is_stepd(pid: int, root: Path = Path("/")) -> bool:
    """Return True for slurmstepd, and for a child of it that still has root's rights and waits for the job's turn.

    The name proves nothing: any process can take it (prctl(2), PR_SET_NAME), and any user can start a set-user-ID
    program under it.
    """
    folder = root / f"proc/{pid}"
    try:
        named = (folder / "comm").read_text(encoding="utf-8", errors="replace").startswith(STEPD)
        roots = named and folder.stat().st_uid in {0, os.geteuid()}
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a process that ends has no program any more
        return roots and not (folder / "exe").stat().st_mode & stat.S_ISUID
    return roots


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if the kernel gives none."""
    try:
        # A pidfd names this process for good; a pid may be another process's a moment later.
        return os.pidfd_open(pid)
    except OSError:
        return None
