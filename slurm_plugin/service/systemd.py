"""Output of the daemons for systemd: log lines on standard error for journald, and notifications."""

from __future__ import annotations

import logging
import os
import socket

from cadenza.policies.core.actions import Action, DrainNode, OpenNode, Outcome


def set_up_logging(*, debug: bool) -> None:
    """Configure the root logger of a daemon; journald adds time and name itself."""
    journal = "JOURNAL_STREAM" in os.environ
    form = "%(levelname)s %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format=form)


def action_line(action: Action, outcome: Outcome) -> str:
    """Return ``JOBID=… ACTION=… REASON=…`` (or ``NODE=…``), with the error of an action that failed."""
    target = f"NODE={action.node}" if isinstance(action, DrainNode | OpenNode) else f"JOBID={action.job}"
    failed = "" if outcome.ok else f" ERROR={outcome.error}"
    return f"{target} ACTION={type(action).__name__} REASON={action.reason}{failed}"


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
