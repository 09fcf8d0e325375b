"""The peers of the socket: connections taken and packets read within their budgets, root's before those of users."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import zmq

from cadenza.sidecar.agent.ipc.budgets import PacketBudgets
from cadenza.sidecar.agent.ipc.transport import Listener, Session
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

ATTACH_S = 5.0
"""Time that a user's connection has until it has attached."""
ACCEPTS_PER_TURN = 512
PACKETS_PER_TURN = 64
"""Packets of one peer that are read before the next peer's turn."""
USER_PACKETS_PER_TURN = 256
USER_S_PER_TURN = 0.05
"""Packets of all users in one pass of the event loop, and time for them; root's are read before them."""


@dataclass
class Peers:
    """All connections; ``privileged`` uids have no budget but the process's own descriptors.

    ``handle`` is called with each packet, ``lost`` with each connection that has ended.
    """

    listener: Listener
    poller: zmq.Poller
    clock: Clock
    privileged: frozenset[int]
    handle: Callable[[Session, bytes], None]
    lost: Callable[[Session], None]
    refused: Counter[int] = field(default_factory=Counter)
    """Connections beyond their budget, by uid."""
    _budgets: PacketBudgets = field(default_factory=PacketBudgets)
    _silenced: set[int] = field(default_factory=set)
    """Descriptors of peers that are not read until their budget has grown again."""
    _passes: int = 0

    def __post_init__(self) -> None:
        self.poller.register(self.listener.socket.fileno(), zmq.POLLIN)

    def serve(self, ready: Collection[int]) -> None:
        """Take new connections and read the packets of these descriptors that fit into the budgets."""
        # 1. New connections wait in one queue, so that root's may be behind those of users.
        if self.listener.socket.fileno() in ready:
            self._accept()
        # 2. Root's packets go first.
        sessions = [session for descriptor in ready if (session := self.listener.sessions.get(descriptor))]
        for session in sessions:
            if session.peer.uid in self.privileged:
                self._read(session, PACKETS_PER_TURN)
        # 3. Users' packets, each pass from another peer on.
        users = [session for session in sessions if session.peer.uid not in self.privileged]
        self._passes += 1
        first, left = self._passes % max(len(users), 1), USER_PACKETS_PER_TURN
        end = self.clock.monotonic() + USER_S_PER_TURN
        for session in (*users[first:], *users[:first]):
            if left <= 0 or self.clock.monotonic() > end:
                return
            left -= self._read_within_budget(session, min(PACKETS_PER_TURN, left))

    def tick(self) -> None:
        """End users' connections that have not attached in time, and hear silenced peers whose budget has grown."""
        now = self.clock.monotonic()
        for session in tuple(self.listener.sessions.values()):
            if not session.joined and now - session.since > ATTACH_S and session.peer.uid not in self.privileged:
                log.info(
                    "closed pid=%d uid=%d: not attached within %g s", session.peer.pid, session.peer.uid, ATTACH_S,
                    extra={"uid": session.peer.uid},
                )  # fmt: skip
                self.lose(session)
        for descriptor in tuple(self._silenced):
            if self._budgets.may_send(self.listener.sessions[descriptor].source, now):
                self._silenced.discard(descriptor)
                self.poller.register(descriptor, zmq.POLLIN)

    def lose(self, session: Session) -> None:
        """Forget a connection."""
        descriptor = session.sock.fileno()
        if self.listener.sessions.pop(descriptor, None) is not None:
            if descriptor in self._silenced:
                self._silenced.discard(descriptor)
            else:
                self.poller.unregister(descriptor)
            session.sock.close()
            self.lost(session)

    def _accept(self) -> None:
        """Take the connections that wait; those beyond their user's budget are closed at once."""
        counts = Counter(session.peer.uid for session in self.listener.sessions.values())
        for _ in range(ACCEPTS_PER_TURN):
            session = self.listener.accept(self.clock.monotonic())
            if session is None:
                return
            descriptor, uid = session.sock.fileno(), session.peer.uid
            files = self.listener.files
            if uid not in self.privileged and (counts[uid] >= files.per_user or files.is_reserved(descriptor)):
                self.refused[uid] += 1
                log.warning("connection refused uid=%d: it has %d", uid, counts[uid], extra={"uid": uid})
                del self.listener.sessions[descriptor]
                session.sock.close()
                continue
            counts[uid] += 1
            self.poller.register(descriptor, zmq.POLLIN)

    def _read_within_budget(self, session: Session, most: int) -> int:
        """Read at most so many packets of a user's peer, and return their number; without budget it is silenced."""
        source, count = session.source, 0
        while count < most:
            if not self._budgets.may_send(source, self.clock.monotonic()):
                # Read a peer no more until its budget has grown; what it sends waits in its own socket.
                descriptor = session.sock.fileno()
                if descriptor in self.listener.sessions and descriptor not in self._silenced:
                    self._silenced.add(descriptor)
                    self.poller.unregister(descriptor)
                return count
            size = self._read(session, 1)
            if not size:
                return count
            self._budgets.charge(source, size, self.clock.monotonic())
            count += 1
        return count

    def _read(self, session: Session, most: int) -> int:
        """Handle at most so many packets; return the bytes of the last one, 0 if there was none or the peer left."""
        size = 0
        for _ in range(most):
            packet = session.receive()
            size = len(packet or b"")
            if packet is None:
                break
            if not packet:
                self.lose(session)
                break
            self.handle(session, packet)
        return size
