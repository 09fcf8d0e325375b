"""A stand-in for the agent: it registers the command's ranks, gives each a page, and never stops one."""

from __future__ import annotations

import logging
import selectors
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.policies.core.text import printable
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.messages import Attach, Detach, parse
from cadenza.sidecar.agent.ipc.pages import Page, PageRecord
from cadenza.sidecar.agent.ipc.transport import Listener, Outbox, Session

log = logging.getLogger(__name__)


@dataclass
class Rank:
    """One attached process and the page that it counts in."""

    pid: int
    rank: int
    local: int
    """Ranks that the job has on this node."""
    page: Page


class AgentStub:
    """The socket at ``path`` in a private directory, and the ranks that have attached to it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cadenza-profile-")
        self._listener = Listener(Path(self._folder.name) / "agent.sock")
        self._outbox = Outbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.socket, selectors.EVENT_READ)
        self.ranks: dict[int, Rank] = {}
        """By pid."""
        self.attached = False
        """A rank has attached since the last command began."""
        self._tuning: tuple[float, int | None] | None = None

    @property
    def path(self) -> Path:
        """Return the socket's path, for CADENZA_SOCKET."""
        return self._listener.path

    def close(self) -> None:
        """Close everything; attached processes run on without."""
        self.forget()
        self._selector.close()
        self._listener.close()
        self._folder.cleanup()

    def forget(self) -> None:
        """Let go of all ranks: their command is over."""
        for rank in self.ranks.values():
            rank.page.close()
        self.ranks.clear()
        self.attached = False

    def tune(self, cpus: float, cache_mb: int | None = None) -> None:
        """Tell every rank, also one that attaches later, what the job has: CPUs, and MiB for caches (None: no word)."""
        self._tuning = (cpus, cache_mb)
        for rank in self.ranks.values():
            rank.page.tune(cpus, cache_mb)

    def wait(self, seconds: float) -> None:
        """Serve the socket until it has something, at most so long."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                session = self._listener.accept()
                if session is not None:
                    self._selector.register(session.sock, selectors.EVENT_READ, session)
            else:
                self._hear(key.data)
        for session in self._outbox.flush():
            self._part(session)

    def records(self) -> dict[int, PageRecord]:
        """Return each rank's counters by pid; one that was being written is left out."""
        records = {pid: rank.page.record() for pid, rank in self.ranks.items()}
        return {pid: record for pid, record in records.items() if record is not None}

    def complete(self) -> bool:
        """Return whether every local rank has attached and made a step."""
        # Ranks attach one after the other, and a step of those that are there waits for the others.
        expected = max((rank.local for rank in self.ranks.values()), default=1)
        records = self.records()
        return len(records) >= expected and all(record.iterations for record in records.values())

    def _hear(self, session: Session) -> None:
        """Act on one packet of a process."""
        packet = session.receive()
        if packet is None:
            return
        if not packet:
            self._part(session)
            return
        try:
            self._act(session, parse(packet))
        except wire.WireError as error:
            log.warning("refused pid=%d: %s", session.peer.pid, printable(str(error)))
            self._outbox.post(session, "error", error=str(error))

    def _act(self, session: Session, message: Any) -> None:
        """Take a rank in, or let it go; other messages answer orders, and this gives none."""
        pid = session.peer.pid
        if isinstance(message, Attach):
            self._drop(pid)
            self.attached = True
            page = Page()
            page.start_at(message.step)
            if self._tuning is not None:
                page.tune(*self._tuning)
            local = message.local_world_size or (message.world_size if message.hosts == 1 else 1)
            self.ranks[pid] = Rank(pid, message.rank, local, page)
            self._outbox.post(session, "attached", fds=(page.fd,), state="held", rank=message.rank, receipt={})
        elif isinstance(message, Detach):
            self._drop(pid)

    def _drop(self, pid: int) -> None:
        rank = self.ranks.pop(pid, None)
        if rank is not None:
            rank.page.close()

    def _part(self, session: Session) -> None:
        """Close a connection; its process is no rank any more."""
        self._selector.unregister(session.sock)
        self._listener.sessions.pop(session.sock.fileno(), None)
        session.sock.close()
        self._drop(session.peer.pid)
