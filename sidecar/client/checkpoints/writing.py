"""Writing of a captured state as a complete checkpoint: all ranks' files, then one marker, or nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cadenza.sidecar.client.checkpoints import directory as store
from cadenza.sidecar.client.checkpoints import files
from cadenza.sidecar.client.checkpoints.collective import Ranks
from cadenza.sidecar.client.checkpoints.files import Entry
from cadenza.sidecar.client.checkpoints.ownership import Owner, WriterLock, owner_here
from cadenza.sidecar.client.checkpoints.parts import tensors_in
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import (
    CheckpointError,
    InUseError,
    OtherJobError,
    SaveError,
    UsageError,
    VersionError,
)

T = TypeVar("T")

SHARED = "shared.pt"
SHARDS = "sharded"
_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Captured:
    """A state to write: ``shared`` is the same on all ranks, ``own`` is this rank's, ``sharded`` has its shards."""

    shared: Mapping[str, Any]
    own: dict[str, Any]
    sharded: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A complete checkpoint: its directory and size in bytes."""

    path: Path
    nbytes: int


def rank_file(rank: int) -> str:
    """Return the name of one rank's own file."""
    return f"rank-{rank:05d}.json"


class Writer:
    """Writes the checkpoints of a directory; each part of a save that touches files is given up when they stall."""

    def __init__(self, directory: Path, ranks: Ranks, lock: WriterLock) -> None:
        self._directory, self._ranks, self._lock = directory, ranks, lock
        self.patience = files.Patience()
        self.owner: Owner | None = owner_here()
        """The job whose checkpoints may be pruned; None after another job's was adopted."""
        self._broken = ""
        """The reason why the ranks' group cannot be used any more."""

    def hold(self, *, make: bool) -> bool:
        """Keep other writers out of the directory; a collective call. Raises InUseError.

        Returns whether an earlier start of this job was there.
        """
        return self._ranks.rank_0(
            lambda: self.patience.run(self._directory, lambda: self._lock.hold(files.wait_moving, make=make))
        )

    def write(self, step: int, captured: Captured, facts: store.Facts, rejected: Collection[Path]) -> Written:
        """Write a checkpoint and prune older ones, which a SaveError leaves untouched; a collective call."""
        if self._broken:
            raise SaveError(f"step {step} is not saved: {self._broken}")
        ranks, directory, folder = self._ranks, self._directory, self._directory
        began = monotonic_ns()
        self.patience.expected_bytes = sum(tensor.nbytes for tensor in tensors_in(captured.shared))
        try:
            # 1. Keep others out, and make a temporary directory.
            self.hold(make=True)
            owner = self.owner
            place = ranks.rank_0(lambda: self._alone(directory, lambda: store.begin(directory, step, rejected, owner)))
            folder = store.temporary(place.path)
            # 2. Write the shared file, each rank's own and the shards.
            if captured.sharded:
                ranks.rank_0(lambda: self._alone(folder, (folder / SHARDS).mkdir))
            entries = ranks.all_ranks(lambda: self._write_own(folder, captured))
            if captured.sharded:
                entries.update(self._write_shards(folder / SHARDS, captured))
            # 3. Rename the directory and write its marker, which makes the checkpoint complete.
            listed = {name: entry for one in ranks.gather(entries) for name, entry in one.items()}
            ranks.rank_0(lambda: self._alone(place.path, lambda: store.complete(place, ranks.size, listed, facts)))
        except (UsageError, InUseError, OtherJobError, VersionError):
            raise
        except Exception as error:
            if ranks.rank == 0 and folder != directory and not self.patience.stuck:
                self._remove(folder)
            named = isinstance(error, OSError) and error.filename
            cause = f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[attr-defined]
            raise SaveError(f"step {step} is not saved, earlier ones are untouched: {cause or repr(error)}") from error
        # 4. Remove checkpoints that are no longer needed; the new one is complete, whatever comes of this.
        if ranks.rank == 0:
            try:
                self._alone(directory, lambda: store.prune(directory, rejected))
            except (OSError, CheckpointError) as error:
                _log.warning("old checkpoints could not be removed: %s", error)
        self.patience.took((monotonic_ns() - began) / 1e9)
        return Written(place.path, sum(entry.nbytes for entry in listed.values()))

    def _alone(self, path: Path, work: Callable[[], T]) -> T:
        """Do work on files in a thread of its own; see ``Patience``."""
        return self.patience.run(path, work)

    def _remove(self, folder: Path) -> None:
        """Remove an unfinished checkpoint, to free its space; if this fails, the next save tries again."""
        try:
            self._alone(folder, lambda: shutil.rmtree(folder))
        except FileNotFoundError:
            pass
        except (OSError, CheckpointError) as failure:
            _log.warning("an unfinished checkpoint could not be removed: %s", failure)

    def _write_own(self, folder: Path, captured: Captured) -> dict[str, Entry]:
        """Write this rank's file and, on rank 0, the shared one."""
        if not self._alone(folder, folder.is_dir):
            raise SaveError(f"{folder}: is not visible on every rank; it must be on a file system that all nodes share")
        work: dict[str, Callable[[files.Sink], object]] = {}
        text = json.dumps({"schema": store.SCHEMA, **captured.own}).encode()
        work[rank_file(self._ranks.rank)] = lambda sink: sink.write(text)
        if self._ranks.rank == 0:
            work[SHARED] = lambda sink: torch.save({"schema": store.SCHEMA, **captured.shared}, sink)  # type: ignore[arg-type]
        with _no_inner_checksums():
            return {
                name: self._alone(folder / name, lambda name=name, fill=fill: files.write_new(folder / name, fill))  # type: ignore[misc]
                for name, fill in work.items()
            }

    def _write_shards(self, folder: Path, captured: Captured) -> dict[str, Entry]:
        """Write all ranks' shards; return the entries of this rank's files, as read back. A collective call.

        Torch writes them in collectives of its own. After a stall in one, the ranks' group cannot be used again.
        """
        from cadenza.sidecar.client.checkpoints import sharded  # noqa: PLC0415 - a second of imports that few need

        def entries() -> dict[str, Entry]:
            files.sync_directory(folder)
            rank, index = self._ranks.rank, (folder.glob(sharded.INDEX) if self._ranks.rank == 0 else ())
            written = sorted([*folder.glob(f"__{rank}_*"), *index])
            return {f"{SHARDS}/{path.name}": files.entry_of(path) for path in written}

        with _no_inner_checksums():
            try:
                self._alone(folder, lambda: sharded.save(folder, captured.sharded, self._ranks.group))
            finally:
                if self.patience.stuck:
                    self._broken = f"{folder}: the file system did not answer there; restart the job to save again"
        return self._ranks.all_ranks(lambda: self._alone(folder, entries))


@contextlib.contextmanager
def _no_inner_checksums() -> Iterator[None]:
    """Switch off torch.save's checksum of each tensor: it is many times slower than ours, which covers the file."""
    get = getattr(torch.serialization, "get_crc32_options", None)  # since torch 2.6
    if get is None:
        yield
        return
    before = get()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
