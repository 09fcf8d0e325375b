"""Host memory for a job's state: pinned in chunks and kept for a GPU, unpinned and freed for the CPU."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from cadenza.sidecar.client.errors import MoveError
from cadenza.sidecar.client.offload.device import Accelerator, of
from cadenza.sidecar.client.offload.host import numa

CHUNK_BYTES = 2**30
"""Bytes that are pinned in one call, which takes some tenths of a second."""
HUGE_PAGE = 2 * 2**20
"""Granularity of chunks, in bytes."""
GROWTH = 4
"""Address space for a device's state, as a multiple of the bytes first needed: gradients and optimizer state come."""
NO_RESERVE = 0x4000
"""MAP_NORESERVE (mmap(2)), which Python's module lacks on some versions."""

_log = logging.getLogger("cadenza.client")


class HostBuffer:
    """Host memory that grows on demand without moving; for a device it is pinned, in chunks."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._memory = allocate(0)
        self._accelerator: Accelerator | None = None
        self._chunks = Chunks()
        self._release = weakref.finalize(self, Chunks.free, self._chunks)
        self._release.atexit = False  # the kernel frees all at the process's end
        self._lock = threading.Lock()
        self._ahead: threading.Thread | None = None
        self._ahead_ends = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the host now."""
        return max(self._memory.nbytes, self._chunks.nbytes)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Offsets at which pinned chunks end; one copy of a device must not cross any (CUDA takes them as invalid)."""
        return tuple(self._chunks.ends)

    def reserve(self, nbytes: int, device: torch.device | None) -> torch.Tensor:
        """Return at least ``nbytes`` bytes, pinned for a device; raise MoveError when the host has too few."""
        self._end_pinning()
        accelerator = of(device) if device is not None else None
        if accelerator is not self._accelerator or self._capacity < nbytes:
            self.free()
        if self._mapping is None:
            self._map(nbytes, accelerator, device)
        if self._mapping is not None and self._memory.nbytes < nbytes:
            self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes)
        if accelerator is not None and device is not None and self._mapping is not None:
            while self._chunks.pin_next(self._mapping, nbytes, accelerator, device):
                pass
        return self._memory

    def pin_ahead(self, nbytes: int, device: torch.device, may_pin: Callable[[int], bool]) -> None:
        """Begin to pin ``nbytes`` bytes for a device in a thread, chunk by chunk, as long as ``may_pin`` allows it.

        ``may_pin`` takes a chunk's bytes. ``reserve`` and ``free`` end the thread.
        """
        if (self._ahead is not None and self._ahead.is_alive()) or nbytes <= self._chunks.nbytes or self._chunks.failed:
            return
        accelerator = of(device)
        if accelerator is None:
            return
        if accelerator is not self._accelerator or self._capacity < nbytes:
            self.free()
            try:
                self._map(nbytes, accelerator, device)
            except MoveError:
                return
        self._ahead_ends.clear()
        arguments = (nbytes, accelerator, device, may_pin)
        self._ahead = threading.Thread(target=self._pin_chunks, args=arguments, name="cadenza-pinning", daemon=True)
        self._ahead.start()

    def part(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a part of the memory as a storage of its own, which keeps the memory for as long as it lives."""
        if self._mapping is None:
            raise MoveError("no host memory is reserved")
        return storage_in(self._mapping, offset, nbytes)

    def free(self) -> None:
        """Free the memory."""
        self._end_pinning()
        # Memory that is unmapped while it is registered stays registered for CUDA, which then refuses the next mapping
        # at the same address (error 712).
        self._chunks.free()
        self._memory, self._mapping = allocate(0), None

    @property
    def _capacity(self) -> int:
        """Bytes of address space."""
        return 0 if self._mapping is None else len(self._mapping)

    def _map(self, nbytes: int, accelerator: Accelerator | None, device: torch.device | None) -> None:
        """Map new memory; for a device near it, with room to grow, which takes no memory until it is pinned or written.

        A process with several devices has it near one of them.
        """
        self._accelerator, self._mapping = accelerator, None
        if accelerator is not None:
            with contextlib.suppress(OSError, OverflowError):  # a limit on address space leaves no room to grow
                self._mapping = map_memory(nbytes * GROWTH, huge=True)
        try:
            self._mapping = self._mapping or map_memory(nbytes, huge=accelerator is not None)
        except (OSError, OverflowError) as error:
            raise MoveError(f"no {nbytes >> 20} MiB of host memory: {error}") from None
        node = numa.node_of(accelerator.pci_address(device)) if accelerator is not None and device is not None else None
        if node is not None and self._mapping is not None:
            numa.prefer(self._mapping, node)

    def _pin_chunks(
        self, nbytes: int, accelerator: Accelerator, device: torch.device, may_pin: Callable[[int], bool]
    ) -> None:
        """Pin chunks until all bytes are pinned, the host is short, or the thread is to end."""
        while not self._ahead_ends.is_set() and may_pin(min(CHUNK_BYTES, nbytes - self._chunks.nbytes)):
            with self._lock:
                if self._mapping is None or not self._chunks.pin_next(self._mapping, nbytes, accelerator, device):
                    return

    def _end_pinning(self) -> None:
        """End the thread that pins ahead; it finishes its chunk first."""
        self._ahead_ends.set()
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None


