"""Keeps one worker process: starts it, bounds its answers, replaces it when it hangs, dies or grows old."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.policies.core.errors import CadenzaError, EnvironmentLacks
from cadenza.sidecar.clock import monotonic
from cadenza.slurm_plugin.errors import ActionRefused, StaleState, WorkerHung, WorkerLost
from cadenza.slurm_plugin.gateway.slurm_errno import slurm_error

REPEATABLE = frozenset({"ping", "read", "look"})
"""Requests that change nothing, so that they may be sent again after a crash."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Command, environment and limits of the worker; times in seconds."""

    command: tuple[str, ...] = (sys.executable, "-m", "cadenza.slurm_plugin.gateway.worker")
    environment: Mapping[str, str] | None = None
    """None: ours."""
    start_timeout_s: float = 30.0
    request_timeout_s: float = 30.0
    """Three times Slurm's default MessageTimeout."""
    max_requests: int = 5000
    """A worker is replaced after this many answers, because pyslurm leaks memory."""


class WorkerProcess:
    """One child and our end of its socket. Not thread-safe."""

    def __init__(self, settings: WorkerSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [*settings.command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=None if settings.environment is None else dict(settings.environment),
                start_new_session=True,
            )
        self._channel = ours
        self._buffer = bytearray()
        self.answered = 0
        try:
            first = self._line(settings.start_timeout_s, "to start")
            if "lacks" in first:
                raise EnvironmentLacks(f"{first['lacks']}; build it for this Slurm, see docs/install.md")
            self.greeting: dict[str, Any] = dict(first["greeting"])
        except CadenzaError:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to ``request``; WorkerLost when there is none, or not within ``timeout_s``."""
        number = self.answered + 1
        try:
            self._channel.sendall(json.dumps({**request, "id": number}).encode() + b"\n")
        except OSError as error:
            raise self._lost("took no request") from error
        answer = self._line(timeout_s, f"to {request['op']}")
        if answer.get("id") != number:
            raise WorkerLost(f"the worker answered request {answer.get('id')} instead of {number}")
        self.answered = number
        return answer

    def _line(self, timeout_s: float, doing: str) -> dict[str, Any]:
        deadline = monotonic() + timeout_s
        while not self._buffer.endswith(b"\n"):
            left = deadline - monotonic()
            if left <= 0:
                raise WorkerHung(f"the worker took over {timeout_s:g} s {doing}; is slurmctld overloaded?")
            self._receive(left, doing)
        line, self._buffer = bytes(self._buffer), bytearray()
        try:
            message = json.loads(line)
        except ValueError as error:
            raise WorkerLost(f"the worker answered nonsense: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise WorkerLost(f"the worker answered nonsense: {line[:80]!r}")
        return message

    def _receive(self, timeout_s: float, doing: str) -> None:
        self._channel.settimeout(timeout_s)
        try:
            chunk = self._channel.recv(1 << 20)
        except TimeoutError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            raise self._lost(f"died while it was asked {doing}")
        self._buffer += chunk

    def _lost(self, event: str) -> WorkerLost:
        """Return the error with the end of the child, which takes a moment after its socket closed."""
        try:
            code = self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return WorkerLost(f"the worker {event}: it closed its socket")
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return WorkerLost(f"the worker {event}: {end}; see its messages in this program's error output")

    def kill(self) -> None:
        """Kill the child and its own children."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


class Supervisor:
    """Asks a worker, started at the first request and replaced when needed. Thread-safe, one at a time."""

    def __init__(self, settings: WorkerSettings | None = None) -> None:
        self._settings = settings or WorkerSettings()
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self.started = 0
        """Number of workers started so far; more than a few a day deserve a look."""

    def ask(self, description: str, op: str, **arguments: Any) -> Any:
        """Return the result of one request, which errors call by its description.

        Raises the GatewayError that names who must act. A request that was lost with its worker may or may not
        have reached Slurm; one that changes nothing is sent once more, unless the worker hung.
        """
        request = {"op": op, **arguments}
        with self._lock:
            try:
                answer = self._ask(request)
            except WorkerLost as error:
                if op not in REPEATABLE:
                    unknown = "the next round will show whether Slurm got it"
                    raise type(error)(f"{description}: {error}; {unknown}") from error
                if isinstance(error, WorkerHung):
                    raise
                answer = self._ask(request)
        return result_of(description, answer, node="node" in arguments)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        worker = self._current()
        try:
            return worker.ask(request, self._settings.request_timeout_s)
        except WorkerLost:
            self._discard()
            raise

    def _current(self) -> WorkerProcess:
        if self._worker is not None and self._worker.answered >= self._settings.max_requests:
            self._discard()
        if self._worker is None:
            self._worker = WorkerProcess(self._settings)
            self.started += 1
        return self._worker

    def greeting(self) -> dict[str, Any]:
        """Return the worker's pyslurm version, pid and user."""
        with self._lock:
            return dict(self._current().greeting)

    def _discard(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def close(self) -> None:
        """End the worker; a later request starts a new one."""
        with self._lock:
            self._discard()


def result_of(description: str, answer: Mapping[str, Any], *, node: bool) -> Any:
    """Return an answer's result, or raise its error."""
    if "error" not in answer:
        return answer.get("result")
    error = answer["error"]
    if error["kind"] == "slurm":
        raise slurm_error(description, error["errno"], error["message"], node=node)
    kind = StaleState if error["kind"] == "stale" else ActionRefused
    raise kind(f"{description}: {error['message']}")
