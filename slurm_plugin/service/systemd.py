"""What systemd and job_submit.lua hear from the service: one datagram, one small file."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def notify(state: str, address: str | None = None) -> bool:
    """Send ``state`` (``READY=1``, ``RELOADING=1``, ``WATCHDOG=1``, ``STOPPING=1``) as sd_notify(3) does.

    Return whether a manager listens; without ``NOTIFY_SOCKET`` in the environment there is none.
    """
    target = address or os.environ.get("NOTIFY_SOCKET", "")
    if not target:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        try:
            link.sendto(state.encode(), "\0" + target[1:] if target.startswith("@") else target)
        except OSError:
            return False
    return True


def write_admission(path: Path, word: str, now_s: float) -> None:
    """Tell job_submit.lua whether to hold managed jobs: ``held EPOCH`` or ``native EPOCH``.

    The rename keeps a reader from ever seeing half a line; ``OSError`` passes through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(f"{word} {int(now_s)}\n", encoding="ascii")
    draft.chmod(0o644)
    draft.replace(path)
