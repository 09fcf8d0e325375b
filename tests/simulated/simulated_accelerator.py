"""The simulated GPU as an accelerator of the client."""

from __future__ import annotations

import ctypes

import torch

from cadenza.sidecar.client.offload.device import ACCELERATORS, Accelerator

PRIVATE_USE = 20
"""Type of the device in C++ (c10::DeviceType::PrivateUse1)."""


class Simulated(Accelerator):
    """Calls that torch does not have for it go to the backend's library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__("simulated")
        self._library = library

    def stream(self, device: torch.device, address: int) -> torch.Stream:
        """Return the stream with a number."""
        return torch.Stream(stream_id=address, device_index=device.index or 0, device_type=PRIVATE_USE)

    def at_address(self, device: torch.device, address: int, nbytes: int) -> torch.Tensor:
        """Return a device's memory at an address as bytes."""
        found: torch.Tensor = torch.ops.simulated.at_address(address, nbytes, device.index or 0)
        return found

    def register_host(self, address: int, nbytes: int) -> int:
        """Pin host memory; return the error code, 0 for success."""
        return int(self._library.simulated_register(address, nbytes))

    def unregister_host(self, address: int) -> int:
        """Undo it."""
        return int(self._library.simulated_unregister(address))

    def clear_error(self) -> None:
        """Clear the last error."""
        self._library.simulated_last_error()


def register(library: ctypes.CDLL) -> None:
    """Let the client move its memory."""
    ACCELERATORS["simulated"] = Simulated(library)
