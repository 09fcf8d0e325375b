"""Writing of a captured state as a complete checkpoint: all ranks' files, then one marker, or nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cadenza.sidecar.client.checkpoints import directory as store
from cadenza.sidecar.client.checkpoints import files
from cadenza.sidecar.client.checkpoints.collective import Ranks
from cadenza.sidecar.client.checkpoints.files import Entry
from cadenza.sidecar.client.errors import SaveError

SHARED = "shared.pt"
SHARDS = "sharded"
_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Captured:
    """A state to write: ``shared`` is the same on all ranks, ``own`` is this rank's, ``sharded`` has its shards."""

    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    sharded: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A complete checkpoint: its directory and size in bytes."""

    path: Path
    nbytes: int


def rank_file(rank: int) -> str:
    """Return the name of one rank's own file."""
    return f"rank-{rank:05d}.json"


def write(directory: Path, step: int, captured: Captured, ranks: Ranks, rejected: Collection[Path]) -> Written:
    """Write a checkpoint and prune older ones; a collective call. Raises SaveError with the older ones untouched."""
    # 1. Make a temporary directory.
    place = ranks.rank_0(lambda: store.begin(directory, step, rejected))
    folder = store.temporary(place.path)
    try:
        # 2. Write the shared file, each rank's own and the shards.
        ranks.all_ranks(lambda: (folder / SHARDS).mkdir() if captured.sharded and ranks.rank == 0 else None)
        entries = ranks.all_ranks(lambda: _write_own(folder, captured, ranks))
        if captured.sharded:
            entries.update(_write_shards(folder / SHARDS, captured, ranks))
        # 3. Rename the directory and write its marker, which makes the checkpoint complete.
        listed = {name: entry for one in ranks.gather(entries) for name, entry in one.items()}
        ranks.rank_0(lambda: store.complete(place, ranks.size, listed))
    except Exception as error:
        if ranks.rank == 0:
            try:
                shutil.rmtree(folder)  # frees its space; if this fails, the next save tries again
            except FileNotFoundError:
                pass
            except OSError as failure:
                _log.warning("an unfinished checkpoint could not be removed: %s", failure)
        cause = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        raise SaveError(f"step {step} is not saved, earlier ones are untouched: {cause or repr(error)}") from error
    # 4. Remove checkpoints that are no longer needed.
    ranks.rank_0(lambda: store.prune(directory, rejected))
    return Written(place.path, sum(entry.nbytes for entry in listed.values()))


def _write_own(folder: Path, captured: Captured, ranks: Ranks) -> dict[str, Entry]:
    """Write this rank's file and, on rank 0, the shared one."""
    if not folder.is_dir():
        raise SaveError(f"{folder}: is not visible on every rank; it must be on a file system that all nodes share")
    work: dict[str, Callable[[files.Sink], object]] = {}
    text = json.dumps({"schema": store.SCHEMA, **captured.own}).encode()
    work[rank_file(ranks.rank)] = lambda sink: sink.write(text)
    if ranks.rank == 0:
        work[SHARED] = lambda sink: torch.save({"schema": store.SCHEMA, **captured.shared}, sink)  # type: ignore[arg-type]
    with _no_inner_checksums():
        return {name: files.write_new(folder / name, fill) for name, fill in work.items()}


def _write_shards(folder: Path, captured: Captured, ranks: Ranks) -> dict[str, Entry]:
    """Write all ranks' shards; return the entries of this rank's files, as read back. A collective call."""
    from cadenza.sidecar.client.checkpoints import sharded  # noqa: PLC0415 - a second of imports that few need

    with _no_inner_checksums():
        sharded.save(folder, captured.sharded, ranks.group)

    def entries() -> dict[str, Entry]:
        files.sync_directory(folder)
        written = sorted([*folder.glob(f"__{ranks.rank}_*"), *(folder.glob(sharded.INDEX) if ranks.rank == 0 else ())])
        return {f"{SHARDS}/{path.name}": files.entry_of(path) for path in written}

    return ranks.all_ranks(entries)


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
