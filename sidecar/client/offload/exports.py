"""Remembers which storages were handed to other libraries or processes, whose pointers a release would break."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PRUNE_AT = 1024
"""Remembered exports at which those whose storage is gone are dropped."""


class _Watch:
    """What was exported through DLPack since ``watch``, and how to end watching."""

    def __init__(self) -> None:
        self.seen: dict[int, StorageWeakRef] = {}
        self.end: Callable[[], None] | None = None

    def note(self, tensor: torch.Tensor) -> None:
        """Remember a tensor's storage, weakly."""
        storage = tensor.untyped_storage()
        if len(self.seen) >= PRUNE_AT:
            self.seen = {key: ref for key, ref in self.seen.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        self.seen[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # noqa: SLF001


_watch = _Watch()


def watch() -> None:
    """From now on note each tensor that another library asks for through ``__dlpack__``; once a process.

    Torch keeps no trace of such an export, unlike one to NumPy, after which it refuses to resize the storage.
    """
    if _watch.end is not None:
        return
    original: Any = torch.Tensor.__dlpack__

    @functools.wraps(original)
    def noting(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        _watch.note(self)
        return original(self, *args, **options)

    def end() -> None:
        if _method() is noting:
            _replace(original)

    _replace(noting)
    _watch.end = end


def unwatch() -> None:
    """Put torch's own method back, unless somebody has replaced it meanwhile."""
    if _watch.end is not None:
        _watch.end()
        _watch.end = None


def _method() -> Any:
    """Return the method that exports a tensor."""
    return torch.Tensor.__dlpack__


def _replace(method: Any) -> None:
    """Make a function the method that exports a tensor."""
    torch.Tensor.__dlpack__ = method  # type: ignore[method-assign]


def users() -> dict[int, str]:
    """Return, by storage, who was given a pointer to it: live storages only."""
    found = {key: "exported through DLPack" for key, ref in _watch.seen.items() if not ref.expired()}  # type: ignore[no-untyped-call]
    reductions = sys.modules["torch.multiprocessing.reductions"]
    for ref in list(reductions.shared_cache.values()):
        if not ref.expired():
            found[ref.cdata] = "shared with another process by torch.multiprocessing"
    return found
