"""Finds the newest checkpoint that is intact for all ranks, and reads it without running anything from it."""

from __future__ import annotations

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
from cadenza.sidecar.client.checkpoints.directory import Marker, Place, UnusableError
from cadenza.sidecar.client.checkpoints.errors import DamagedError
from cadenza.sidecar.client.checkpoints.writing import SHARED, rank_file

_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    path: Path
    step: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """An intact checkpoint in memory; ``shared`` maps its file, so that tensors are read when they are copied."""

    place: Place
    world_size: int
    shared: Mapping[str, Any]
    own: Mapping[str, Any]


@dataclass
class Search:
    """The search's outcome: a checkpoint, or none, and those passed over, newest first."""

    loaded: Loaded | None = None
    skipped: list[Skipped] = field(default_factory=list)


def newest(directory: Path, ranks: Ranks) -> Search:
    """Return the newest checkpoint that is complete and intact on every rank; a collective call.

    Raises DamagedError when there are complete ones and none of them is intact, and VersionError when the
    newest is of a later version of the format.
    """
    search, damaged = Search(), False
    for place in ranks.first(lambda: store.places(directory)):
        marker, reason = ranks.first(lambda place=place: _marker(place))  # type: ignore[misc]
        if marker is not None:
            damaged = True
            loaded, reason = _load(place, marker, ranks)
            if loaded is not None:
                search.loaded = loaded
                return search
        search.skipped.append(Skipped(place.path, place.step, reason))
        _log.warning("checkpoint %s is passed over: %s", place.path, reason)
    if damaged:
        reasons = "; ".join(f"{one.path.name}: {one.reason}" for one in search.skipped)
        raise DamagedError(f"{directory}: no checkpoint is intact ({reasons}); move them away to start from nothing")
    return search


def _marker(place: Place) -> tuple[Marker | None, str]:
    """Return a checkpoint's marker, or why it has none."""
    try:
        return store.marker_of(place.path), ""
    except UnusableError as error:
        return None, str(error)


def _load(place: Place, marker: Marker, ranks: Ranks) -> tuple[Loaded | None, str]:
    """Return a checkpoint in memory, or what is wrong with it on any rank."""
    reason = _first_reason(ranks.gather(_damage(place, marker, ranks)))
    if reason:
        return None, reason
    loaded: Loaded | None = None
    try:
        loaded, reason = _read(place, marker, ranks.rank), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        reason = f"{type(error).__name__}: {error}"
    reason = _first_reason(ranks.gather(reason))
    return (None, reason) if reason else (loaded, "")


def _damage(place: Place, marker: Marker, ranks: Ranks) -> str:
    """Return what is wrong with the shared file and with this rank's share of the others."""
    names = sorted(marker.files)
    mine = [name for index, name in enumerate(names) if name == SHARED or index % ranks.size == ranks.rank]
    lacking = {SHARED, *(rank_file(rank) for rank in range(marker.world_size))} - set(names)
    reasons = [files.what_is_wrong(place.path / name, marker.files[name]) for name in mine]
    return "; ".join(filter(None, [*reasons, *(f"{name} is not in its marker" for name in sorted(lacking))]))


def _read(place: Place, marker: Marker, rank: int) -> Loaded:
    """Read the shared file and this rank's own; a rank that the saved job did not have reads another's."""
    shared = torch.load(place.path / SHARED, map_location="cpu", weights_only=True, mmap=True)
    own = json.loads((place.path / rank_file(rank % marker.world_size)).read_bytes())
    return Loaded(place, marker.world_size, shared, own)


def _first_reason(reasons: list[str]) -> str:
    """Return the first rank's complaint, with its rank when there are several ranks."""
    named = [text if len(reasons) == 1 else f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text]
    return named[0] if named else ""
