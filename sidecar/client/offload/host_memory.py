"""Host memory for a job's state: pinned once and kept for a GPU, plain and given back for the CPU."""

from __future__ import annotations

import contextlib
import logging
import mmap
from typing import Any

import torch

from cadenza.sidecar.client.errors import MoveError

_log = logging.getLogger("cadenza.client")


class Arena:
    """One piece of host memory that grows when more is asked for."""

    def __init__(self) -> None:
        self._memory = new(0)
        self._for_device = False
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """What it holds now."""
        return self._memory.nbytes

    def reserve(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return at least ``nbytes`` bytes; raise MoveError when the host has not got them."""
        if self._memory.nbytes < nbytes or pinned != self._for_device:
            self.free()
            try:
                self._memory = mapped(nbytes, huge=pinned)
            except (OSError, OverflowError) as error:
                raise MoveError(f"no {nbytes >> 20} MiB of host memory: {error}") from None
            self._for_device = pinned
            self._register()
        return self._memory

    def free(self) -> None:
        """Give the memory back."""
        if self._pinned and self._memory.nbytes:
            _cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = new(0)
        self._pinned = False

    def _register(self) -> None:
        """Pin exactly what was asked for: torch's own pinned allocator rounds up to a power of two."""
        if self._for_device and self._memory.nbytes:
            place, nbytes = self._memory.data_ptr(), self._memory.nbytes
            failed = int(_cudart().cudaHostRegister(place, nbytes, 0))
            self._pinned = not failed
            if failed:
                _log.warning("host memory could not be pinned (CUDA error %d): moves are slower", failed)


def mapped(nbytes: int, *, huge: bool) -> torch.Tensor:
    """Return new host memory; in huge pages, where the kernel has them, what stays and is to be pinned.

    Not what is given back each time: a virtual machine's kernel hands free huge pages to its host, which takes
    longer to return one than the copy into it.
    """
    if not nbytes:
        return new(0)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def new(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return new memory, untouched: deterministic mode would fill what torch.empty returns."""
    return whole(torch.UntypedStorage(nbytes, device=device))  # type: ignore[no-untyped-call]


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as bytes: a tensor of its own, so that nobody's version counter moves."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _cudart() -> Any:
    """Return the CUDA runtime that torch uses."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
