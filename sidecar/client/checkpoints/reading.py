"""Search for the newest checkpoint that is intact on all ranks, and reading it without running code from it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cadenza.sidecar.client.checkpoints import directory as store
from cadenza.sidecar.client.checkpoints import files
from cadenza.sidecar.client.checkpoints.collective import Ranks
from cadenza.sidecar.client.checkpoints.directory import Facts, Marker, Place, UnusableError
from cadenza.sidecar.client.checkpoints.writing import SHARED, rank_file
from cadenza.sidecar.client.errors import DamagedError, VersionError

_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Skipped:
    """A skipped checkpoint, with the reason."""

    path: Path
    step: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """An intact checkpoint in memory; ``shared`` maps its file, so tensors are read when they are copied."""

    place: Place
    world_size: int
    facts: Facts
    shared: Mapping[str, Any]
    own: Mapping[str, Any]


@dataclass
class Search:
    """Result of a search: a checkpoint, or none, and the skipped ones, newest first."""

    loaded: Loaded | None = None
    skipped: list[Skipped] = field(default_factory=list)


def newest(directory: Path, ranks: Ranks) -> Search:
    """Return the newest checkpoint that is complete and intact on every rank; a collective call.

    Raises DamagedError when there are complete ones and none of them is intact, and VersionError when the
    newest is of a later version of the format.
    """
    search, damaged = Search(), False
    ranks.rank_0(lambda: _tell_cut_off(directory))
    for place in ranks.rank_0(lambda: store.places(directory)):
        marker = ranks.rank_0(lambda place=place: _marker_or_reason(place))  # type: ignore[misc]
        result: Loaded | str = marker if isinstance(marker, str) else _load(place, marker, ranks)
        if isinstance(result, Loaded):
            search.loaded = result
            return search
        damaged = damaged or isinstance(marker, Marker)
        search.skipped.append(Skipped(place.path, place.step, result))
        _log.warning("checkpoint %s is skipped: %s", place.path, result)
    if damaged:
        reasons = "; ".join(f"{one.path.name}: {one.reason}" for one in search.skipped)
        raise DamagedError(f"{directory}: no checkpoint is intact ({reasons}); move them away to start from nothing")
    return search


def _tell_cut_off(directory: Path) -> None:
    """Log the checkpoints that were cut off; each attempt of a requeued job begins with this."""
    with contextlib.suppress(OSError, VersionError):
        for text in store.cut_off(directory):
            _log.warning("a checkpoint is not complete, and is not used: %s", text)


def _marker_or_reason(place: Place) -> Marker | str:
    """Return a checkpoint's marker, or the reason why it has none."""
    try:
        return store.marker_of(place.path)
    except UnusableError as error:
        return str(error)


def _load(place: Place, marker: Marker, ranks: Ranks) -> Loaded | str:
    """Return a checkpoint in memory, or a description of its damage on any rank."""
    # 1. Check the shared file and this rank's share of the others.
    names = sorted(marker.files)
    mine = [name for index, name in enumerate(names) if name == SHARED or index % ranks.size == ranks.rank]
    missing = {SHARED, *(rank_file(rank) for rank in range(marker.world_size))} - set(names)
    reasons = [files.damage(place.path / name, marker.files[name]) for name in mine]
    reasons += [f"{name} is not in its marker" for name in sorted(missing)]
    if reason := _first_reason(ranks.gather("; ".join(filter(None, reasons)) or None)):
        return reason
    # 2. Read it.
    result: Loaded | str
    try:
        # A rank that the saved job did not have reads another rank's file.
        shared = torch.load(place.path / SHARED, map_location="cpu", weights_only=True, mmap=True)
        own = json.loads((place.path / rank_file(ranks.rank % marker.world_size)).read_bytes())
        result = Loaded(place, marker.world_size, marker.facts, shared, own)
    except Exception as error:  # noqa: BLE001 - every error must reach the other ranks
        result = f"{type(error).__name__}: {error}"
    return _first_reason(ranks.gather(result if isinstance(result, str) else None)) or result


def _first_reason(reasons: list[str | None]) -> str | None:
    """Return the first rank's reason, with the rank if there are several; None if no rank has one."""
    named = [text if len(reasons) == 1 else f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text]
    return named[0] if named else None
