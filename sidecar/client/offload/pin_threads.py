"""Pause for the pinning threads of torch's data loaders while this process stops at a boundary."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

MODULE = "torch.utils.data._utils.pin_memory"
"""A loader's thread calls this module's ``pin_memory`` on each batch, by that name."""


class _Gate:
    """Lock held by the thread that pins a batch, or by the one that stops at a boundary."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.original: Any = None
        self.gated: Any = None

    def renew(self) -> None:
        """Replace the lock in a forked child, where the thread that held it does not exist."""
        self.lock = threading.RLock()


_gate = _Gate()
os.register_at_fork(after_in_child=_gate.renew)


def watch() -> None:
    """Let no loader pin a batch within ``pinning_paused``, from now on; once a process."""
    module = sys.modules.get(MODULE)
    if module is None or _gate.gated is not None:
        return
    original = _gate.original = module.pin_memory

    @functools.wraps(original)
    def gated(*args: Any, **options: Any) -> Any:
        # From the survey to the resume no other thread may use tensors, and torch pins in a thread of its own.
        with _gate.lock:
            return original(*args, **options)

    module.pin_memory = _gate.gated = gated  # type: ignore[attr-defined]


def unwatch() -> None:
    """Put torch's own function back, unless other code has replaced it since."""
    module = sys.modules.get(MODULE)
    if module is not None and _gate.gated is not None and module.pin_memory is _gate.gated:
        module.pin_memory = _gate.original  # type: ignore[attr-defined]
    _gate.gated = None


@contextlib.contextmanager
def pinning_paused() -> Iterator[None]:
    """Wait until the loaders' threads have pinned the batch at hand, and let them start no other within."""
    with _gate.lock:
        yield
