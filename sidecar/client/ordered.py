"""A checkpoint on order: what a rank saves at the boundary where all ranks stand, and what it says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from cadenza.sidecar.client.clock import monotonic_ns

MAX_TEXT = 2000
CANNOT = "it has no checkpoint to save: see client.checkpoint() and Session.call(on_checkpoint=…)"

_log = logging.getLogger("cadenza.client")


class Later:
    """The type of LATER."""


LATER: Final = Later()
"""What a saver returns whose framework saves after the boundary, and then calls ``Session.checkpointed``."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: the step that it is of, its bytes over all ranks (0: not known), and its path."""

    step: int
    nbytes: int = 0
    path: str = ""

    def fields(self, seconds: float) -> dict[str, Any]:
        """Return the fields of a ``checkpointed`` message."""
        path = self.path[:MAX_TEXT]
        return {"step": self.step, "bytes": self.nbytes, "seconds": seconds, "path": path, "error": ""}


Saver: TypeAlias = Callable[[], object]
"""Saves on every rank; returns a Saved, a path, None, or LATER, and raises when nothing complete was saved."""


def save(saver: Saver, step: int) -> dict[str, Any] | None:
    """Call a saver; return the fields of the answer, or None when it will come later. Never raises an Exception."""
    began = monotonic_ns()
    try:
        found = saver()
    except Exception as error:  # noqa: BLE001 - a framework's own code; the training goes on in any case
        _log.warning("the checkpoint that Cadenza asked for failed, the job goes on: %s", error)
        text = (str(error) or repr(error))[:MAX_TEXT]
        return {"step": step, "bytes": 0, "seconds": (monotonic_ns() - began) * 1e-9, "path": "", "error": text}
    if isinstance(found, Later):
        return None
    saved = found if isinstance(found, Saved) else Saved(step, path=str(found or ""))
    return saved.fields((monotonic_ns() - began) * 1e-9)
