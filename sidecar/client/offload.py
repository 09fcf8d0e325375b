"""Moves storages to host memory and back in place: all of them or none; tensors stay the same objects."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import MoveError, RestoreError
from cadenza.sidecar.client.storages import Segment

ALIGNMENT = 512
"""Bytes to which each segment's place in the arena is aligned: the caching allocator's own rounding."""
RESTORE_RETRIES = 120
RESTORE_RETRY_S = 0.5
"""How often, and how long apart, a restore is tried while the GPU has no room (the neighbour may be late)."""

_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Moved:
    """A finished move: bytes, seconds, and the device bytes that this process still keeps after it."""

    nbytes: int
    seconds: float
    left: int = 0


class Arena:
    """Host memory for one job's state: pinned once and kept for CUDA, plain and given back for the CPU."""

    def __init__(self) -> None:
        self._memory = _host_bytes(0)
        self._for_device = False
        self._pinned = False

    def reserve(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return at least ``nbytes`` bytes; raise MoveError when the host has not got them."""
        if self._memory.nbytes < nbytes or pinned != self._for_device:
            self.free()
            try:
                self._memory = _host_bytes(nbytes)
            except (RuntimeError, MemoryError) as error:
                raise MoveError(f"no {nbytes >> 20} MiB of host memory: {error}") from None
            self._for_device = pinned
            self._register()
        return self._memory

    def free(self) -> None:
        """Give the memory back."""
        if self._pinned and self._memory.nbytes:
            _cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = _host_bytes(0)
        self._pinned = False

    def _register(self) -> None:
        """Pin exactly what was asked for: torch's own pinned allocator rounds up to a power of two."""
        if self._for_device and self._memory.nbytes:
            place, nbytes = self._memory.data_ptr(), self._memory.nbytes
            failed = int(_cudart().cudaHostRegister(place, nbytes, 0))
            self._pinned = not failed
            if failed:
                _log.warning("host memory could not be pinned (CUDA error %d): moves are slower", failed)


class Offload:
    """The state of one process, on its device or in the arena; ``away`` says which."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._segments: tuple[Segment, ...] = ()
        self._memory = _host_bytes(0)
        self._pause = threading.Event()

    @property
    def away(self) -> bool:
        """Whether there is state in the arena that is nowhere else."""
        return bool(self._segments)

    @property
    def needs_gpu(self) -> bool:
        """Whether bringing the state back takes GPU memory."""
        return bool(_devices(self._segments))

    def out(self, segments: Sequence[Segment]) -> Moved:
        """Copy the segments to host memory, then release theirs; raise MoveError with all where it was."""
        started = monotonic_ns()
        devices = _devices(segments)
        memory = self._arena.reserve(_arena_bytes(segments), pinned=bool(devices))
        try:
            _copy(segments, memory, out=True)
            _release(segments, memory)
        except (RuntimeError, MemoryError) as error:
            raise MoveError(f"the state could not be copied to host memory: {error}") from None
        self._segments, self._memory = tuple(segments), memory
        left = _empty_caches(devices)
        return Moved(_sum(segments), _since(started), left)

    def back(self) -> Moved:
        """Bring all back in place; raise RestoreError, with all still here, when the GPU stays too full."""
        started = monotonic_ns()
        segments = self._segments
        for attempt in range(RESTORE_RETRIES + 1):
            try:
                _grow(segments)
                break
            except (RuntimeError, MemoryError) as error:
                if attempt == RESTORE_RETRIES:
                    raise RestoreError(f"no room for {_sum(segments) >> 20} MiB of state: {error}") from None
                _log.warning("no room for this job's state yet: %s", error)
                self._pause.wait(RESTORE_RETRY_S)
        _copy(segments, self._memory, out=False)
        self._segments, self._memory = (), _host_bytes(0)
        if not _devices(segments):
            self._arena.free()
        return Moved(_sum(segments), _since(started))


def _copy(segments: Sequence[Segment], memory: torch.Tensor, *, out: bool) -> None:
    """Copy between storages and arena; on return all copies are complete."""
    devices = _devices(segments)
    for device in devices:
        torch.cuda.synchronize(device)
    streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for segment, place in _places(segments, memory):
            raw = _bytes_of(segment)
            with _on(streams.get(segment.storage.device)):
                target, source = (place, raw) if out else (raw, place)
                target.copy_(source, non_blocking=True)
    for stream in streams.values():
        stream.synchronize()


def _release(segments: Sequence[Segment], memory: torch.Tensor) -> None:
    """Free the storages' memory; bring back those already freed when one of them cannot be."""
    for index, segment in enumerate(segments):
        try:
            segment.storage.resize_(0)
        except RuntimeError:
            _grow(segments[:index])
            _copy(segments[: index + 1], memory, out=False)
            raise


def _grow(segments: Sequence[Segment]) -> None:
    """Give the storages memory again; on failure none of them has any."""
    try:
        for segment in segments:
            segment.storage.resize_(segment.nbytes)
    except (RuntimeError, MemoryError):
        for segment in segments:
            segment.storage.resize_(0)
        _empty_caches(_devices(segments))
        raise


def _places(segments: Sequence[Segment], memory: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
    """Yield each segment with its slice of the arena."""
    offset = 0
    for segment in segments:
        yield segment, memory[offset : offset + segment.nbytes]
        offset += _aligned(segment.nbytes)


def _arena_bytes(segments: Sequence[Segment]) -> int:
    """Return the size of the arena that the segments need."""
    return sum(_aligned(segment.nbytes) for segment in segments)


def _aligned(nbytes: int) -> int:
    """Round up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _host_bytes(nbytes: int) -> torch.Tensor:
    """Return new host memory, untouched: deterministic mode would fill what torch.empty returns."""
    storage = torch.UntypedStorage(nbytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _bytes_of(segment: Segment) -> torch.Tensor:
    """Return a storage as bytes: a tensor of its own, so that nobody's version counter moves."""
    return torch.empty(0, dtype=torch.uint8, device=segment.storage.device).set_(segment.storage)


def _devices(segments: Sequence[Segment]) -> list[torch.device]:
    """Return the CUDA devices that the segments lie on."""
    return list(dict.fromkeys(s.storage.device for s in segments if s.storage.device.type == "cuda"))


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a copy is queued on the stream, if there is one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _empty_caches(devices: Sequence[torch.device]) -> int:
    """Hand the allocator's cached memory back to the devices; return the bytes that stay there."""
    if not devices:
        return 0
    torch.cuda.empty_cache()
    return sum(torch.cuda.memory_reserved(device) for device in devices)


def _cudart() -> Any:
    """Return the CUDA runtime that torch uses."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _sum(segments: Sequence[Segment]) -> int:
    """Return the segments' bytes."""
    return sum(segment.nbytes for segment in segments)


def _since(started_ns: int) -> float:
    """Return the seconds since a clock reading."""
    return (monotonic_ns() - started_ns) / 1e9
