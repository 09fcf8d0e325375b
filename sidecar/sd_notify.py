"""Notifications of the daemons to systemd (sd_notify(3))."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Send ``state`` (``READY=1``, ``RELOADING=1``, ``WATCHDOG=1``, ``STOPPING=1``) to the service manager.

    Return whether a manager listens; without ``NOTIFY_SOCKET`` in the environment there is none.
    """
    target = os.environ.get("NOTIFY_SOCKET", "")
    if not target:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        try:
            # A name that begins with @ is one of the abstract namespace, whose first byte is 0 (unix(7)).
            link.sendto(state.encode(), "\0" + target[1:] if target.startswith("@") else target)
        except OSError:
            return False
    return True
