"""One look at a process before a move: its tensors, CUDA graphs and memory pools, and the allocator's segments."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cadenza.sidecar.client.offload import device

TRACING = "torch._subclasses"
"""Package of tensors without memory of their own, with which torch traces programs."""
GENERATIONS_CHANGE = (3, 14)
"""From this Python on the collector may move objects between its generations without counting a collection."""


class ProcessLook:
    """Objects of a process that Python's collector knows, and the allocator's segments; each is asked for once.

    ``before`` is a look of a moment ago, such as that of the boundary before: then only what was made since is looked
    for, in the collector's young generations. Tensors that only C++ refers to, such as saved activations, and objects
    that gc.freeze() has hidden, are not found.
    """

    def __init__(self, before: ProcessLook | None = None) -> None:
        self._before = before
        self.collections: tuple[int, int] | None = None
        """Count of collections at a look ahead; None for one that later looks cannot go on from."""
        self.seen: list[weakref.ref[Any]] = []
        """The objects of a look ahead."""

    @classmethod
    def ahead(cls) -> ProcessLook:
        """Look now, for a look that comes soon; the objects are kept weakly, so that a training step can free them."""
        look = cls()
        if sys.version_info < GENERATIONS_CHANGE:
            collections = _collections()
            look.seen = [weakref.ref(thing) for thing in look.objects]
            del look.objects
            look.collections = collections
        return look

    @functools.cached_property
    def objects(self) -> list[Any]:
        """The tensors, graphs and pools."""
        before = self._before
        if before is not None and before.collections is not None:
            known = [thing for ref in before.seen if (thing := ref()) is not None]
            # A walk over all objects takes tens of milliseconds, in which the GPU stands.
            young = [*gc.get_objects(generation=0), *gc.get_objects(generation=1)]
            if _collections() == before.collections:  # else some of the young have become old
                return _interesting([*known, *young])
        return _interesting(gc.get_objects())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with memory."""
        return [thing for thing in self.objects if isinstance(thing, torch.Tensor)]

    @functools.cached_property
    def snapshot(self) -> Sequence[Mapping[str, Any]]:
        """The allocator's segments; none before this process uses a GPU."""
        accelerator = device.in_use()
        return accelerator.snapshot() if accelerator else ()


def _interesting(things: list[Any]) -> list[Any]:
    """Return the objects among some that matter to a move, each once; by their types, for there are millions."""
    accelerator = device.in_use()
    names = ("CUDAGraph", "MemPool") if accelerator else ()
    found = (getattr(accelerator.module, name, None) for name in names) if accelerator else ()
    wanted = (torch.Tensor, *(kind for kind in found if isinstance(kind, type)))
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, wanted)}
    kinds = {kind for kind in kinds if not kind.__module__.startswith(TRACING)}
    return [*{id(thing): thing for thing in things if type(thing) in kinds}.values()]


def _collections() -> tuple[int, int]:
    """Return how often the collector has moved objects out of its second generation, and out of its third."""
    stats = gc.get_stats()
    return stats[1]["collections"], stats[2]["collections"]
