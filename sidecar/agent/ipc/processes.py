"""Identity and life of processes: peers' credentials, /proc, pidfds."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Identity of the other end of a Unix socket, from the kernel."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the credentials that the peer had when it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def start_ticks(pid: int) -> int | None:
    """Return the process's start time in clock ticks since boot, or None if it is gone or a zombie.

    Pid and start time together identify a process for good: pids are reused, start times are not (proc_pid_stat(5)).
    """
    fields = _stat(pid)
    return None if not fields or fields[0] in {"Z", "X"} else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process, as Slurm's suspend does (proctrack/linuxproc and others)."""
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """Return the kernel's name of this boot; start times of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent, or None if the process is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def uid_of(pid: int) -> int:
    """Return the user of a process; root's uid if it is gone."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return 0


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if the kernel gives none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
