"""Accelerators whose memory the client moves: the calls that differ between them, each in one place."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

CUDA_RUNTIME = re.compile(r"(/\S*/libcudart[^/\s]*\.so[^/\s]*)$")
"""Path of the runtime in /proc/self/maps (proc_pid_maps(5)); wheels put a hash into its name."""


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

    def stream(self, device: torch.device, address: int) -> torch.Stream:
        """Return the stream with an address (``cudaStream_t``), as the snapshot names it; 0 is the default stream."""
        found: torch.Stream = (
            self.module.ExternalStream(address, device) if address else self.module.default_stream(device)
        )
        return found

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

    def used(self) -> list[torch.device]:
        """Return the devices on which the allocator holds memory; asking opens a context on none."""
        return [device for device in self.devices() if self.reserved(device)]

    def in_use_and_peak(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes that the allocator has given out on a device, now and at the peak."""
        stats = self.module.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
        return int(stats.get("current", 0)), int(stats.get("peak", 0))

    def free(self, device: torch.device) -> int | None:
        """Return the memory of a device that no process has, None if it is not told; this opens a context there."""
        try:
            return int(self.module.mem_get_info(device)[0])
        except RuntimeError:
            return None

    def total(self, device: torch.device) -> int:
        """Return a device's memory in bytes."""
        return int(self.module.get_device_properties(device).total_memory)

    def snapshot(self) -> Sequence[Mapping[str, Any]]:
        """Return the allocator's segments."""
        segments: Sequence[Mapping[str, Any]] = self.module.memory_snapshot()
        return segments

    def at_address(self, device: torch.device, address: int, nbytes: int) -> torch.Tensor:
        """Return a device's memory at an address as bytes, which keep nothing alive."""
        found: torch.Tensor = torch.as_tensor(_Memory(address, nbytes), device=device)
        return found

    def register_host(self, address: int, nbytes: int) -> int:
        """Pin host memory, so that copies run while the host goes on; return CUDA's error code, 0 for success.

        It takes place in the context of the thread's device, which it opens if it has none, and holds for all GPUs.
        """
        return int(self.module.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister_host(self, address: int) -> int:
        """Undo ``register_host``; return CUDA's error code."""
        return int(self.module.cudart().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Clear the error of a call that this thread has made outside of torch.

        CUDA keeps it, and reports it again at the thread's next kernel, which has nothing to do with it (CUDA Runtime
        API, error handling). Torch's binding of the runtime lacks the call, so that it goes to the library itself.
        """
        if runtime := _runtime():
            runtime.cudaGetLastError()

    def pci_address(self, device: torch.device) -> str:
        """Return a device's address on the PCI bus, such as ``0000:3B:00.0``; "" if it is not told.

        Torch's properties of a device have it since 2.8 only. The call opens no context.
        """
        text, call = ctypes.create_string_buffer(32), getattr(_runtime(), "cudaDeviceGetPCIBusId", None)
        failed = call is None or call(text, len(text), device.index or 0)
        return "" if failed else text.value.decode("ascii", "replace")

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a device is this thread's."""
        context: contextlib.AbstractContextManager[object] = self.module.device(device)
        return context


def _runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if match := CUDA_RUNTIME.search(line):
            return ctypes.CDLL(match.group(1))
    return None


class _Memory:
    """Memory of a GPU for other libraries (docs: CUDA Array Interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def accelerators(hip: str | None) -> dict[str, Accelerator]:
    """Return the accelerators whose memory moves, by the type of the device; no other type has run yet.

    A torch for ROCm (``torch.version.hip``) calls its devices *cuda*, too, and has neither CUDA's runtime nor NVML.
    """
    return {} if hip else {"cuda": Accelerator("cuda")}


ACCELERATORS = accelerators(torch.version.hip)


def of(device: torch.device) -> Accelerator | None:
    """Return a device's accelerator; None for the CPU and for devices whose memory stays."""
    return ACCELERATORS.get(device.type)


def never_ran(kind: str, hip: str | None = torch.version.hip) -> str:
    """Return why memory on a device of a type that is not the CPU's stays there."""
    name = f"ROCm {hip}" if hip and kind == "cuda" else f"devices of type {kind}"
    return f"on {name}, with which this engine has never run"


def in_use() -> Accelerator | None:
    """Return the accelerator that this process uses, None before it uses one."""
    return next((one for one in ACCELERATORS.values() if one.initialized()), None)
