"""Storages that were exported to other libraries or processes, whose pointers a release would break."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PRUNE_AT = 1024
"""Number of remembered exports at which those whose storage is gone are dropped."""


class _Watch:
    """Storages exported through DLPack since ``watch``, and the function that ends watching."""

    def __init__(self) -> None:
        self.exports: dict[int, StorageWeakRef] = {}
        self.end: Callable[[], None] | None = None


_watch = _Watch()


def watch() -> None:
    """Note each tensor that another library takes through ``__dlpack__``, from now on; once a process.

    Torch keeps no trace of such an export. After an export to NumPy it refuses to resize the storage.
    """
    if _watch.end is not None:
        return
    original: Any = torch.Tensor.__dlpack__

    @functools.wraps(original)
    def noting(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        storage = self.untyped_storage()
        if len(_watch.exports) >= PRUNE_AT:
            _watch.exports = {key: ref for key, ref in _watch.exports.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        _watch.exports[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return original(self, *args, **options)

    def end() -> None:
        if torch.Tensor.__dlpack__ is noting:
            torch.Tensor.__dlpack__ = original  # type: ignore[method-assign]

    torch.Tensor.__dlpack__ = noting  # type: ignore[method-assign]
    _watch.end = end


def unwatch() -> None:
    """Put torch's own method back, unless other code has replaced it since."""
    if _watch.end is not None:
        _watch.end()
        _watch.end = None


def reasons() -> dict[int, str]:
    """Return the live storages to which others have a pointer, each with the kind of export."""
    exported = {key: "exported through DLPack" for key, ref in _watch.exports.items() if not ref.expired()}  # type: ignore[no-untyped-call]
    reductions = sys.modules["torch.multiprocessing.reductions"]
    for ref in list(reductions.shared_cache.values()):
        if not ref.expired():
            exported[ref.cdata] = "shared with another process by torch.multiprocessing"
    return exported
