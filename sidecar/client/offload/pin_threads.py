"""Keeps the pinning threads of torch's data loaders still while this process stands at a boundary."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

MODULE = "torch.utils.data._utils.pin_memory"
"""Its ``pin_memory`` is what a loader's thread calls on each batch, by that name."""


class _Gate:
    """Held by the thread that pins a batch, or by the one that stands at a boundary."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.original: Any = None
        self.gated: Any = None
        self.fork_watched = False

    def renew(self) -> None:
        """In a forked child: a thread that held the lock is not there any more."""
        self.lock = threading.RLock()


_gate = _Gate()


def watch() -> None:
    """From now on let no loader pin a batch within ``quiet``; once a process."""
    module = sys.modules.get(MODULE)
    if module is None or _gate.gated is not None:
        return
    original = _gate.original = module.pin_memory

    @functools.wraps(original)
    def gated(*args: Any, **options: Any) -> Any:
        with _gate.lock:
            return original(*args, **options)

    module.pin_memory = _gate.gated = gated  # type: ignore[attr-defined]
    if not _gate.fork_watched:
        _gate.fork_watched = True
        os.register_at_fork(after_in_child=_gate.renew)


def unwatch() -> None:
    """Put torch's own function back, unless somebody has replaced it meanwhile."""
    module = sys.modules.get(MODULE)
    if module is not None and _gate.gated is not None and module.pin_memory is _gate.gated:
        module.pin_memory = _gate.original  # type: ignore[attr-defined]
    _gate.gated = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let the loaders' threads finish the batch at hand, and start no other before this ends."""
    with _gate.lock:
        yield
