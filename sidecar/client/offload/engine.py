"""Moves storages to host memory and back in place: all of them or none; tensors stay the same objects."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import MoveError, RestoreError
from cadenza.sidecar.client.offload import copy_plan, memory_limits, spill
from cadenza.sidecar.client.offload.copy_plan import Batch
from cadenza.sidecar.client.offload.host_memory import Arena, new
from cadenza.sidecar.client.offload.storages import Segment

RESTORE_RETRIES = 120
RESTORE_RETRY_S = 0.5
"""How often, and how long apart, a restore is tried while the GPU has no room."""

_log = logging.getLogger("cadenza.client")


@dataclass(frozen=True)
class Moved:
    """A finished move: bytes, seconds, and the device bytes that this process still keeps after it."""

    nbytes: int
    seconds: float
    left: int = 0


class Move(Protocol):
    """Segments on their way to one place and back; either way all of them or none, and then what torch raised."""

    def out(self) -> None:
        """Copy all, then release."""

    def back(self) -> None:
        """Give the storages memory again and fill each."""


class Offload:
    """The state of one process, on its device or away."""

    def __init__(self) -> None:
        self.spill_to = ""
        """The directory to a file in which the next move goes, because host memory was short when asked last."""
        self._arena = Arena()
        self._segments: tuple[Segment, ...] = ()
        self._devices: list[torch.device] = []
        """The GPUs that the state is on, or was before it went away."""
        self._move: Move | None = None
        self._pause = threading.Event()

    @property
    def away(self) -> bool:
        """Whether there is state that is nowhere else."""
        return bool(self._segments)

    @property
    def needs_gpu(self) -> bool:
        """Whether bringing the state back takes GPU memory."""
        return bool(self._devices)

    def short(self, segments: Sequence[Segment], ranks: int, spill_to: str = "") -> str:
        """Return why ``ranks`` processes like this one cannot move out, or "".

        That is host memory, and where ``spill_to`` names a directory, its disk too; the move goes where there is room.
        """
        nbytes = copy_plan.total(_plan(segments))
        short = memory_limits.refusal(nbytes - self._arena.nbytes, ranks)
        self.spill_to = spill_to if short else ""
        if not self.spill_to:
            return short
        full = spill.refusal(self.spill_to, nbytes, ranks)
        return f"{short}; {full}" if full else ""

    def out(self, segments: Sequence[Segment]) -> Moved:
        """Copy the segments away, then release theirs; raise MoveError with all where it was."""
        started = monotonic_ns()
        self._devices = _devices(segments)
        move = self._planned(segments)
        try:
            move.out()
        except (RuntimeError, MemoryError) as error:
            raise MoveError(f"the state could not be copied to host memory: {error}") from None
        self._segments, self._move = tuple(segments), move
        left = _empty_caches(self._devices)
        return Moved(_sum(segments), _since(started), left)

    def _planned(self, segments: Sequence[Segment]) -> Move:
        """Take the place to which the segments go; raise MoveError when there is none."""
        if self.spill_to:
            self._arena.free()
            return spill.Spilled(segments, self.spill_to)
        plan = _plan(segments)
        return Transfer(segments, plan, self._arena.reserve(copy_plan.total(plan), pinned=self.needs_gpu))

    def back(self) -> Moved:
        """Bring all back in place; raise RestoreError, with all still away, when the GPU stays too full."""
        started = monotonic_ns()
        segments, move = self._segments, self._move
        if move is not None:
            self._retry(move)
        self._segments, self._move = (), None
        if not self._devices:
            self._arena.free()
        return Moved(_sum(segments), _since(started))

    def _retry(self, move: Move) -> None:
        """Bring a move back, however often that takes within reason: the neighbour may be late."""
        for attempt in range(RESTORE_RETRIES + 1):
            try:
                move.back()
            except (RuntimeError, MemoryError) as error:
                _empty_caches(self._devices)
                if attempt == RESTORE_RETRIES:
                    raise RestoreError(f"no room for {_sum(self._segments) >> 20} MiB of state: {error}") from None
                _log.warning("no room for this job's state yet: %s", error)
                self._pause.wait(RESTORE_RETRY_S)
            else:
                return


class Transfer:
    """A move to host memory by a plan; small storages are gathered on their device before they cross the bus."""

    def __init__(self, segments: Sequence[Segment], plan: Sequence[Batch], memory: torch.Tensor) -> None:
        self._segments, self._plan, self._memory = segments, plan, memory
        self._staging = max((batch.nbytes for batch in plan if batch.gathered), default=0)
        self._lanes: dict[torch.device, Lane] = {}

    def out(self) -> None:
        """Copy all to host memory, and release each storage when its copy is complete."""
        complete: list[Batch] = []
        try:
            with self._open():
                for batch, done in self._copies():
                    if done is not None:
                        done.synchronize()
                    complete.append(batch)
                    for index in batch.members:
                        self._segments[index].storage.resize_(0)
        except (RuntimeError, MemoryError):
            with self._open():
                self._refill(complete)
            raise

    def back(self) -> None:
        """Give the storages memory again and fill each; the next try does without staging."""
        try:
            with self._open():
                self._refill(self._plan)
        except (RuntimeError, MemoryError):
            self._staging = 0
            for segment in self._segments:
                segment.storage.resize_(0)
            raise

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Have a lane to each device; on leaving, all copies that were started are complete."""
        try:
            for device in dict.fromkeys(batch.device for batch in self._plan):
                self._lanes[device] = Lane(device, self._staging if device.type == "cuda" else 0)
            yield
        finally:
            for lane in self._lanes.values():
                lane.drain()
            self._lanes = {}

    def _copies(self) -> Iterable[tuple[Batch, torch.cuda.Event | None]]:
        """Start the copies: all at once where they run by themselves, else each when the one before was released."""
        copies = ((batch, self._copy(batch, out=True)) for batch in self._plan)
        return copies if all(batch.device.type == "cpu" for batch in self._plan) else list(copies)

    def _refill(self, plan: Sequence[Batch]) -> None:
        """Give the storages of some batches their memory and content; those that have theirs keep it."""
        for batch in plan:
            for index in batch.members:
                segment = self._segments[index]
                if segment.storage.nbytes() != segment.nbytes:
                    segment.storage.resize_(segment.nbytes)
            self._copy(batch, out=False)

    def _copy(self, batch: Batch, *, out: bool) -> torch.cuda.Event | None:
        """Copy a batch; return the event of its completion, or None when it is complete."""
        storages = [self._segments[index].storage for index in batch.members]
        place = self._memory[batch.offset : batch.offset + batch.nbytes]
        nothing = new(0, batch.device)
        raws = [nothing.new().set_(storage) for storage in storages]
        return self._lanes[batch.device].copy(raws, batch, place, out=out)


