"""Device memory at addresses that must not change: CUDA graphs, private pools, buffers registered with NCCL."""

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
class PrivateRange:
    """A range of a device's memory that belongs to a private pool, and the bytes in use there."""

    start: int
    nbytes: int
    used: int
    owner: str


def graph_refusal(objects: Iterable[object], graph: type, *, compiled: bool) -> str | None:
    """Return the reason why this process's CUDA graphs forbid a move; None when it has none."""
    if not any(issubclass(kind, graph) for kind in set(map(type, objects))):
        return None
    origin = " (torch.compile with mode reduce-overhead or max-autotune makes some)" if compiled else ""
    return f"captured CUDA graphs{origin} replay fixed device addresses, which a move would change"


def private_ranges(snapshot: Iterable[Mapping[str, Any]], pools: Iterable[tuple[int, int]]) -> list[PrivateRange]:
    """Return the ranges of an allocator's snapshot that lie in private pools, by address.

    ``pools`` are the ids of the living ``torch.cuda.MemPool``; memory to be registered with NCCL is allocated in
    one. Other private pools belong to CUDA graphs.
    """
    mem_pools = set(pools)
    ranges = []
    for segment in snapshot:
        pool = tuple(segment.get("segment_pool_id", DEFAULT_POOL))
        if pool != DEFAULT_POOL:
            owner = "a torch.cuda.MemPool, as NCCL registers" if pool in mem_pools else "a CUDA graph's private pool"
            ranges.append(PrivateRange(segment["address"], segment["total_size"], segment["allocated_size"], owner))
    return sorted(ranges, key=lambda one: one.start)


def owner_of(ranges: list[PrivateRange], address: int) -> str | None:
    """Return the owner of the range in which an address lies; None outside of all."""
    index = bisect_right(ranges, address, key=lambda one: one.start) - 1
    inside = index >= 0 and address < ranges[index].start + ranges[index].nbytes
    return ranges[index].owner if inside else None


def pool_refusal(ranges: Iterable[PrivateRange]) -> str | None:
    """Return the reason why memory in use in private pools forbids a move, if it does."""
    used: dict[str, int] = {}
    for one in ranges:
        if one.used:
            used[one.owner] = used.get(one.owner, 0) + one.used
    parts = [f"{nbytes / 2**20:.1f} MiB in {owner}" for owner, nbytes in used.items()]
    return f"memory at fixed device addresses: {', '.join(parts)}" if parts else None


def inspect_process() -> tuple[list[PrivateRange], str | None]:
    """Return this process's private ranges, and the reason why its graphs or pools forbid a move, if they do.

    Not run on a GPU yet. Costs nothing in a process that has not used one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [], None
    objects = gc.get_objects()
    mempool = getattr(torch.cuda, "MemPool", None)  # since torch 2.5
    pools = [thing.id for thing in objects if type(thing) is mempool]
    ranges = private_ranges(torch.cuda.memory_snapshot(), pools)  # type: ignore[no-untyped-call]
    refusal = graph_refusal(objects, torch.cuda.CUDAGraph, compiled=COMPILED in sys.modules)
    return ranges, refusal or pool_refusal(ranges)
