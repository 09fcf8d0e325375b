"""The Unix socket: a session for each connection, and an outbox that is sent only after the leases are on disk."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import printable
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.budgets import file_budget
from cadenza.sidecar.agent.ipc.processes import Peer, peer_of
from cadenza.sidecar.bounds import MAX_TEXT

log = logging.getLogger(__name__)

BACKLOG = 512


@dataclass(eq=False)
class Session:
    """One connected peer, and its job once known."""

    sock: socket.socket
    peer: Peer
    key: JobKey | None = None
    """Job that it attached to or waits for."""
    since: float = 0.0
    """Monotonic time at which it connected."""
    joined: bool = False
    """It has attached, or registered a job, at least once."""

    @property
    def source(self) -> Hashable:
        """The owner of the budget that its packets come from: its job, or its user while it has none."""
        return self.key or self.peer.uid

    def receive(self) -> bytes | None:
        """Return the next packet, b"" at the end, None if there is nothing to read."""
        try:
            return self.sock.recv(wire.MAX_PACKET + 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # raised once if the peer left packets unread; its own last packets follow
            return self.receive()
        except OSError:
            return b""


@dataclass
class Outbox:
    """Packets that wait for the end of the pass: no peer hears of a lease before it is on disk."""

    _queue: list[tuple[Session, bytes, tuple[int, ...], bool]] = field(default_factory=list)

    def post(
        self,
        session: Session | None,
        kind: str,
        *,
        fds: tuple[int, ...] = (),
        last: bool = False,
        **fields: Any,
    ) -> None:
        """Queue one packet; ``last`` closes the connection behind it. Without a session nothing happens.

        Text is cut, so that each packet fits.
        """
        if session is not None:
            short = {
                name: printable(value, MAX_TEXT) if isinstance(value, str) else value for name, value in fields.items()
            }
            packet = wire.encode(kind, **short)
            copies = tuple(os.dup(fd) for fd in fds)  # the number may belong to another file by then
            self._queue.append((session, packet, copies, last))

    def flush(self) -> list[Session]:
        """Send everything, and return the sessions that are lost or done for the caller to close."""
        queue, self._queue = self._queue, []
        gone: dict[int, Session] = {}
        for session, packet, fds, last in queue:
            if id(session) not in gone and (not _send(session, packet, fds) or last):
                gone[id(session)] = session
            for fd in fds:
                os.close(fd)
        return list(gone.values())


def _send(session: Session, packet: bytes, fds: tuple[int, ...]) -> bool:
    """Send one packet without waiting; return False if the peer has stopped reading.

    A peer that has gone may have sent last packets: they are read first, and the end of the connection after them.
    """
    try:
        if fds:
            socket.send_fds(session.sock, [packet], list(fds))
        else:
            session.sock.send(packet)
    except (BrokenPipeError, ConnectionResetError):
        return True
    except OSError as error:
        log.info("peer lost pid=%d: %s", session.peer.pid, error, extra={"uid": session.peer.uid})
        return False
    return True


class Listener:
    """The listening socket and its open sessions, by file descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: dict[int, Session] = {}
        self.files = file_budget()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # bind(2) refuses a name that exists, and a killed agent leaves its own.
            path.unlink(missing_ok=True)
            self.socket.bind(str(path))
            # connect(2) needs the right to write. The kernel tells who connects, so that the file's mode need not.
            path.chmod(0o666)
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            raise EnvironmentLacks(f"socket {path}: {error.strerror or error}") from None

    def accept(self, now: float = 0.0) -> Session | None:
        """Return a new session that began at the monotonic time ``now``, or None if there is none."""
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return None
        connection.setblocking(False)  # noqa: FBT003
        session = Session(connection, peer_of(connection), since=now)
        self.sessions[connection.fileno()] = session
        return session

    def close(self) -> None:
        """Close all connections and remove the socket."""
        for session in self.sessions.values():
            session.sock.close()
        self.socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
