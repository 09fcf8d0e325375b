"""The socket to the node's agent: one daemon thread listens, and reconnects after the agent was lost."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cadenza.sidecar import wire
from cadenza.sidecar.client.errors import AgentRefusedError, LinkLostError
from cadenza.sidecar.client.session.step_page import STOP, map_page

HANDSHAKE_S = 5.0
"""Longest wait for a live agent's answer to ``attach``."""
JOIN_S = 2.0
"""Longest wait for the thread when the link closes."""
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 5.0
"""Bounds of the delay between attempts to reach a lost agent; it doubles each time."""

Message = dict[str, Any]

_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Reply:
    """An agent's answer to ``attach``: the rank's page, and whether the job holds its lease."""

    words: memoryview
    held: bool
    reason: str = ""
    """Reason of the wait for a lease that the job does not hold."""


class Link:
    """One rank's connection. ``steady`` is held while the state moves, so that ``attach`` reports no half move.

    ``greeting`` returns the fields of an ``attach`` message; it is called with ``steady`` held. ``words`` is
    the rank's page until an agent gives one. ``heed`` is called with each message as it comes, in any thread; it
    returns True for those that no boundary waits for. ``losses`` counts lost connections: messages from before a loss
    are void after it.
    """

    def __init__(
        self, path: str, greeting: Callable[[], Message], words: memoryview, heed: Callable[[Message], bool]
    ) -> None:
        self._path = path
        self._greeting = greeting
        self._heed = heed
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._reply: Reply | None = None
        self._page = words
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="cadenza-link", daemon=True)
        self.steady = threading.Lock()
        self.losses = 0

    @property
    def alive(self) -> bool:
        """True while there is a connection."""
        return self._socket is not None

    def open(self) -> Reply | None:
        """Connect and start listening; return None when no agent answers yet: the thread then waits for one.

        Raises AgentRefusedError when there is an agent and it does not accept this process.
        """
        reply: Reply | None = None
        with contextlib.suppress(LinkLostError):
            reply = self._attach()
            self._page = reply.words
        # A thread that outlives the interpreter may be collecting torch's garbage, which aborts the process.
        atexit.register(self.close)
        self._thread.start()
        return reply

    def take_reply(self) -> Reply | None:
        """Return the answer of an agent that was reached again, once."""
        reply, self._reply = self._reply, None
        return reply

    def send(self, kind: str, *, since: int | None = None, **fields: Any) -> bool:
        """Send one message; return False when the link is lost, or was lost after ``losses`` was ``since``."""
        connection = self._socket
        if connection is None or (since is not None and since != self.losses):
            return False
        try:
            # An agent that hangs must not hold up a training step, and a script may give SIGPIPE its default back.
            connection.send(wire.encode(kind, **fields), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (OSError, wire.WireError) as error:
            _log.debug("%s not sent: %s", kind, error)
            return False
        return True

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message; return None after the time-out.

        Two messages are the link's own: ``lost`` and, when the agent is back, ``attached``.
        """
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def forget(self) -> None:
        """Drop unread messages: they belong to an order, or to a connection, that is over."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()

    def close(self) -> None:
        """End the connection and the thread; it also runs at exit."""
        atexit.unregister(self.close)
        self._drop()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _drop(self) -> None:
        """End the connection; the thread ends by itself then."""
        self._closed.set()
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                # close(2) alone does not wake a thread that stands in recv(2) on the same descriptor.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def abandon(self) -> None:
        """Close the descriptor without a message: for a forked child, whose parent owns the link."""
        atexit.unregister(self.close)
        self._closed.set()
        connection, self._socket = self._socket, None
        if connection is not None:
            # Parent and child share the open socket: shutdown(2) here would end the parent's connection.
            os.close(connection.detach())

    def _attach(self) -> Reply:
        """Connect and present this rank; raise LinkLostError or AgentRefusedError."""
        # SOCK_SEQPACKET keeps the bounds of messages and shows the end of the peer (unix(7)).
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(HANDSHAKE_S)
            connection.connect(self._path)
            with self.steady:
                connection.send(wire.encode("attach", **self._greeting()))
                reply = self._answer(connection)
            connection.settimeout(None)
        except (OSError, wire.WireError) as error:
            connection.close()
            raise LinkLostError(f"{self._path}: {error}") from None
        except BaseException:
            connection.close()
            raise
        self._socket = connection
        return reply

    def _answer(self, connection: socket.socket) -> Reply:
        """Wait for the answer to ``attach``; messages before it are kept for the boundary."""
        while True:
            packet, descriptors, _, _ = socket.recv_fds(connection, wire.MAX_PACKET, 1)
            message = wire.decode(packet) if packet else {"type": "eof"}
            heeded = self._heed(message)
            if message["type"] == "attached" and descriptors:
                return Reply(map_page(descriptors[0]), message.get("state") == "held", str(message.get("reason", "")))
            # SCM_RIGHTS opens the descriptors of each packet in this process, also of one that nothing here waits for.
            for descriptor in descriptors:
                os.close(descriptor)
            if message["type"] == "error":
                raise AgentRefusedError(str(message.get("error", "no reason given")))
            if not packet:
                raise LinkLostError("the agent closed the connection")
            if not heeded:
                self._inbox.put(message)

    def _serve(self) -> None:
        """Listen, and reconnect after each loss, until closed."""
        while not self._closed.is_set():
            connection = self._socket
            if connection is None:
                self._reconnect()
                continue
            self._listen(connection)
            if self._closed.is_set():
                return
            self._socket = None
            self.losses += 1
            connection.close()
            self.forget()
            self._inbox.put({"type": "lost"})
            _log.info("lost the Cadenza agent; this job continues and waits for it to come back")

    def _listen(self, connection: socket.socket) -> None:
        """Put messages where the boundary finds them, until the connection ends."""
        while True:
            try:
                packet = connection.recv(wire.MAX_PACKET)
                if not packet:
                    return
                message = wire.decode(packet)
                if message["type"] == "error":
                    _log.warning("the Cadenza agent refused a message of this process: %s", message.get("error"))
                elif not self._heed(message):
                    self._inbox.put(message)
            except wire.WireError as error:
                _log.warning("a message of the Cadenza agent was ignored: %s", error)
            except OSError:
                return

    def _reconnect(self) -> None:
        """Try until the agent accepts this rank again, or until closed."""
        delay_s = FIRST_DELAY_S
        warned = False
        while not self._closed.wait(delay_s):
            delay_s = min(2 * delay_s, LAST_DELAY_S)
            try:
                reply = self._attach()
            except LinkLostError:
                continue
            except AgentRefusedError as error:
                if not warned:
                    _log.warning("the Cadenza agent does not accept this process, retrying: %s", error)
                warned = True
                continue
            if self._closed.is_set():
                self._drop()
                return
            # Leave the new page for the boundary, and wake it through the page that it still reads.
            self._reply = reply
            self._inbox.put({"type": "attached"})
            old, self._page = self._page, reply.words
            old[STOP] = 1
            return
