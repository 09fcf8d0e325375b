"""The checkpoints of frameworks on the disk: which are whole, and which one is the newest. Imports no framework."""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

STEP = "global_step"
NEEDED = "optimizer_states"
"""Keys of a checkpoint of Lightning: its step, and what one that is for inference alone lacks."""
LIGHTNING_MARKS = ("meta.pt", "latest")
"""The last file that Lightning's strategies for sharded state write into a checkpoint that is a directory."""
TRAINER_MARK = "trainer_state.json"
"""The last file that transformers.Trainer writes into a checkpoint."""
NAMED = re.compile(r"step[=-](\d+)")


def newest_of_lightning(own: Iterable[Path], others: Iterable[Path]) -> Path | None:
    """Return the newest whole checkpoint: of Cadenza's ``own``, and in the directories ``others`` of ModelCheckpoint.

    Of two of one step it is the later one on the disk, which may have the work at the end of an epoch.
    """
    found = [*own, *(path for folder in others if folder.is_dir() for path in folder.glob("*.ckpt"))]
    steps = [(step, path.stat().st_mtime, str(path)) for path in found if (step := lightning_step(path)) is not None]
    return Path(max(steps)[2]) if steps else None


def lightning_step(path: Path) -> int | None:
    """Return the step of a checkpoint of Lightning; None for one that is not whole, or cannot be trained on from."""
    if path.is_dir():
        named = NAMED.search(path.name)
        return int(named[1]) if named and any((path / mark).exists() for mark in LIGHTNING_MARKS) else None
    try:
        with zipfile.ZipFile(path) as archive:  # its table of contents is at the end of the file
            inside = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _step_in(archive.read(inside))
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError):
        return None


def _step_in(pickled: bytes) -> int | None:
    """Return the step in a pickled checkpoint, without executing any of it."""
    step, waits, whole = None, False, False
    for code, argument, _ in pickletools.genops(pickled):
        whole |= argument == NEEDED
        if waits and isinstance(argument, int) and not _is_memo(code.name):
            step, waits = argument, False
        waits |= step is None and argument == STEP
        if whole and step is not None:
            return step
    return None


def _is_memo(code: str) -> bool:
    """Return whether an opcode's number is a place in pickle's memo."""
    return code in {"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"}


def newest_of_trainer(folder: Path) -> Path | None:
    """Return the newest whole ``checkpoint-N`` that a Trainer has written in its output directory."""
    return max(_of_trainer(folder), default=(0, None), key=lambda found: found[0])[1]


def _of_trainer(folder: Path) -> Iterator[tuple[int, Path | None]]:
    """Yield step and path of each."""
    for path in folder.glob("checkpoint-*") if folder.is_dir() else ():
        number = path.name.partition("-")[2]
        if number.isdecimal() and _is_json(path / TRAINER_MARK):
            yield int(number), path


def _is_json(path: Path) -> bool:
    """Return whether a file is there and whole."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
