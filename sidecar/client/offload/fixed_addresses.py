"""Finds device memory whose address somebody keeps: CUDA graphs, private pools, buffers registered with NCCL."""

from __future__ import annotations

import gc
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_POOL = (0, 0)
"""The caching allocator's own pool (``segment_pool_id`` in ``torch.cuda.memory_snapshot()``)."""
COMPILED = "torch._inductor.cudagraph_trees"


@dataclass(frozen=True)
class Held:
    """One range of a device's memory that belongs to a private pool, and the bytes in use there."""

    start: int
    nbytes: int
    used: int
    owner: str


def graphs(objects: Iterable[object], graph: type, *, compiled: bool) -> str:
    """Return why this process's CUDA graphs forbid a move, or "" when it has none."""
    if not any(issubclass(kind, graph) for kind in set(map(type, objects))):
        return ""
    whose = " (torch.compile with mode reduce-overhead or max-autotune makes some)" if compiled else ""
    return f"captured CUDA graphs{whose} replay fixed device addresses, which a move would change"


def private(snapshot: Iterable[Mapping[str, Any]], pools: Iterable[tuple[int, int]]) -> list[Held]:
    """Return the ranges of an allocator's snapshot that lie in private pools, by address.

    ``pools`` are the identities of the living ``torch.cuda.MemPool``; memory to be registered with NCCL is
    allocated in one. Other private pools are CUDA graphs'.
    """
    known = set(pools)
    held = []
    for segment in snapshot:
        pool = tuple(segment.get("segment_pool_id", DEFAULT_POOL))
        if pool != DEFAULT_POOL:
            owner = "a torch.cuda.MemPool, as NCCL registers" if pool in known else "a CUDA graph's private pool"
            held.append(Held(segment["address"], segment["total_size"], segment["allocated_size"], owner))
    return sorted(held, key=lambda one: one.start)


def owner(held: list[Held], address: int) -> str:
    """Return in whose range an address lies, or "" when in none."""
    index = bisect_right(held, address, key=lambda one: one.start) - 1
    if index >= 0 and address < held[index].start + held[index].nbytes:
        return held[index].owner
    return ""


def refusal(held: Iterable[Held]) -> str:
    """Return why memory in use in private pools forbids a move, or ""."""
    used: dict[str, int] = {}
    for one in held:
        if one.used:
            used[one.owner] = used.get(one.owner, 0) + one.used
    parts = [f"{nbytes / 2**20:.1f} MiB in {whose}" for whose, nbytes in used.items()]
    return f"memory at fixed device addresses: {', '.join(parts)}" if parts else ""


def here() -> tuple[list[Held], str]:
    """Return this process's private ranges, and why its graphs and pools forbid a move, or "".

    Not run on a GPU yet. Costs nothing in a process that has not used one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [], ""
    objects = gc.get_objects()
    mempool = getattr(torch.cuda, "MemPool", None)  # since torch 2.5
    pools = [thing.id for thing in objects if type(thing) is mempool]
    held = private(torch.cuda.memory_snapshot(), pools)  # type: ignore[no-untyped-call]
    return held, graphs(objects, torch.cuda.CUDAGraph, compiled=COMPILED in sys.modules) or refusal(held)
