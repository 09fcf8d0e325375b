"""The agent's end of the helper process: starts it when needed, restarts it after its death, never waits for it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cadenza.sidecar.agent.driver.protocol import MAX_PACKET, Called, Hello, Inspection, Reply, Request
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Time allowed to a helper until its first message: it waits for the helper before it, and for cuInit."""
MAX_RESTART_PAUSE_S = 300.0
"""Longest pause before a failed helper is started again."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The helper has ended, or could not be used."""

    reason: str


@dataclass
class Channel:
    """One helper at a time. ``lock`` is the file that keeps two helpers of a host apart."""

    clock: Clock
    lock: Path
    watch: Callable[[int, bool], None]
    """Called with the descriptor of each new helper and True, and with False before it is closed."""
    ready: bool = False
    """A helper has reported that it can call the driver."""
    problem: str = ""
    """Lack of the machine, as the last helper reported it."""
    driver: str = ""
    """The driver's version, as the last helper reported it."""
    _sock: socket.socket | None = None
    _process: subprocess.Popen[bytes] | None = None
    _queue: list[Request] = field(default_factory=list)
    _failures: int = 0
    _start_at: float = float("-inf")
    _started: float = 0.0
    _gone: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _encode: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    _decoder: msgspec.msgpack.Decoder[Reply] = field(default_factory=lambda: msgspec.msgpack.Decoder(Reply))

    def ask(self, request: Request) -> None:
        """Queue a request until a helper is ready."""
        self._queue.append(request)

    def keep_up(self) -> Lost | None:
        """Start a helper if there is none and its time has come; end one that does not get ready."""
        self._gone = [one for one in self._gone if one.poll() is None]
        now = self.clock.monotonic()
        if self._sock is None:
            return self._start(now) if now >= self._start_at else None
        if not self.ready and now - self._started > START_TIMEOUT_S:
            return self.end(f"it was not ready after {START_TIMEOUT_S:g} s")
        return None

    def _start(self, now: float) -> Lost | None:
        """Start a helper, a process of its own, so that a fault in the driver does not hit the agent."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-m", "cadenza.sidecar.agent.driver.helper", str(self.lock)]
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._started = now
        try:
            with theirs:
                stdin = theirs.fileno()
                # Signals to the agent's process group must not cut off a copy, which would spoil its process.
                self._process = subprocess.Popen(command, stdin=stdin, env=env, cwd="/", start_new_session=True)
        except OSError as error:
            ours.close()
            return self._failed(str(error))
        ours.setblocking(False)  # noqa: FBT003
        self._sock = ours
        self.watch(ours.fileno(), True)  # noqa: FBT003
        return None

    def flush(self) -> Lost | None:
        """Send the queued requests, if a helper is ready."""
        if not self.ready or self._sock is None:
            return None
        queue, self._queue = self._queue, []
        try:
            for request in queue:
                self._sock.send(self._encode.encode(request))
        except OSError as error:
            return self.end(f"it takes no requests: {error}")
        return None

    def receive(self) -> list[Inspection | Called | Lost]:
        """Return the helper's replies; Lost is the last if it has ended."""
        replies: list[Inspection | Called | Lost] = []
        while self._sock is not None:
            try:
                packet = self._sock.recv(MAX_PACKET)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                replies.append(self.end(self.problem or "it ended"))
                break
            reply = self._decoder.decode(packet)
            if isinstance(reply, Hello):
                self._greeted(reply)
            else:
                replies.append(reply)
        return replies

    def _greeted(self, hello: Hello) -> None:
        """Record the abilities of the helper; a lack is logged once."""
        if hello.problem and hello.problem != self.problem:
            log.warning("driver path: off: %s", hello.problem)
        self.problem, self.ready, self.driver = hello.problem, not hello.problem, hello.driver
        if self.ready:
            self._failures = 0
            version = f"{hello.cuda // 1000}.{hello.cuda % 1000 // 10}"
            log.info("driver path: ready, CUDA %s, helper pid=%d", version, self._process.pid if self._process else 0)

    def end(self, reason: str) -> Lost:
        """End the helper at once and return the loss."""
        self.close()
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._gone.append(self._process)
            self._process = None
        return self._failed(reason)

    def _failed(self, reason: str) -> Lost:
        """Record a failure; queued requests are void, and each failure delays the next start more."""
        if reason != self.problem:
            log.warning("driver path: the helper is lost: %s", reason)
        self.ready = False
        self._queue.clear()
        self._start_at = self.clock.monotonic() + min(2.0**self._failures - 1, MAX_RESTART_PAUSE_S)
        self._failures += 1
        return Lost(f"the helper of the driver path is lost: {reason}")

    def close(self) -> None:
        """Disconnect the helper: it unlocks locked processes, finishes its operations, and ends by itself."""
        if self._sock is not None:
            self.watch(self._sock.fileno(), False)  # noqa: FBT003
            self._sock.close()
            self._sock = None
