"""Device memory at addresses that must not change: CUDA graphs, private pools, buffers registered with NCCL."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cadenza.sidecar.client.offload import device
from cadenza.sidecar.client.offload.process_look import ProcessLook

DEFAULT_POOL = (0, 0)
"""The caching allocator's own pool (``segment_pool_id`` in ``torch.cuda.memory_snapshot()``)."""
COMPILED = "torch._inductor.cudagraph_trees"
NATIVE = "native"
"""Torch's own caching allocator, by ``torch.cuda.get_allocator_backend()``."""
GRAPH = "a CUDA graph's private pool"
POOL = "a torch.cuda.MemPool, as NCCL registers"
"""Owners of private pools."""


class PrivateRange(NamedTuple):
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
            owner = POOL if pool in mem_pools else GRAPH
            ranges.append(PrivateRange(segment["address"], segment["total_size"], segment["allocated_size"], owner))
    return sorted(ranges, key=lambda one: one.start)


def mem_pools(accelerator: device.Accelerator, objects: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the ids of the living ``torch.cuda.MemPool`` among some objects."""
    mempool = getattr(accelerator.module, "MemPool", None)  # since torch 2.5
    if mempool is None:
        return []
    return [thing.id for thing in objects if type(thing) is mempool]


def owner_of(ranges: list[PrivateRange], address: int) -> str | None:
    """Return the owner of the range in which an address lies; None outside of all."""
    index = bisect_right(ranges, PrivateRange(address, sys.maxsize, 0, "")) - 1
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


def allocator_refusal(name: str) -> str | None:
    """Return the reason why torch's allocator of this name forbids a move; None for the native one.

    Others, ``cudaMallocAsync`` and those that are plugged in, do not say which memory is at fixed addresses, and their
    memory does not go back to the GPU when torch empties its caches.
    """
    if name == NATIVE:
        return None
    return f"torch's allocator is {name or 'one that was plugged in'}: only the native one gives memory back"


def idle_pool_refusal(ranges: Iterable[PrivateRange]) -> str | None:
    """Return the reason why graphs' pools that outlive an emptied cache forbid a move; None without any.

    Nothing in such a pool is in use, but a graph replays there that the search for graphs has not found: gc.freeze()
    hides objects from it.
    """
    nbytes = sum(one.nbytes for one in ranges if one.owner == GRAPH)
    return (
        f"{nbytes / 2**20:.1f} MiB at fixed device addresses belong to {GRAPH}, whose graph still lives"
        if nbytes
        else None
    )


def inspect_process(look: ProcessLook) -> tuple[list[PrivateRange], str | None]:
    """Return this process's private ranges, and the reason why its allocator, graphs or pools forbid a move, if any do.

    Costs nothing in a process that has not used a GPU.
    """
    accelerator = device.in_use()
    if accelerator is None:
        return [], None
    if refusal := allocator_refusal(accelerator.module.get_allocator_backend()):
        return [], refusal
    pools = mem_pools(accelerator, look.objects)
    ranges = private_ranges(look.snapshot, pools)
    graph = getattr(accelerator.module, "CUDAGraph", None)
    refusal = graph_refusal(look.objects, graph, compiled=COMPILED in sys.modules) if graph else None
    refusal = refusal or pool_refusal(ranges)
    if refusal is None and any(one.owner == GRAPH for one in ranges):
        accelerator.empty_cache()  # frees the pools whose graphs are gone
        ranges = private_ranges(accelerator.snapshot(), pools)
        refusal = idle_pool_refusal(ranges)
    return ranges, refusal
