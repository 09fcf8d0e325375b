"""Streams of device memory: each storage's block belongs to one, and comes back on it."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cadenza.sidecar.client.offload import device


def streams(snapshot: Iterable[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    """Return the ranges of an allocator's snapshot that lie in blocks of side streams: start, bytes and stream."""
    fields = ((segment["address"], segment["total_size"], segment.get("stream", 0)) for segment in snapshot)
    # 0 is the default stream, on which nearly all memory is: storages there need no search.
    return sorted(one for one in fields if one[2])


def stream_of(ranges: list[tuple[int, int, int]], address: int) -> int:
    """Return the stream that memory at an address belongs to; 0, the default stream, outside of all ranges."""
    index = bisect_right(ranges, (address, sys.maxsize, 0)) - 1
    return ranges[index][2] if index >= 0 and address < ranges[index][0] + ranges[index][1] else 0


def allocating_on(place: torch.device, stream: int) -> contextlib.AbstractContextManager[object]:
    """Return a context in which new memory of a device belongs to one of its streams, 0 being the default one.

    Memory that came back on another stream could be handed on while its own stream still reads it.
    """
    accelerator = device.of(place)
    return accelerator.using(accelerator.stream(place, stream)) if accelerator else contextlib.nullcontext()
