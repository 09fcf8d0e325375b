"""Trial of the offload engine on one free GPU, with the torch of jobs in processes of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

import cadenza.sidecar
from cadenza.policies.core.text import printable
from cadenza.sidecar.agent.driver.trial_record import EngineTrial
from cadenza.sidecar.agent.errors import AgentError
from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, nvml_devices
from cadenza.sidecar.bounds import Bytes, Seconds

MODULE = "cadenza.sidecar.client.bootstrap.offload_trial"
"""The client's module that runs in these processes."""
NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
LIMIT_S = 120.0
"""Longest time for a trial, in seconds."""
MAX_KEPT_SHARE = 16
"""At most one part in so many of the state's bytes may stay on the GPU while it is away."""
MAX_LINE, MAX_TEXT = 4096, 300


class Answer(msgspec.Struct, frozen=True):
    """A process's answer to one word."""

    failed: str = ""
    not_run: str = ""
    torch: str = ""
    bytes: Bytes = 0
    seconds: Seconds = 0.0
    left: Bytes = 0
    pinned: bool = False


class EngineTrialError(AgentError):
    """The engine has failed the trial; the message says in which step."""


class NoTrialError(AgentError):
    """There can be no trial with this Python; the message says why."""


def run(python: str, uuid: str) -> EngineTrial:
    """Move state off the GPU with a UUID and back, by the torch of a Python, while another process uses the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        # That Python need not have Cadenza: the client comes from here.
        (Path(folder) / "cadenza").symlink_to(Path(cadenza.sidecar.__file__).parents[1])
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        own = {"CUDA_VISIBLE_DEVICES": uuid, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            with _started(python, own) as (subject, log), _started(python, own) as (other, other_log):
                return _trial(Holder(subject, log), Holder(other, other_log))
        except EngineTrialError as error:
            return EngineTrial(failed=printable(str(error), MAX_TEXT))
        except NoTrialError as error:
            return EngineTrial(not_run=printable(f"{python}: {error}", MAX_TEXT))
        except OSError as error:
            return EngineTrial(not_run=printable(f"{python}: {error.strerror}", MAX_TEXT))


@contextmanager
def _started(python: str, own: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], IO[bytes]]]:
    """Start a process that obeys words, and yield it with its errors; it ends with the context, or when it is late."""
    with tempfile.TemporaryFile() as log, subprocess.Popen(
        [python, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/",
        env={**os.environ, **own},
    ) as process:  # fmt: skip
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            yield process, log
        finally:
            limit.cancel()
            process.kill()


def _trial(subject: Holder, other: Holder) -> EngineTrial:
    """Return the record of a trial that passed."""
    # 1. The state is on the GPU, as far as NVML shows processes.
    for holder in (subject, other):
        holder.use()
    state = subject.ask("fill").bytes
    if (held := subject.state_bytes()) is not None and held < state:
        raise EngineTrialError(f"NVML shows {held >> 20} MB of a process that has {state >> 20} MB of state")
    # 2. It goes out, and its memory is free by torch, by NVML, and for another process.
    out, kept = subject.ask("out"), subject.state_bytes()
    if (stays := max(out.left, kept or 0)) > state // MAX_KEPT_SHARE:
        raise EngineTrialError(f"{stays >> 20} of {state >> 20} MB stay on the GPU after a yield")
    other.ask("fill")
    # 3. It comes back, and neither process finds its content changed.
    back = subject.ask("back")
    for holder in (subject, other):
        holder.ask("compare")
    return EngineTrial("", "", subject.torch, state, out.seconds, back.seconds, out.left, kept, out.pinned)


class Holder:
    """A process with state on the GPU."""

    def __init__(self, process: subprocess.Popen[str], log: IO[bytes]) -> None:
        self._process, self._log = process, log
        self.torch = ""
        self._gpu: GpuDevice | None = None
        self._context = 0

    def use(self) -> None:
        """Let it use the GPU, and look for it there by NVML."""
        self.torch = printable(self.ask("use").torch, MAX_TEXT)
        self._gpu = next((gpu for gpu in nvml_devices() if self._bytes(gpu)), None)
        self._context = self._bytes(self._gpu)

    def ask(self, word: str) -> Answer:
        """Return the answer to a word; raise EngineTrialError or NoTrialError if there is none with figures."""
        try:
            print(word, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline(MAX_LINE) if self._process.stdout else ""
        except BrokenPipeError:
            line = ""
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError:
            self._process.kill()
            raise self._end(word) from None
        if answer.not_run:
            raise NoTrialError(answer.not_run)
        if answer.failed:
            raise EngineTrialError(answer.failed)
        return answer

    def _end(self, word: str) -> AgentError:
        """Return the error of a process that has ended, or answers in no known form."""
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        if lines[-1:] == [NO_TORCH]:
            return NoTrialError("it has no torch")
        return EngineTrialError(f"{word}: its process ended with {status}: {(lines or ['it says nothing'])[-1]}")

    def state_bytes(self) -> int | None:
        """Return the memory that NVML shows of it beyond its context; None where NVML does not show it."""
        return None if self._gpu is None else max(0, self._bytes(self._gpu) - self._context)

    def _bytes(self, gpu: GpuDevice | None) -> int:
        return ((gpu and gpu.processes()) or {}).get(self._process.pid) or 0
