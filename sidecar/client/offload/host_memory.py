"""Host memory for a job's state: pinned once and kept for a GPU, unpinned and freed for the CPU."""

from __future__ import annotations

import contextlib
import logging
import mmap

import torch

from cadenza.sidecar.client.errors import MoveError
from cadenza.sidecar.client.offload.device import Accelerator

_log = logging.getLogger("cadenza.client")


class HostBuffer:
    """One piece of host memory that grows on demand."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._memory = allocate(0)
        self._accelerator: Accelerator | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """Its size now."""
        return self._memory.nbytes

    def reserve(self, nbytes: int, accelerator: Accelerator | None) -> torch.Tensor:
        """Return at least ``nbytes`` bytes, pinned for an accelerator; raise MoveError when the host has too few."""
        if self._memory.nbytes < nbytes or accelerator is not self._accelerator:
            self.free()
            try:
                self._mapping = map_memory(nbytes, huge=accelerator is not None)
            except (OSError, OverflowError) as error:
                raise MoveError(f"no {nbytes >> 20} MiB of host memory: {error}") from None
            if self._mapping is not None:
                self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
            self._accelerator = accelerator
            if accelerator and nbytes:
                # Pin the exact size: torch's own pinned allocator rounds up to a power of two.
                error_code = accelerator.register_host(self._memory.data_ptr(), self._memory.nbytes)
                self._pinned = not error_code
                if error_code:
                    _log.warning("host memory could not be pinned (error %d): moves are slower", error_code)
        return self._memory

    def part(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a part of the memory as a storage of its own, which keeps the memory for as long as it lives."""
        if self._mapping is None:
            raise MoveError("no host memory is reserved")
        return storage_in(self._mapping, offset, nbytes)

    def free(self) -> None:
        """Free the memory."""
        if self._accelerator and self._pinned and self._memory.nbytes:
            self._accelerator.unregister_host(self._memory.data_ptr())
        self._memory, self._mapping = allocate(0), None
        self._pinned = False


def map_memory(nbytes: int, *, huge: bool) -> mmap.mmap | None:
    """Return new host memory, None for no bytes, in huge pages if the kernel has them and ``huge`` is set.

    Huge pages are for memory that stays. In a virtual machine, the kernel gives freed huge pages to its host, and
    getting one back takes longer than the copy into it.
    """
    if not nbytes:
        return None
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def storage_in(mapping: mmap.mmap, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a part of mapped memory as a storage, which keeps the mapping."""
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def allocate(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return new memory without filling it; in deterministic mode, torch.empty would fill it."""
    return as_bytes(torch.UntypedStorage(nbytes, device=device))  # type: ignore[no-untyped-call]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a new tensor of bytes, so that no existing tensor's version counter moves."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
