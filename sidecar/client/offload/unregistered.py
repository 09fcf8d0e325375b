"""Device memory that belongs to no registered state: its size, and the tensors in it that Python can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from cadenza.sidecar.client.offload import device as accelerators

LIMIT_BYTES = 256 * 2**20
LIMIT_SHARE = 0.02
"""Memory that may stay unregistered: the larger of these bytes and this share of the device's memory. It holds the
workspaces of libraries, and what a loop keeps for a moment, such as its last loss."""
MAX_NAMED = 3
"""Number of tensors that a refusal names."""


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes: what torch's allocator has given out in this process, and the whole device's."""

    allocated: int
    total: int


def in_use() -> dict[torch.device, DeviceMemory]:
    """Return the memory of each GPU that this process has tensors on; nothing before it uses one."""
    accelerator = accelerators.in_use()
    if accelerator is None:
        return {}
    allocated = {device: accelerator.allocated(device) for device in accelerator.devices()}
    return {device: DeviceMemory(nbytes, accelerator.total(device)) for device, nbytes in allocated.items() if nbytes}


def excess(memory: Mapping[torch.device, DeviceMemory], known: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Return the bytes of each device that belong to nothing known, where they are above the limit."""
    unknown = {device: used.allocated - known.get(device, 0) for device, used in memory.items()}
    return {
        device: nbytes
        for device, nbytes in unknown.items()
        if nbytes > max(LIMIT_BYTES, int(LIMIT_SHARE * memory[device].total))
    }


def refusal(unknown: Mapping[torch.device, int], tensors: Mapping[str, int]) -> str | None:
    """Return the reason why unregistered memory forbids a move, if there is any; ``tensors`` are sizes by name."""
    if not unknown:
        return None
    sizes = ", ".join(f"{nbytes >> 20} MiB of memory on {device}" for device, nbytes in unknown.items())
    largest = sorted(tensors.items(), key=lambda one: -one[1])[:MAX_NAMED]
    names = ", ".join(f"{name} ({nbytes >> 20} MiB)" for name, nbytes in largest)
    return (
        f"{sizes} belong to nothing that was given to attach()"
        f"{f', such as {names}' if names else ''}: pass them, or use attach(..., everything=True)"
    )
