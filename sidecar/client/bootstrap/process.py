"""What this process has of Cadenza: one session, made by attach(), which a forked child has no part in."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from cadenza.sidecar import wire
from cadenza.sidecar.client.errors import AgentRefusedError
from cadenza.sidecar.client.offload import pin_threads
from cadenza.sidecar.client.session import identity
from cadenza.sidecar.client.session.job_session import Session

SPILL_ENV = "CADENZA_SPILL_DIR"
"""A directory on a disk of the node, for state that host memory cannot take; set by the admin or the user."""

_log = logging.getLogger("cadenza.client")


class _Process:
    """What this process has of Cadenza: one session, and what was said once."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.told = False
        self.fork_watched = False


_process = _Process()


def current() -> Session | None:
    """Return this process's session, if attach() was called."""
    return _process.session


def prepare() -> Session:
    """Return this process's session, made if there is none, and not connected by this."""
    _process.session = _process.session or Session()
    return _process.session


def attach(
    sources: Iterable[tuple[str, object]],
    *,
    socket: str | None = None,
    refuse_resident: bool = False,
    spill: str | None = None,
) -> Session:
    """Return this process's session with the sources registered, connected when there is an agent.

    Raises nothing when there is none, or when it does not take this process: the job then runs as without it.
    """
    session = prepare()
    session.refuse_resident |= refuse_resident
    session.spill_to = spill or session.spill_to or os.environ.get(SPILL_ENV, "")
    for name, thing in sources:
        session.register(name, thing)
    if not session.active:
        _connect(session, socket or os.environ.get(wire.SOCKET_ENV) or wire.DEFAULT_SOCKET)
    if session.active and "torch" in sys.modules:
        from cadenza.sidecar.client.offload import exports  # noqa: PLC0415

        exports.watch()
        pin_threads.watch()
    return session


def detach() -> None:
    """Leave; a later attach() starts a new session. Without one, nothing happens."""
    session = _process.session
    if session is not None:
        session.detach()
        _process.session = None
    if "cadenza.sidecar.client.offload.exports" in sys.modules:
        sys.modules["cadenza.sidecar.client.offload.exports"].unwatch()
    if "cadenza.sidecar.client.bootstrap.auto" in sys.modules:
        sys.modules["cadenza.sidecar.client.bootstrap.auto"].uninstall()
    pin_threads.unwatch()


def _connect(session: Session, path: str) -> None:
    """Connect a session, or say once why this process is left alone."""
    who = identity.here()
    if who is None:
        _say_once("not in a Slurm job: attach() does nothing")
    elif not os.access(Path(path).parent, os.X_OK):
        _say_once(f"no Cadenza agent on this host ({path}): attach() does nothing")
    else:
        _watch_forks()
        try:
            session.connect(path, who)
        except AgentRefusedError as error:
            _say_once(f"the Cadenza agent does not take this process, which runs as without it: {error}")


def _say_once(text: str) -> None:
    """Log one line a process."""
    if not _process.told:
        _process.told = True
        _log.warning(text)


def _watch_forks() -> None:
    """Make sure that a forked child, such as a loader's worker, has no part in its parent's session."""
    if not _process.fork_watched:
        _process.fork_watched = True
        os.register_at_fork(after_in_child=_forget_parent)


def _forget_parent() -> None:
    """In a forked child: leave the parent's session alone. Its inherited copy stays, inert."""
    if _process.session is not None:
        _process.session.abandon()
