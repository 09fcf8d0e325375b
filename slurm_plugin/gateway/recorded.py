"""A gateway over captured answers: what the worker once read goes through the same translation again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.slurm_plugin.gateway.errors import RecordingError
from cadenza.slurm_plugin.gateway.translate import snapshot

SCHEMA = "cadenza.recording/1"


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
        """Note the action and say that it worked."""
        self.applied.append(action)
        return Outcome(ok=True)
