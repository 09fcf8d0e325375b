"""State that survives a crash of the agent: leases.json and tuning.json; readers see old content or new, never half."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from cadenza.sidecar.agent.errors import StateFileError
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.frames import ERRORS, TO_AGENT
from cadenza.sidecar.orders import Facts

log = logging.getLogger(__name__)

VERSION = 1
NOTHING = msgspec.Raw(b"null")


class Saved(msgspec.Struct, frozen=True):
    """Content of every state file: the boot that its processes belong to."""

    v: int
    boot: str


class SavedLeases(Saved, frozen=True):
    """Content of leases.json: every lease that was granted, and the service's last facts.

    ``write``: number of this write, by which the newer of two files is found.
    """

    leases: tuple[Lease, ...] = ()
    told: msgspec.Raw = msgspec.field(name="facts", default=NOTHING)
    write: int = 0

    @property
    def facts(self) -> Facts | None:
        """Return the service's facts; None if there are none, or an agent of another wire version wrote them."""
        try:
            facts, _ = TO_AGENT.decode(self.told)
        except ERRORS:
            return None
        return facts if isinstance(facts, Facts) else None


class Wish(msgspec.Struct, frozen=True):
    """The service's tuning order for one job; 0 leaves CPUs or memory as Slurm has set them."""

    cpus: float
    memory_mb: int
    cache_mb: int | None = None


class TunedJob(msgspec.Struct):
    """One tuned job; ``saved`` holds the values that its limits go back to."""

    job: int
    restart: int
    wish: Wish
    saved: dict[str, str] = msgspec.field(default_factory=dict)
    ordered: bool = True
    """False: held to its own CPUs without an order, see ``Tuner``."""


class SavedTuning(Saved, frozen=True):
    """Content of tuning.json: the orders, and Slurm's own values before them."""

    jobs: tuple[TunedJob, ...] = ()


S = TypeVar("S", bound=Saved)


class StateFile(Generic[S]):
    """Reads and replaces one file whose content is the struct ``kind``."""

    def __init__(self, path: Path, kind: type[S]) -> None:
        self.path = path
        self._kind = kind
        self._written = b""

    def load(self) -> S | None:
        """Return the content, None without a file; raise StateFileError if it cannot be read."""
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=self._kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StateFileError(f"{self.path}: cannot be read: {error}; move it away to start afresh") from None
        if content.v != VERSION:
            raise StateFileError(f"{self.path}: version {content.v}, not {VERSION}; move it away to start afresh")
        return content

    def load_or_put_aside(self) -> S | None:
        """Return the content as :meth:`load`; a file that cannot be read is renamed, and counts as missing."""
        try:
            return self.load()
        except StateFileError as error:
            log.error("%s", error)  # noqa: TRY400 - the message is complete
            with contextlib.suppress(OSError):
                self.path.replace(self.path.with_suffix(".unreadable"))
            return None

    def save(self, content: S) -> None:
        """Bring the file up to date on disk before returning; raise StateFileError if that is impossible."""
        text = msgspec.json.encode(content)
        if text == self._written:
            return
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                # Without this sync the rename may reach the disk before the data: a crash leaves an empty file.
                os.fsync(file.fileno())
            temporary.replace(self.path)
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # the rename itself
            finally:
                os.close(directory)
        except OSError as error:
            raise StateFileError(f"{self.path}: cannot be written: {error}") from None
        self._written = text


class LeaseFile(StateFile[SavedLeases]):
    """leases.json, for one boot.

    While ``directory`` cannot be written to (a full disk), the file is in ``spare``: a directory in memory that
    outlives the agent but not the boot, as the leases themselves do.
    """

    def __init__(self, directory: Path, boot: str, spare: Path) -> None:
        super().__init__(directory / "leases.json", SavedLeases)
        self.fault = ""
        """Reason for which the last leases are in the spare file; empty if they are not."""
        self._spare = StateFile(spare / "leases.json", SavedLeases)
        self._boot = boot
        self._write = 0

    def recover(self) -> SavedLeases:
        """Return the leases as :meth:`read`, without files that cannot be read: the host itself shows who uses GPUs."""
        for file in (self, self._spare):
            file.load_or_put_aside()
        return self.read()

    def read(self) -> SavedLeases:
        """Return the leases of this boot; after a reboot only the facts are left."""
        both = (self.load(), self._spare.load())
        saved = max(
            (one for one in both if one is not None),
            key=lambda one: (one.boot == self._boot, one.write),
            default=SavedLeases(VERSION, self._boot),
        )
        self._write = saved.write
        return saved if saved.boot == self._boot else SavedLeases(VERSION, self._boot, (), saved.told)

    def write(self, leases: tuple[Lease, ...], facts: Facts | None) -> None:
        """Write everything down; of a lease that could not be read back, what a restarted agent needs."""
        self._write += 1
        told = msgspec.Raw(msgspec.json.encode(facts))
        content = SavedLeases(VERSION, self._boot, leases, told, self._write)
        if not _can_be_read_back(content):
            leases = tuple(one if _can_be_read_back(one) else _bare(one) for one in leases)
            content = SavedLeases(VERSION, self._boot, leases, told, self._write)
        try:
            self.save(content)
        except StateFileError as error:
            self._spare.save(content)
            self.fault = str(error)
        else:
            self.fault = ""


def _can_be_read_back(content: SavedLeases | Lease) -> bool:
    """Return True if the next agent could read this."""
    try:
        msgspec.json.decode(msgspec.json.encode(content), type=type(content))
    except (msgspec.MsgspecError, ValueError):
        return False
    return True


def _bare(lease: Lease) -> Lease:
    """Return the part of a lease that keeps its GPUs from others, all of it the agent's or Slurm's own word."""
    return msgspec.structs.replace(
        lease, user="", node="", options="", weight=1.0, priority=0, vtime_s=0.0, cpus=0.0, memory_mb=0
    )


class TuningFile(StateFile[SavedTuning]):
    """tuning.json, for one boot; it is on disk before any limit changes."""

    def __init__(self, directory: Path, boot: str) -> None:
        super().__init__(directory / "tuning.json", SavedTuning)
        self._boot = boot

    def recover(self) -> tuple[TunedJob, ...]:
        """Return the tuned jobs of this boot; without a readable file their limits stay until they end."""
        saved = self.load_or_put_aside()
        return saved.jobs if saved is not None and saved.boot == self._boot else ()

    def write(self, jobs: tuple[TunedJob, ...]) -> None:
        """Write everything to disk, if it changed."""
        self.save(SavedTuning(VERSION, self._boot, jobs))