class Lane:
    """Copies of one device: in the order of one stream, small storages through a staging buffer if there is one."""

    def __init__(self, device: torch.device, staging: int) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = new(0, device)
        with contextlib.suppress(RuntimeError):  # a full device: its small storages are copied one by one
            self._staging = new(staging, device)

    def copy(
        self, raws: list[torch.Tensor], batch: Batch, place: torch.Tensor, *, out: bool
    ) -> torch.cuda.Event | None:
        """Copy storages to their common place in host memory, or back."""
        with torch.no_grad(), contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if not batch.gathered or self._staging.nbytes < batch.nbytes:
                _copy_each(_pieces(batch, place), raws, out=out)
            elif out:
                staging = self._staging[: batch.nbytes]
                _copy_each(_pieces(batch, staging), raws, out=True)
                place.copy_(staging, non_blocking=True)
            else:
                staging = self._staging[: batch.nbytes]
                staging.copy_(place, non_blocking=True)
                _copy_each(_pieces(batch, staging), raws, out=False)
            return None if self._stream is None else self._stream.record_event()

    def drain(self) -> None:
        """Wait for the copies that were started."""
        if self._stream is not None:
            self._stream.synchronize()


def _copy_each(pieces: list[torch.Tensor], raws: list[torch.Tensor], *, out: bool) -> None:
    """Copy storages to their pieces, or back; within one device in one call, of which each costs a small copy."""
    targets, sources = (pieces, raws) if out else (raws, pieces)
    if targets[0].device == sources[0].device:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _pieces(batch: Batch, place: torch.Tensor) -> list[torch.Tensor]:
    """Divide a batch's place among its members."""
    whole = place.split_with_sizes(batch.spans)
    if batch.spans == batch.sizes:
        return list(whole)
    return [piece if piece.nbytes == size else piece[:size] for piece, size in zip(whole, batch.sizes, strict=True)]


def _plan(segments: Sequence[Segment]) -> list[Batch]:
    """Return the batches of a move."""
    return copy_plan.plan([(segment.storage.device, segment.nbytes) for segment in segments])


def _devices(segments: Sequence[Segment]) -> list[torch.device]:
    """Return the CUDA devices that the segments lie on."""
    return list(dict.fromkeys(s.storage.device for s in segments if s.storage.device.type == "cuda"))


def _empty_caches(devices: Sequence[torch.device]) -> int:
    """Hand the allocator's cached memory back to the devices; return the bytes that stay there."""
    if not devices:
        return 0
    torch.cuda.empty_cache()
    return sum(torch.cuda.memory_reserved(device) for device in devices)


def _sum(segments: Sequence[Segment]) -> int:
    """Return the segments' bytes."""
    return sum(segment.nbytes for segment in segments)


def _since(started_ns: int) -> float:
    """Return the seconds since a clock reading."""
    return (monotonic_ns() - started_ns) / 1e9
