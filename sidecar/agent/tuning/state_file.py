"""tuning.json: what was ordered and what Slurm had set before, so that a restarted agent can go on and back."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cadenza.sidecar.agent.errors import StateFileError

VERSION = 1
NAME = "tuning.json"


class Wish(msgspec.Struct, frozen=True):
    """The service's order for one job; 0 leaves CPUs or memory as Slurm has set them."""

    cpus: float
    memory_mb: int
    cache_mb: int | None = None


class Kept(msgspec.Struct):
    """One tuned job; ``saved`` is what its limits go back to."""

    job: int
    restart: int
    wish: Wish
    saved: dict[str, str] = msgspec.field(default_factory=dict)
    ordered: bool = True
    """False: nobody ordered it, see ``Tuner``."""


class _Content(msgspec.Struct):
    v: int
    boot: str
    jobs: tuple[Kept, ...] = ()


class TuningFile:
    """Reads and replaces the file; it is on disk before any limit changes."""

    def __init__(self, directory: Path, boot: str) -> None:
        self.path = directory / NAME
        self._boot = boot
        self._written = b""

    def load(self) -> tuple[Kept, ...]:
        """Return the tuned jobs of this boot, none without a file; raise StateFileError when it cannot be read."""
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StateFileError(f"{self.path}: cannot be read: {error}; move it away to start afresh") from None
        return content.jobs if content.v == VERSION and content.boot == self._boot else ()

    def save(self, jobs: tuple[Kept, ...]) -> None:
        """Bring the file up to date before returning; raise StateFileError when that is impossible."""
        text = msgspec.json.encode(_Content(VERSION, self._boot, jobs))
        if text == self._written:
            return
        temporary = self.path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            raise StateFileError(f"{self.path}: cannot be written: {error}") from None
        self._written = text
