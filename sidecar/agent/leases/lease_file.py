"""leases.json: the lease book on disk, so that a restarted agent knows every lease it has told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from cadenza.sidecar.agent.errors import StateFileError
from cadenza.sidecar.agent.leases.lease_table import Lease, Process
from cadenza.sidecar.orders import Facts

VERSION = 1
NAME = "leases.json"


class Saved(msgspec.Struct, frozen=True):
    """The file's content: the leases, the boot they belong to, and the service's last word on taking turns."""

    v: int
    boot: str
    leases: tuple[Lease, ...] = ()
    facts: Facts | None = None


class LeaseFile:
    """Reads and replaces the file; a reader sees the old content or the new, never half."""

    def __init__(self, directory: Path, boot: str) -> None:
        self.path = directory / NAME
        self._boot = boot

    def load(self) -> Saved:
        """Return the leases of this boot, none without a file; StateFileError when it cannot be read."""
        empty = Saved(VERSION, self._boot)
        try:
            saved = msgspec.json.decode(self.path.read_bytes(), type=Saved)
        except FileNotFoundError:
            return empty
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StateFileError(f"{self.path}: cannot be read: {error}; move it away to start afresh") from None
        if saved.v != VERSION:
            raise StateFileError(f"{self.path}: version {saved.v}, not {VERSION}; move it away to start afresh")
        return saved if saved.boot == self._boot else Saved(VERSION, self._boot, (), saved.facts)

    def save(self, leases: tuple[Lease, ...], facts: Facts | None) -> None:
        """Write everything to disk before returning; raise StateFileError when that is impossible."""
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write(temporary, msgspec.json.encode(Saved(VERSION, self._boot, leases, facts)))
            temporary.replace(self.path)
            _sync_directory(self.path.parent)
        except OSError as error:
            raise StateFileError(f"{self.path}: cannot be written: {error}") from None


def still_running(lease: Lease, start_ticks: Callable[[int], int | None]) -> tuple[Process, ...]:
    """Return those recorded processes of a job that are still the same ones."""
    return tuple(process for process in lease.processes if start_ticks(process.pid) == process.start_ticks)


def _write(path: Path, content: bytes) -> None:
    """Write and flush a file that only root reads."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
