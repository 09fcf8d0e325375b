"""Recordings of the worker's answers: written from a live gateway, and replayed as a gateway."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Protocol

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.slurm_plugin.gateway.errors import RecordingError
from cadenza.slurm_plugin.gateway.translate import snapshot

SCHEMA = "cadenza.recording/1"


class RawReader(Protocol):
    """A gateway that can be recorded: SlurmGateway, or a recording itself."""

    def read_raw(self) -> dict[str, Any]:
        """Return one answer of the worker."""
        ...


def record(path: Path, count: int, interval: float, gateway: RawReader) -> int:
    """Append ``count`` answers, ``interval`` seconds apart, to ``path`` as JSON lines; return the number of bytes.

    Each answer is on disk before the next wait, so that an interrupted recording is a short one. It holds
    names of users and jobs, and comments: look at it before handing it on. Errors of the gateway and OSError
    pass through.
    """
    written = 0
    pause = threading.Event()
    with path.open("a", encoding="utf-8") as file:
        for number in range(count):
            if number:
                pause.wait(interval)
            answer = json.dumps(gateway.read_raw(), separators=(",", ":"), sort_keys=True)
            written += file.write(answer + "\n")
            file.flush()
    return written


def load(path: Path) -> list[dict[str, Any]]:
    """Return the answers in a recording, one JSON object a line; RecordingError names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    answers = [_answer(line, f"{path}:{number}") for number, line in lines]
    if not answers:
        raise RecordingError(f"{path}: holds no answers; record some: cadenza record --out {path}")
    return answers


def _answer(line: str, where: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise RecordingError(f"{where}: not JSON ({error})") from error
    schema = answer.get("schema") if isinstance(answer, dict) else None
    if schema != SCHEMA:
        raise RecordingError(f"{where}: schema {schema!r}, and this version replays {SCHEMA}; record again")
    return dict(answer)


class RecordedGateway:
    """Replays a recording, one answer a read, the last one again and again. Actions are only noted."""

    def __init__(self, path: Path) -> None:
        self._answers = load(path)
        self._next = 0
        self.applied: list[Action] = []

    def __len__(self) -> int:
        return len(self._answers)

    def read_raw(self) -> dict[str, Any]:
        """Return the next answer as it was recorded."""
        answer = self._answers[self._next]
        self._next = min(self._next + 1, len(self._answers) - 1)
        return answer

    def read(self) -> ClusterSnapshot:
        """Return the next snapshot."""
        return snapshot(self.read_raw())

    def apply(self, action: Action) -> Outcome:
        """Note the action and report success."""
        self.applied.append(action)
        return Outcome(ok=True)
