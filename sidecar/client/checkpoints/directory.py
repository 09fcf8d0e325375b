"""The checkpoints in a directory: their names, completion markers, order and pruning; stdlib only, no clock.

``step-00000120/``      a checkpoint: its files, then ``complete.json``, the marker, without which it does not count
``step-00000120.2/``    a second one of the same step; the higher number is the newer
``step-00000120.tmp/``  one that is being written, or whose process was killed before it was complete
``.lock``               the lock of the process that saves here
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cadenza.sidecar.client.checkpoints.files import Entry, sync_directory, write_new
from cadenza.sidecar.client.checkpoints.ownership import Owner, check_owner, read_owner
from cadenza.sidecar.client.errors import CheckpointError, UsageError, VersionError

SCHEMA = "cadenza.checkpoint/1"
MARKER = "complete.json"
CHECKPOINTS_KEPT = 2
TEMPORARY = ".tmp"
MIB = 1 << 20

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_log = logging.getLogger("cadenza.client")


class UnusableError(Exception):
    """A checkpoint cannot be used, and an older one may be; never leaves this package."""


@dataclass(frozen=True, order=True)
class Place:
    """One checkpoint's directory, by its name; the greatest is the newest."""

    step: int
    generation: int
    path: Path


@dataclass(frozen=True)
class Facts:
    """The meaning of a checkpoint: its step's unit, and the training boundaries of all starts by then."""

    unit: str = ""
    ordered: bool = False
    """Cadenza requested it, between two saves of the script."""
    boundaries: int = 0
    owner: Owner = field(default_factory=Owner)
    """The job that saved it."""


@dataclass(frozen=True)
class Marker:
    """Contents of a complete checkpoint; ``files`` are by path relative to its directory."""

    step: int
    world_size: int
    files: Mapping[str, Entry]
    facts: Facts


def places(directory: Path) -> list[Place]:
    """Return the checkpoints in a directory, complete or not, newest first; a missing directory has none.

    Raises CheckpointError when it is no directory, or cannot be read.
    """
    try:
        paths = [*directory.iterdir()]
    except FileNotFoundError:
        paths = []
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.strerror}") from error
    matches = ((path, _NAME.fullmatch(path.name)) for path in paths)
    return sorted((Place(int(m[1]), int(m[2] or 1), path) for path, m in matches if m), reverse=True)


