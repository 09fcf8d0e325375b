"""A requested checkpoint: the save at the boundary where all ranks stand, and the report of it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cadenza.sidecar.client.errors import SaveError

MAX_TEXT = 2000
PR_SET_PDEATHSIG = 1
NO_CHECKPOINT = (
    "it has no checkpoint to save: see client.checkpoint(), cadenza run --saves, Session.call(on_checkpoint=…)"
)

_log = logging.getLogger("cadenza.client")


DEFERRED: Final = object()
"""Result of a saver whose framework saves after the boundary, and then calls ``Session.checkpointed``."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step, its bytes over all ranks (0: not known), and its path."""

    step: int
    nbytes: int = 0
    path: str = ""
    lost_s: float = 0.0
    """Training since then that a restart repeats, in seconds."""


Saver = Callable[[], object]
"""Saves on every rank; returns a Saved, a path, or DEFERRED, and raises when nothing complete was saved."""


@contextlib.contextmanager
def default_sigterm() -> Iterator[None]:
    """Let a requeue end this process at once while it waits with its checkpoint on the disk."""
    before = signal.getsignal(signal.SIGTERM)
    # Python changes handlers on the main thread only, and None stands for a handler that is not Python's.
    changes = before not in (None, signal.SIG_DFL) and threading.current_thread() is threading.main_thread()
    try:
        # Where Slurm tracks processes by control groups, its signal reaches the batch script alone. Slurm kills the
        # processes that are left, and looks again a second later.
        _end_with_parent(signal.SIGKILL)
        # Slurm begins with a SIGTERM, and waits for KillWait if a handler only records it.
        if changes:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
    finally:
        _end_with_parent(0)
        if changes:
            signal.signal(signal.SIGTERM, before)


def _end_with_parent(number: int) -> None:
    """Have the kernel send a signal when the parent ends, none for 0; nothing where the system cannot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def failure(step: int, error: str, seconds: float = 0.0) -> dict[str, Any]:
    """Return the fields of a ``checkpointed`` message about a checkpoint that could not be saved."""
    return {"step": step, "bytes": 0, "seconds": seconds, "paths": [], "error": error[:MAX_TEXT]}


def call(saver: Saver, step: int) -> object:
    """Call a saver; return what it has saved, DEFERRED, or the reason, a text, why there is no checkpoint.

    Never raises an Exception. ``step`` counts boundaries; it is that of a checkpoint whose saver names only a path.
    """
    try:
        result = saver()
        return result if result is DEFERRED else placed(result, step)
    except Exception as error:  # noqa: BLE001 - a framework's own code; the training continues
        _log.warning("the checkpoint that Cadenza asked for failed, the job continues: %s", error)
        return str(error) or repr(error)


def placed(result: object, step: int) -> Saved:
    """Return a saver's result with an absolute path; raise SaveError for one without a path."""
    saved = result if isinstance(result, Saved) else Saved(step, path=os.fspath(result or ""))  # type: ignore[call-overload]
    if not saved.path:
        raise SaveError("its saver returned no path: nothing says that a checkpoint is on the disk")
    path = str(Path(saved.path).absolute())
    if not path.isprintable():
        raise SaveError(f"its saver returned {path!r}, a path that cannot be shown")
    return replace(saved, path=path)
