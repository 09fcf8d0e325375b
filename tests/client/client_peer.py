"""A scripted agent: the real wire over a real socket, without the real agent's decisions."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cadenza.sidecar import wire

PATIENCE_S = 60.0


class Rank:
    """The agent's end of one rank: its page and its messages."""

    def __init__(
        self, connection: socket.socket, hello: dict[str, Any], answer: dict[str, Any], stop: int, purpose: int
    ) -> None:
        self.connection = connection
        self.hello = hello
        descriptor = os.memfd_create("page")
        os.ftruncate(descriptor, wire.PAGE_BYTES)
        self.page = memoryview(mmap.mmap(descriptor, wire.PAGE_BYTES)).cast("Q")
        self.page[wire.PAGE_STEP] = hello["step"]
        self.page[wire.PAGE_PURPOSE] = purpose
        self.page[wire.PAGE_ORDER], self.page[wire.PAGE_STOP] = 1, stop
        packet = wire.encode("attached", **answer, rank=hello["rank"])
        socket.send_fds(connection, [packet], [descriptor])
        os.close(descriptor)

    @property
    def step(self) -> int:
        return self.page[wire.PAGE_STEP]

    def say(self, kind: str, **fields: Any) -> None:
        self.connection.send(wire.encode(kind, **fields))

    def hear(self, kind: str) -> dict[str, Any]:
        """Return the next message, which must be of this kind; why a job is not ready is said at any time."""
        while True:
            packet = self.connection.recv(wire.MAX_PACKET)
            assert packet, f"{kind} expected, the rank has gone"
            message = wire.decode(packet)
            if kind == "unready" or message["type"] != "unready":
                break
        assert message["type"] == kind, message
        return message

    def stop_at(self, step: int, order: int) -> None:
        """Write the stop into the page and then send it, in the agent's order."""
        self.page[wire.PAGE_ORDER] = order
        self.page[wire.PAGE_STOP] = step
        self.say("stop", order=order, step=step)

    def clear(self) -> None:
        self.page[wire.PAGE_STOP] = 0

    def gone(self) -> bool:
        """Return whether the rank has closed its end."""
        return self.connection.recv(wire.MAX_PACKET) == b""


class Peer:
    """Listener in place of an agent; ``rank()`` accepts the next rank that attaches."""

    def __init__(self, path: Path, answer: str = "held") -> None:
        self.path = path
        self.answer = answer
        self.reason = ""
        self.receipt: dict[str, Any] | None = {}
        """Receipt that a rank hears of; empty: it has to find nothing; None: that is not known yet."""
        self._open: list[socket.socket] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        self._socket.bind(str(path))
        self._socket.listen(16)

    def rank(self, stop: int = 0, purpose: int = wire.PURPOSE_YIELD) -> Rank:
        """Take the next rank, with a first order in its page when ``stop`` is a step."""
        connection, _ = self._socket.accept()
        connection.settimeout(PATIENCE_S)
        self._open.append(connection)
        hello = wire.decode(connection.recv(wire.MAX_PACKET))
        assert hello["type"] == "attach"
        answer = {"state": self.answer, "reason": self.reason, "receipt": self.receipt}
        return Rank(connection, hello, answer, stop, purpose)

    def refuse(self, why: str) -> None:
        """Answer the next attach by an error."""
        connection, _ = self._socket.accept()
        connection.recv(wire.MAX_PACKET)
        connection.send(wire.encode("error", error=why))
        connection.close()

    def die(self) -> None:
        """Vanish like a killed agent: the socket file stays, every connection ends."""
        for connection in self._open:
            connection.close()
        self._socket.close()

    def come_back(self, answer: str = "held") -> Peer:
        """Return a new agent at the same place."""
        self.path.unlink()
        return Peer(self.path, answer)


class Script(threading.Thread):
    """Agent's actions while the main thread is the job; ``finish()`` returns their result or raises their error."""

    def __init__(self, script: Callable[[], Any], peer: Peer) -> None:
        super().__init__(daemon=True)
        self._script, self._peer = script, peer
        self._result: Any = None
        self._failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            self._result = self._script()
        except BaseException as error:  # noqa: BLE001 - handed to the test by finish()
            self._failures.put(error)
            self._peer.die()

    def finish(self) -> Any:
        self.join(PATIENCE_S)
        with contextlib.suppress(queue.Empty):
            raise self._failures.get_nowait()
        assert not self.is_alive()
        return self._result


class Turns:
    """Stops of the ranks at the given steps: commit, ``while_away(cycle)``, resume."""

    def __init__(
        self, peer: Peer, steps: Sequence[int], ranks: int = 1, while_away: Callable[[int], None] | None = None
    ) -> None:
        self._peer, self._steps, self._ranks = peer, list(steps), ranks
        self._while_away = while_away or (lambda cycle: None)
        self.arrived: list[dict[str, Any]] = []
        self.yielded: list[dict[str, Any]] = []
        self.finish = Script(self._run, peer).finish

    def _run(self) -> None:
        ranks = [self._peer.rank(stop=self._steps[0]) for _ in range(self._ranks)]
        self.pages = [rank.page for rank in ranks]
        for order in range(1, len(self._steps) + 1):
            self._cycle(ranks, order)

    def _order(self, ranks: list[Rank], order: int) -> None:
        """Give the next order, if there is one, before the ranks continue, so that no rank passes the step."""
        for rank in ranks:
            if order <= len(self._steps):
                rank.stop_at(self._steps[order - 1], order)
            else:
                rank.clear()

    def _cycle(self, ranks: list[Rank], order: int) -> None:
        self.arrived += [rank.hear("arrived") for rank in ranks]
        for rank in ranks:
            rank.say("commit", order=order)
        self.yielded += [rank.hear("yielded") for rank in ranks]
        self._while_away(order)
        self._order(ranks, order + 1)
        for rank in ranks:
            rank.say("resume", order=order)
        for rank in ranks:
            rank.hear("resumed")


@contextlib.contextmanager
def running(*commands: Sequence[str], envs: Sequence[dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Run commands and kill them at the end: a rank without a lease would wait forever."""
    jobs = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        for command, env in zip(commands, envs, strict=True)
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


def slurm_environment(path: Path, **others: str) -> dict[str, str]:
    """Return the environment of a job's process, without that of a surrounding job."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CADENZA_"))}
    return {**kept, "SLURM_JOB_ID": "4711", wire.SOCKET_ENV: str(path), **others}
