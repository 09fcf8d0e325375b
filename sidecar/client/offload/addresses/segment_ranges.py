"""Ranges of device memory to copy, by the allocator's snapshot and the library's segments; no torch, no state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cadenza.sidecar.client.offload.copy_plan import AddressPlan, Range, aligned
from cadenza.sidecar.client.offload.fixed_addresses import DEFAULT_POOL

GAP_BYTES = 2**20
"""Unused memory between two blocks that is copied along: a copy of its own would cost more."""
FREE = "inactive"
"""State of a block that nothing uses; those that wait for a stream may be read there once the job goes on."""


def plan(snapshot: Sequence[Mapping[str, Any]], served: Mapping[int, tuple[int, int]]) -> AddressPlan | str:
    """Return the move of all segments of an allocator, or the reason why their addresses cannot stay.

    ``served`` are the library's segments: number and bytes by address. The devices of the ranges are indices.
    """
    foreign = [one for one in snapshot if served.get(one["address"], (0, 0))[1] != one["total_size"]]
    if foreign:
        return _foreign(foreign)
    ranges: list[Range] = []
    offset = 0
    for segment in sorted(snapshot, key=lambda one: int(one["address"])):
        number = served[segment["address"]][0]
        for start, end in _in_use(segment):
            ranges.append(Range(number, segment["device"], start, end - start, offset))
            offset += aligned(end - start)
    copied = dict.fromkeys(one.segment for one in ranges)
    numbers = [served[one["address"]][0] for one in snapshot]
    empty = [number for number in numbers if number not in copied]
    devices = dict.fromkeys(one["device"] for one in snapshot)
    nbytes = sum(one["total_size"] for one in snapshot)
    return AddressPlan(tuple(ranges), (*empty, *copied), tuple(devices), nbytes)


def _foreign(segments: Iterable[Mapping[str, Any]]) -> str:
    """Return the reason for segments that the library has not served."""
    expandable = [one for one in segments if one.get("is_expandable")]
    nbytes = sum(int(one["total_size"]) for one in expandable or segments)
    if expandable:
        return (
            f"{nbytes >> 20} MiB are in expandable segments, which do not come from cudaMalloc "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
        )
    return (
        f"{nbytes >> 20} MiB of torch's memory did not come through the preloaded library: "
        "this torch has a CUDA runtime of its own inside"
    )


def _in_use(segment: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield start and end of the parts to copy; a graph's private pool is copied whole, since a replay writes there."""
    whole = (segment["address"], segment["address"] + segment["total_size"])
    if tuple(segment.get("segment_pool_id", DEFAULT_POOL)) != DEFAULT_POOL:
        yield whole
        return
    start = end = 0
    place = segment["address"]
    for block in segment["blocks"]:
        first, place = place, place + block["size"]
        if block["state"] == FREE:
            continue
        if end and first - end <= GAP_BYTES:
            end = place
            continue
        if end:
            yield start, end
        start, end = first, place
    if end:
        yield start, end