def marker_of(path: Path) -> Marker:
    """Return a checkpoint's marker; raise UnusableError without a good one, VersionError for a later version."""
    try:
        marker = json.loads((path / MARKER).read_bytes())
    except FileNotFoundError:
        raise UnusableError(f"it has no {MARKER}: writing it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableError(f"{MARKER}: {error}") from None
    if not isinstance(marker, dict) or marker.pop("crc32", None) != _checksum(marker):
        raise UnusableError(f"{MARKER} does not have the checksum that it names")
    if marker["schema"] != SCHEMA:
        raise VersionError(f"{path}: is {marker['schema']}, this version reads {SCHEMA}; upgrade cadenza to restore it")
    for pure in map(PurePosixPath, marker["files"]):
        if pure.is_absolute() or ".." in pure.parts:  # damage, or malice
            raise UnusableError(f"{MARKER} names {str(pure)!r}, outside of the checkpoint")
    files = {name: Entry(int(file["bytes"]), int(file["crc32"])) for name, file in marker["files"].items()}
    owner = read_owner(marker.get("owner"))
    facts = Facts(str(marker.get("unit", "")), bool(marker.get("ordered")), int(marker.get("boundaries", 0)), owner)
    return Marker(marker["step"], marker["world_size"], files, facts)


def _checksum(fields: Mapping[str, Any]) -> int:
    """Return the checksum of a marker's other fields."""
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def begin(directory: Path, step: int, rejected: Collection[Path], owner: Owner | None) -> Place:
    """Return the place of this step's checkpoint; make its temporary directory, and remove unfinished ones.

    Raises UsageError when there is a complete checkpoint of a later step that a restore has not ``rejected``: it
    would be pruned, or the new one would never be the newest. Raises OtherJobError when the newest one is of another
    job than ``owner``, whose checkpoints would be pruned; None is any job's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    newest = next(iter(usable(directory, rejected)), None)
    if newest is not None and owner is not None:
        check_owner(newest.path, marker_of(newest.path).facts.owner, owner)
    later = next((place for place in usable(directory, rejected) if place.step > step), None)
    if later is not None:
        raise UsageError(
            f"{directory}: has step {later.step}, so step {step} cannot be saved; "
            "call restore() before training, or use another directory"
        )
    for path in directory.glob("step-*" + TEMPORARY):
        shutil.rmtree(path)
    taken = max((place.generation for place in places(directory) if place.step == step), default=0)
    name = f"step-{step:08d}" + (f".{taken + 1}" if taken else "")
    temporary(directory / name).mkdir()
    return Place(step, taken + 1, directory / name)


def temporary(path: Path) -> Path:
    """Return the name under which a checkpoint is written."""
    return path.with_name(path.name + TEMPORARY)


def complete(place: Place, world_size: int, files: Mapping[str, Entry], facts: Facts) -> None:
    """Give a written checkpoint its name, then its marker; each is on the disk before the next."""
    # fsync(2) of a file leaves its name to the directory. Without these syncs a crash could leave the marker, and not
    # all of the files that it lists.
    sync_directory(temporary(place.path))
    temporary(place.path).rename(place.path)
    sync_directory(place.path.parent)
    listed = {name: {"bytes": entry.nbytes, "crc32": entry.crc32} for name, entry in sorted(files.items())}
    fields: dict[str, Any] = {"schema": SCHEMA, "step": place.step, "world_size": world_size, "files": listed}
    fields.update(vars(facts), owner=facts.owner.fields())
    text = json.dumps({**fields, "crc32": _checksum(fields)}, indent=1).encode()
    unnamed = place.path / (MARKER + TEMPORARY)
    write_new(unnamed, lambda sink: sink.write(text))
    unnamed.rename(place.path / MARKER)
    sync_directory(place.path)


def usable(directory: Path, rejected: Collection[Path] = ()) -> Iterable[Place]:
    """Yield the checkpoints with a good marker, newest first, without those that a restore rejected."""
    for place in places(directory):
        if place.path not in rejected:
            try:
                marker_of(place.path)
            except UnusableError:
                continue
            yield place


def cut_off(directory: Path) -> Iterable[str]:
    """Yield a sentence on each checkpoint whose process ended while it was written.

    It has the bytes and the time that were missing for the size of the newest complete one, at the speed of the files
    that are there. Raises OSError.
    """
    newest = next(iter(usable(directory)), None)
    whole = sum(entry.nbytes for entry in marker_of(newest.path).files.values()) if newest else 0
    for path in sorted(directory.glob("step-*" + TEMPORARY)):
        files = [file.stat() for file in path.rglob("*") if file.is_file()]
        times = [file.st_mtime for file in files]
        written, seconds = sum(file.st_size for file in files), max(times, default=0.0) - min(times, default=0.0)
        text = f"{path}: its process ended after {written / MIB:.1f} MiB in {seconds:.1f} s"
        if 0 < written < whole:
            missing = f"{(whole - written) / MIB:.1f} MiB, {(whole - written) * seconds / written:.1f} s at this speed"
            text += f"; missing were {missing}: Slurm waits for KillWait after a SIGTERM (slurm.conf)"
        yield text


def prune(directory: Path, rejected: Collection[Path]) -> None:
    """Remove all checkpoints but the newest CHECKPOINTS_KEPT usable ones; log those that cannot be removed."""
    newest = {place.path for place in list(usable(directory, rejected))[:CHECKPOINTS_KEPT]}
    for place in places(directory):
        if place.path not in newest:
            try:
                discard(place.path)
            except OSError as error:
                _log.warning("an old checkpoint could not be removed: %s", error)


def discard(path: Path) -> None:
    """Remove a checkpoint, its marker first, so that a half removed one does not count as complete."""
    (path / MARKER).unlink(missing_ok=True)
    sync_directory(path)
    shutil.rmtree(path)
