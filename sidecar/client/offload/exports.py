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


WATCHED: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "__dlpack__", "exported through DLPack"),
    (torch.UntypedStorage, "_share_cuda_", "shared with another process by CUDA IPC"),
)
"""Methods that give a pointer away, and the reason that each is for a storage to stay.

Torch keeps no trace of the first. Of the second it keeps one for each block of cudaMalloc, and so forgets all but the
last of the storages that are shared out of one block.
"""


class _Watch:
    """Storages exported since ``watch`` with their reasons, and the functions that end watching."""

    def __init__(self) -> None:
        self.exports: dict[int, tuple[StorageWeakRef, str]] = {}
        self.ends: list[Callable[[], None]] = []


_watch = _Watch()


def watch() -> None:
    """Note each storage that another library or process takes, from now on; once a process.

    After an export to NumPy torch refuses to resize the storage by itself.
    """
    if not _watch.ends:
        _watch.ends = [_note_calls(*one) for one in WATCHED]


def _note_calls(owner: Any, name: str, reason: str) -> Callable[[], None]:
    """Note the calls of a method of tensors or storages; return the function that puts torch's own back."""
    original: Any = getattr(owner, name)

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **options: Any) -> Any:
        storage = self.untyped_storage() if isinstance(self, torch.Tensor) else self
        if len(_watch.exports) >= PRUNE_AT:
            _watch.exports = {key: one for key, one in _watch.exports.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        _watch.exports[storage._cdata] = StorageWeakRef(storage), reason  # type: ignore[no-untyped-call]  # noqa: SLF001
        return original(self, *args, **options)

    def end() -> None:
        if getattr(owner, name) is noting:
            setattr(owner, name, original)

    setattr(owner, name, noting)
    return end


def unwatch() -> None:
    """Put torch's own methods back, unless other code has replaced them since."""
    for end in _watch.ends:
        end()
    _watch.ends = []


def reasons() -> dict[int, str]:
    """Return the live storages to which others have a pointer, each with the kind of export."""
    exported = {key: reason for key, (ref, reason) in _watch.exports.items() if not ref.expired()}  # type: ignore[no-untyped-call]
    reductions = sys.modules["torch.multiprocessing.reductions"]
    # torch.multiprocessing remembers each storage that it has sent, also from before `watch`.
    for ref in list(reductions.shared_cache.values()):
        if not ref.expired():
            exported.setdefault(ref.cdata, "shared with another process by torch.multiprocessing")
    return exported
