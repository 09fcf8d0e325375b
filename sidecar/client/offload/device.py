"""Accelerators whose memory the client moves: the calls that differ between them, each in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Accelerator:
    """One type of device, behind torch's module of its name, such as ``torch.cuda``.

    The names are those of ``torch.cuda``, which all versions since 2.4 have; ``torch.accelerator`` has its memory
    functions since 2.9 only.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """The type of its devices."""

    @property
    def module(self) -> Any:
        """Torch's module of the device."""
        return getattr(torch, self.kind)

    def initialized(self) -> bool:
        """Return True once this process uses the device; asking costs nothing."""
        return bool(self.module.is_initialized())

    def devices(self) -> list[torch.device]:
        """Return the devices that this process sees."""
        return [torch.device(self.kind, index) for index in range(self.module.device_count())]

    def synchronize(self, device: torch.device) -> None:
        """Wait for all streams of a device."""
        self.module.synchronize(device)

    def new_stream(self, device: torch.device) -> torch.Stream:
        """Return another stream than the script's."""
        stream: torch.Stream = self.module.Stream(device)
        return stream

    def using(self, stream: torch.Stream) -> contextlib.AbstractContextManager[object]:
        """Return a context in which operators and copies go to a stream."""
        context: contextlib.AbstractContextManager[object] = self.module.stream(stream)
        return context

    def empty_cache(self) -> None:
        """Give the memory that the allocator keeps for later back to the devices."""
        self.module.empty_cache()

    def allocated(self, device: torch.device) -> int:
        """Return the bytes that the allocator has given out on a device."""
        return int(self.module.memory_allocated(device))

    def reserved(self, device: torch.device) -> int:
        """Return the bytes that the allocator holds on a device, its cache included."""
        return int(self.module.memory_reserved(device))

    def total(self, device: torch.device) -> int:
        """Return a device's memory in bytes."""
        return int(self.module.get_device_properties(device).total_memory)

    def snapshot(self) -> Sequence[Mapping[str, Any]]:
        """Return the allocator's segments."""
        segments: Sequence[Mapping[str, Any]] = self.module.memory_snapshot()
        return segments

    def register_host(self, address: int, nbytes: int) -> int:
        """Pin host memory, so that copies run while the host goes on; return CUDA's error code, 0 for success."""
        return int(self.module.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister_host(self, address: int) -> int:
        """Undo ``register_host``; return CUDA's error code."""
        return int(self.module.cudart().cudaHostUnregister(address))


ACCELERATORS: dict[str, Accelerator] = {"cuda": Accelerator("cuda")}
"""The accelerators whose memory moves, by the type of the device; no other type has run yet."""


def of(device: torch.device) -> Accelerator | None:
    """Return a device's accelerator; None for the CPU and for devices whose memory stays."""
    return ACCELERATORS.get(device.type)


def in_use() -> Accelerator | None:
    """Return the accelerator that this process uses, None before it uses one."""
    return next((one for one in ACCELERATORS.values() if one.initialized()), None)
