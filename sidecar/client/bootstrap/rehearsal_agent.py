"""The agent of a rehearsal: it starts a command, orders one checkpoint from all ranks, and kills them after it."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.sidecar import wire
from cadenza.sidecar.client.clock import monotonic_ns

TICK_S = 0.005
"""Longest time between two looks at the command."""
GRACE_S = 0.2
"""Time after which a rank that has not arrived while another one stands has slipped past the stop step."""
END_S = 30.0
"""Longest wait for killed processes; one that hangs in a file system is left."""
SILENCE_S = 600.0
"""Longest time in which a command neither steps nor talks."""


@dataclass
class Outcome:
    """The end of one start of the command."""

    status: int | None = None
    """Exit status; None if the rehearsal ended it."""
    saved: dict[str, Any] | None = None
    """The answer of rank 0 about the ordered checkpoint, if there was one from all ranks."""
    reasons: list[str] = field(default_factory=list)
    """Reasons why an order came to nothing, each once."""
    silent: bool = False
    """It was ended because nothing happened for SILENCE_S."""
    arrived: set[int] = field(default_factory=set)
    """Ranks that have restored what the receipt names."""
    unrestored: str = ""
    """The reason that a rank gave why it trains without."""
    passed: int = 0
    """Why the last boundary was no save point (``PASSED_…``)."""
    boundaries: int = 0
    """Boundaries that all ranks passed."""


@dataclass
class _Rank:
    connection: socket.socket
    page: memoryview
    hello: dict[str, Any]
    arrived: int = 0
    """The boundary at which it stands; 0: none."""
    answer: dict[str, Any] | None = None

    @property
    def number(self) -> int:
        return int(self.hello["rank"])

    @property
    def slipped(self) -> bool:
        """True if it has passed its stop step and does not stand."""
        page = self.page
        return not self.arrived and 0 < page[wire.PAGE_STOP] <= page[wire.PAGE_STEP]


class ScriptedAgent:
    """The agent of one start of a command: ``order_at`` is the boundary of its order, 0 for none.

    ``receipt`` is the requested checkpoint that this start has to find, empty for none (see the wire format).
    """

    def __init__(self, socket_path: Path, order_at: int, receipt: Mapping[str, Any]) -> None:
        self._path, self._order_at, self._order = socket_path, order_at, 0
        self._stands = False
        """An order is under way."""
        self._receipt = dict(receipt)
        self._ranks: dict[int, _Rank] = {}
        self._heard_ns = monotonic_ns()
        self.outcome = Outcome()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(socket_path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], output: Path, progress: Callable[[], int], enough: int
    ) -> Outcome:
        """Start a command; return once it has ended, was moved, or has made ``enough`` progress; then none is left."""
        with output.open("ab") as sink:
            process = subprocess.Popen(
                command, env=dict(environ), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        made = 0
        try:
            while self.outcome.saved is None:
                if (status := process.poll()) is not None:
                    self.outcome.status = status
                    break
                self._listen()
                self._look()
                before, made = made, progress()
                if made != before:
                    self._heard_ns = monotonic_ns()
                self.outcome.silent = monotonic_ns() - self._heard_ns > SILENCE_S * 1e9
                if made >= enough or self.outcome.silent:
                    break
        finally:
            end_all(self._path)
            process.wait()
            self._selector.close()
            self._listener.close()
            for rank in self._ranks.values():
                rank.connection.close()
        return self.outcome

    def _look(self) -> None:
        """Look at the pages of the ranks, and give the order once all can save, or raise the one that stands.

        Ranks that cannot are ordered once to, so that the reason is heard.
        """
        ranks = list(self._ranks.values())
        if not ranks:
            return
        steps = [rank.page[wire.PAGE_STEP] for rank in ranks]
        self.outcome.boundaries, self.outcome.passed = min(steps), ranks[0].page[wire.PAGE_PASSED]
        if not self._order_at or len(ranks) < ranks[0].hello["world_size"]:
            return
        if self._stands:
            slipped = [rank.slipped for rank in ranks]
            if any(slipped) and not all(slipped) and monotonic_ns() - self._heard_ns > GRACE_S * 1e9:
                self._order_stop(max(steps) + 1)
        elif all(rank.page[wire.PAGE_SAVES] for rank in ranks):
            self._order += 1
            self._order_stop(max(self._order_at, max(steps) + 1))
        elif not self.outcome.reasons and min(steps) >= self._order_at:
            self._order += 1
            self._order_stop(max(steps) + 1)

    def _listen(self) -> None:
        """Take in what the ranks say, for a tick."""
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)

    def _accept(self) -> None:
        """Take a new connection; its first packet makes it a rank."""
        connection, _ = self._listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _hear(self, connection: socket.socket) -> None:
        """Read one packet of a connection, and act."""
        packet = b""
        with contextlib.suppress(OSError):
            packet = connection.recv(wire.MAX_PACKET)
        rank = next((one for one in self._ranks.values() if one.connection is connection), None)
        if not packet:
            self._selector.unregister(connection)
            if rank is None:
                connection.close()
            else:
                del self._ranks[rank.number]
            return
        self._heard_ns = monotonic_ns()
        message = wire.decode(packet)
        with contextlib.suppress(OSError):  # a rank that has gone is found by the next read
            if message["type"] == "attach":
                self._attach(connection, message)
            elif rank is not None:
                self._answer(rank, message)

    def _attach(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Give a rank its page."""
        descriptor = os.memfd_create("page")
        try:
            os.ftruncate(descriptor, wire.PAGE_BYTES)
            page = memoryview(mmap.mmap(descriptor, wire.PAGE_BYTES)).cast("Q")
            page[wire.PAGE_STEP], page[wire.PAGE_PURPOSE] = hello["step"], wire.PURPOSE_CHECKPOINT
            packet = wire.encode("attached", state="held", rank=hello["rank"], receipt=self._receipt)
            socket.send_fds(connection, [packet], [descriptor])
        finally:
            os.close(descriptor)
        self._ranks[int(hello["rank"])] = _Rank(connection, page, hello)

    def _answer(self, rank: _Rank, message: dict[str, Any]) -> None:
        """Act on what a rank says."""
        kind, current = message["type"], message.get("order") == self._order
        if kind == "requeued_by" and message.get("owner"):
            self._note(f"{message['owner']} requeues this job by itself")
        elif kind == "unready" and message.get("reason") and self.outcome.reasons:
            self._note(str(message["reason"]))  # the one that an order has met may have gone since
        elif kind == "restored":
            self.outcome.arrived.add(rank.number)
        elif kind == "unrestored":
            self.outcome.unrestored = str(message.get("reason", ""))
        elif kind == "arrived" and current and message.get("refused"):
            self._note(str(message["refused"]))
            self._withdraw()
        elif kind == "arrived" and current:
            rank.arrived = int(message["step"])
            self._gather(list(self._ranks.values()), rank.hello["world_size"])
        elif kind == "checkpointed" and current:
            rank.answer = message
            self._conclude(list(self._ranks.values()))

    def _gather(self, ranks: Sequence[_Rank], world_size: int) -> None:
        """Let the ranks save once all stand at one boundary; those behind the furthest go on to it."""
        furthest = max(one.arrived for one in ranks)
        if len(ranks) == world_size and all(one.arrived == furthest for one in ranks):
            self._say(ranks, "commit")
            return
        if any(0 < one.arrived < furthest for one in ranks):
            self._order_stop(furthest)

    def _conclude(self, ranks: Sequence[_Rank]) -> None:
        """End the order once all ranks have answered; give another one if the checkpoint failed."""
        answers = [one.answer for one in ranks if one.answer is not None]
        if len(answers) < len(ranks):
            return
        errors = [str(answer["error"]) for answer in answers if answer.get("error")]
        for error in errors:
            self._note(error)
        if errors:
            self._withdraw()
        else:
            self.outcome.saved = min(ranks, key=lambda one: one.number).answer

    def _order_stop(self, step: int) -> None:
        """Order a checkpoint at the first boundary from a step on, or move the order that stands to it."""
        self._stands = True
        later = [rank for rank in self._ranks.values() if rank.arrived < step]
        for rank in later:
            rank.arrived, rank.answer = 0, None
            rank.page[wire.PAGE_ORDER], rank.page[wire.PAGE_STOP] = self._order, step
        self._say(later, "stop", step=step)

    def _withdraw(self) -> None:
        """Withdraw the order; another one follows once all ranks can save."""
        self._stands = False
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.arrived, rank.answer, rank.page[wire.PAGE_STOP] = 0, None, 0
        self._say(ranks, "cancel", reason="it came to nothing")

    def _say(self, ranks: Sequence[_Rank], kind: str, **fields: object) -> None:
        for rank in ranks:
            rank.connection.send(wire.encode(kind, order=self._order, **fields))

    def _note(self, reason: str) -> None:
        if reason not in self.outcome.reasons:
            self.outcome.reasons.append(reason)


def end_all(socket_path: Path) -> None:
    """Kill all processes whose environment names a socket, and so all of a command, wherever they went."""
    mark = f"{wire.SOCKET_ENV}={socket_path}".encode()
    began = monotonic_ns()
    while (found := _with_environment(mark)) and monotonic_ns() - began < END_S * 1e9:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        threading.Event().wait(TICK_S)


def _with_environment(mark: bytes) -> list[int]:
    """Return the processes that have a variable in their environment, without those that are ending."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