class Chunks:
    """The pinned chunks at the beginning of a mapping, one after the other."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.failed = False
        """CUDA has refused a chunk: the rest stays unpinned."""
        self._addresses: list[tuple[Accelerator, torch.device, int]] = []
        self._mapping: mmap.mmap | None = None
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Pinned bytes."""
        return self.ends[-1] if self.ends else 0

    def pin_next(self, mapping: mmap.mmap, nbytes: int, accelerator: Accelerator, device: torch.device) -> bool:
        """Pin a further chunk of a mapping towards ``nbytes`` pinned bytes; return False if there is none to pin."""
        start = self.nbytes
        end = min(start + CHUNK_BYTES, -(-nbytes // HUGE_PAGE) * HUGE_PAGE, len(mapping))
        if self.failed or start >= min(nbytes, end):
            return False
        address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() + start
        # The call takes the thread's current device. In a process that never chose one that is the first GPU, where the
        # call would open a context of half a GiB.
        with accelerator.on(device):
            # Registered and not allocated by torch, whose pinned allocator rounds each block up to a power of two.
            code = accelerator.register_host(address, end - start)
        if code:
            # CUDA keeps the error, and the thread's next kernel would report it.
            accelerator.clear_error()
            self.failed = True
            _log.warning("host memory could not be pinned (error %d): moves are slower", code)
            return False
        self._mapping = mapping
        self._addresses.append((accelerator, device, address))
        self.ends.append(end)
        return True

    def free(self) -> None:
        """Unpin all, before the mapping goes; a forked child has no registration of its own."""
        if os.getpid() == self._pid:
            for accelerator, device, address in self._addresses:
                with accelerator.on(device):
                    code = accelerator.unregister_host(address)
                if code:
                    accelerator.clear_error()
        self._addresses.clear()
        self.ends.clear()
        self._mapping, self.failed = None, False


def map_memory(nbytes: int, *, huge: bool) -> mmap.mmap | None:
    """Return new host memory, None for no bytes, in huge pages if the kernel has them and ``huge`` is set."""
    if not nbytes:
        return None
    lazily = NO_RESERVE if huge else 0
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily)
    # Huge pages are for memory that stays. In a virtual machine the kernel gives freed huge pages to its host, and
    # getting one back takes longer than the copy into it.
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


def copy_within(target: torch.Tensor, source: torch.Tensor, bounds: Sequence[int]) -> None:
    """Copy between a device and host memory, in parts that cross no bound."""
    host = target if target.device.type == "cpu" else source
    start = host.storage_offset()
    cuts = [0, *(bound - start for bound in bounds if start < bound < start + host.nbytes), host.nbytes]
    for first, last in zip(cuts, cuts[1:]):
        # CUDA refuses a copy over two registrations as an invalid value, although one address follows the other.
        target[first:last].copy_(source[first:last], non_blocking=True)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a new tensor of bytes, so that no existing tensor's version counter moves."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
