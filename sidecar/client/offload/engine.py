"""Move of storages to host memory and back in place: all of them or none; tensors stay the same objects."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import MoveError, NoRoomError, RestoreError
from cadenza.sidecar.client.offload import copy_plan, device, device_streams, library_caches, spill
from cadenza.sidecar.client.offload.addresses import address_survey
from cadenza.sidecar.client.offload.addresses.address_move import AddressMove
from cadenza.sidecar.client.offload.addresses.preloaded import library
from cadenza.sidecar.client.offload.copy_plan import AddressPlan, Batch
from cadenza.sidecar.client.offload.held_signals import HeldSignals
from cadenza.sidecar.client.offload.host import memory_limits
from cadenza.sidecar.client.offload.host_copy import GuardedSavers, HostCopies
from cadenza.sidecar.client.offload.host_memory import HostBuffer, allocate, copy_within
from cadenza.sidecar.client.offload.storages import Segment
from cadenza.sidecar.client.zip_equal import zip_equal

_log = logging.getLogger("cadenza.client")

SHORTAGES = ("out of memory", "allocate memory", "not enough memory")
"""Texts by which torch's errors name a shortage of device or host memory."""


@dataclass(frozen=True)
class Moved:
    """A finished move: bytes, seconds, and the device bytes that this process still holds after it."""

    nbytes: int
    seconds: float
    left: int = 0
    by_gpu: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The bytes that left each GPU, and those that this process still holds there, by its index."""


class Offload:
    """The state of one process, on its device or away."""

    def __init__(self) -> None:
        self.spill_to = ""
        """Directory of a file for the next move, because host memory was short at the last check; "": none."""
        self._buffer = HostBuffer()
        self._segments: tuple[Segment, ...] = ()
        self._devices: list[torch.device] = []
        """The GPUs that the state is on, or was on before the move."""
        self._move: Transfer | spill.SpillFile | AddressMove | None = None
        self._nbytes = 0
        """Bytes that are away."""
        self._sizes: Mapping[torch.device, int] = {}
        """The same by GPU."""
        self._savers: GuardedSavers | None = None
        self._returning = threading.RLock()
        """Taken while the copies in host memory are looked up or let go: a thread may save as the state comes back."""

    @property
    def away(self) -> bool:
        """True while this object holds the only copy of the state."""
        return self._move is not None

    @property
    def needs_gpu(self) -> bool:
        """True if bringing the state back takes GPU memory."""
        return bool(self._devices)

    @property
    def host_bytes(self) -> int:
        """Host memory that it has now, for this move or for the next."""
        return self._buffer.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Pinned part of it; the GPU's copies to the rest are slower."""
        return max(self._buffer.bounds, default=0)

    @staticmethod
    def held_and_staying(segments: Sequence[Segment], *, all_moves: bool) -> tuple[list[int], list[int]]:
        """Return the memory that torch holds on each GPU, its cache included, and what stays there when segments move.

        ``all_moves``: nothing of torch's stays.
        """
        accelerator = device.in_use()
        places = accelerator.devices() if accelerator else []
        moves = dict.fromkeys(places, 0)
        for one in segments:
            if one.storage.device in moves:
                moves[one.storage.device] += one.nbytes
        held = [accelerator.reserved(place) for place in places] if accelerator else []
        given = [accelerator.allocated(place) for place in places] if accelerator and not all_moves else [0] * len(held)
        return held, [max(0, size - moves[place]) for size, place in zip_equal(given, places)]

    def pin_ahead(self, nbytes: int, ranks: int) -> None:
        """Begin to pin host memory for the next move of ``nbytes`` bytes, as far as ``ranks`` such processes may."""
        accelerator = device.in_use()
        places = accelerator.used() if accelerator else []
        if accelerator and places:
            # A process that never called set_device has GPU 0 as its current one, and its state perhaps elsewhere.
            most = max(places, key=accelerator.allocated)
            self._buffer.pin_ahead(nbytes, most, lambda chunk: memory_limits.refusal(chunk, ranks) is None)

    def close(self) -> None:
        """Free the host memory; the state must be on its device."""
        self._buffer.free()

    def memory_refusal(
        self,
        segments: Sequence[Segment],
        ranks: int,
        spill_to: str = "",
        in_place: AddressPlan | None = None,
    ) -> str | None:
        """Return the reason why ``ranks`` processes like this one cannot move out, if they cannot.

        The move goes to host memory or, if that is short, to a file in the directory ``spill_to``, if there is one. A
        move in place goes to host memory only.
        """
        nbytes = in_place.host_bytes if in_place else copy_plan.total(plan_of(segments))
        no_memory = memory_limits.refusal(nbytes - self._buffer.nbytes, ranks)
        self.spill_to = spill_to if no_memory and not in_place else ""
        if not self.spill_to:
            return no_memory
        no_disk = spill.refusal(self.spill_to, nbytes, ranks)
        return f"{no_memory}; {no_disk}" if no_disk else None

    def offload(self, segments: Sequence[Segment]) -> Moved:
        """Copy the segments away, then release their memory; raise MoveError with all where it was.

        Signal handlers run after it. Until the state is back, ``torch.save`` and its like read the host copy.
        """
        started = monotonic_ns()
        # 1. Take the memory, or the file, that the state goes to.
        self._devices = list(dict.fromkeys(one.storage.device for one in segments if device.of(one.storage.device)))
        move: Transfer | spill.SpillFile
        if self.spill_to:
            self._buffer.free()
            move = spill.SpillFile(segments, self.spill_to)
        else:
            plan = plan_of(segments)
            memory = self._buffer.reserve(copy_plan.total(plan), self._devices[0] if self._devices else None)
            move = Transfer(segments, plan, memory, self._buffer.bounds)
        # 2. Copy, and release each storage whose copy is complete.
        with HeldSignals():
            try:
                move.offload()
            except (RuntimeError, MemoryError) as error:
                raise MoveError(f"the state could not be copied to host memory: {error}") from None
            self._segments = tuple(segments)
            sizes = dict.fromkeys(self._devices, 0)
            for one in segments if self._devices else ():
                sizes[one.storage.device] = sizes.get(one.storage.device, 0) + one.nbytes
            self._set_away(move, _total(segments), sizes)
        # 3. Give the allocator's cached memory back to the devices: torch keeps what is freed, and no other process
        #    could have it (torch.cuda.empty_cache).
        left = _empty_caches(self._devices)
        return Moved(_total(segments), (monotonic_ns() - started) / 1e9, sum(left.values()), _by_gpu(sizes, left))

    def offload_in_place(self) -> Moved:
        """Move out all that torch has on the GPUs, so that it comes back at its addresses; else as ``offload``.

        The allocator is looked at anew: the script's functions for a yield may have freed memory since the survey.
        """
        started = monotonic_ns()
        accelerator, mapped = device.in_use(), library()
        if accelerator is None or mapped is None:
            raise MoveError("addresses cannot stay: no GPU is in use, or the library was not preloaded")
        self._devices = [place for place in accelerator.devices() if accelerator.reserved(place)]
        _empty_caches(self._devices, workspaces=False)  # a captured graph may use the workspaces of cuBLAS
        plan = address_survey.plan(mapped, accelerator.snapshot())
        if not isinstance(plan, AddressPlan):
            raise MoveError(f"addresses cannot stay any more: {plan}")
        sizes = {place: accelerator.reserved(place) for place in self._devices}
        move = AddressMove(mapped, plan, accelerator.kind, self._buffer)
        with HeldSignals():
            try:
                move.offload()
            except (RuntimeError, MemoryError) as error:
                raise MoveError(f"the state could not be copied to host memory: {error}") from None
            self._set_away(move, plan.nbytes, sizes)
        left = sum(map(accelerator.reserved, self._devices)) - plan.nbytes  # torch's books have the segments still
        return Moved(plan.nbytes, (monotonic_ns() - started) / 1e9, left, _by_gpu(sizes, {}))

    def _set_away(
        self, move: Transfer | spill.SpillFile | AddressMove, nbytes: int, sizes: Mapping[torch.device, int]
    ) -> None:
        """Note a move that is complete; from now on savers read the host copy."""
        self._move, self._nbytes, self._sizes = move, nbytes, sizes
        self._savers = GuardedSavers(self.host_copies)

    def spill(self, directory: str) -> Moved:
        """Move state that is away from host memory to a file in a directory, and free the memory.

        Raise MoveError with all where it was. State that is in a file already stays there.
        """
        started = monotonic_ns()
        if isinstance(self._move, spill.SpillFile):
            return Moved(0, 0.0)
        if isinstance(self._move, AddressMove):
            raise MoveError("state whose addresses stay does not go to a disk")
        move = spill.SpillFile(self._segments, directory)
        with HeldSignals():
            try:
                move.write([storage for _, storage in self._host_storages()])
            except RuntimeError as error:
                raise MoveError(f"the state could not be copied to disk: {error}") from None
            with self._returning:
                self._move = move
            self._buffer.free()
        return Moved(self._nbytes, (monotonic_ns() - started) / 1e9)

    def host_copies(self) -> HostCopies:
        """Return the mode in which torch reads the state that is away, from host memory or from the file."""
        with self._returning:
            if isinstance(self._move, AddressMove):
                return HostCopies(self._move.host_copy)
            file = self._move if isinstance(self._move, spill.SpillFile) else None
            copies = file.host_storages() if file else self._host_storages()
            known = {segment.storage._cdata: copy for segment, copy in copies}  # noqa: SLF001
            return HostCopies(lambda storage: known.get(storage._cdata))  # noqa: SLF001

    def _host_storages(self) -> Iterable[tuple[Segment, torch.UntypedStorage]]:
        """Return the segments, each with its copy in host memory."""
        parts = {
            index: self._buffer.part(offset, size)
            for batch in plan_of(self._segments)
            for index, (size, offset) in zip_equal(batch.members, [*zip_equal(batch.sizes, batch.offsets)])
        }
        return [(segment, parts[index]) for index, segment in enumerate(self._segments)]

    def restore(self, others: Mapping[int, int] | None = None) -> Moved:
        """Bring all back in place; raise RestoreError with all still away, NoRoomError when the GPU is too full.

        ``others`` are further bytes that a GPU needs to have free, by its index. Signal handlers run after it.
        """
        started = monotonic_ns()
        nbytes = self._nbytes
        with HeldSignals():
            if self._move is not None:
                self._require_room(others or {})
                try:
                    self._move.restore()  # in place: tensors, views and optimizers stay the same objects
                except (RuntimeError, MemoryError) as error:
                    if not isinstance(self._move, AddressMove):  # which has undone its maps
                        _empty_caches(self._devices)
                    if isinstance(error, MemoryError) or any(text in str(error) for text in SHORTAGES):
                        raise NoRoomError(f"no room for {nbytes >> 20} MiB of state: {error}") from None
                    raise RestoreError(f"{nbytes >> 20} MiB of state cannot come back: {error}") from None
            with self._returning:
                self._segments, self._move, self._nbytes = (), None, 0
                if self._savers is not None:
                    self._savers.remove()
                    self._savers = None
                # Pinned memory stays for the next move, because pinning it again takes 0.3 s a GiB.
                if not self._devices:
                    self._buffer.free()
        return Moved(nbytes, (monotonic_ns() - started) / 1e9)

    def _require_room(self, others: Mapping[int, int]) -> None:
        """Raise NoRoomError unless each GPU has room for its state and for ``others``.

        Without others, the allocation tells. NCCL's takes place once the state is back, and then ranks wait for one
        another without a limit.
        """
        for place, nbytes in self._sizes.items() if others else ():
            beside = others.get(place.index or 0, 0)
            accelerator = device.of(place)
            free = accelerator.free(place) if accelerator and beside else None
            if free is not None and free < nbytes + beside:
                raise NoRoomError(
                    f"no room on {place} for {nbytes >> 20} MiB of state and {beside >> 20} MiB of NCCL: "
                    f"{free >> 20} MiB are free"
                )


class Transfer:
    """A move to host memory by a plan; small storages are gathered on their device before they cross the bus."""

    def __init__(
        self, segments: Sequence[Segment], plan: Sequence[Batch], memory: torch.Tensor, bounds: Sequence[int] = ()
    ) -> None:
        self._segments, self._plan, self._memory, self._bounds = segments, plan, memory, bounds
        self._staging = max((batch.nbytes for batch in plan if batch.gathered), default=0)
        self._streams: dict[torch.device, CopyStream] = {}

    def offload(self) -> None:
        """Copy all to host memory, and release each storage when its copy is complete."""
        complete: list[Batch] = []
        try:
            with self._open_streams():
                # On a GPU all copies are started at once; on the CPU each starts when the one before was released.
                # The copies of a GPU run while the host waits for the first. On the CPU a copy and a storage that is
                # not released yet would take the memory twice.
                copies: Iterable[tuple[Batch, torch.Event | None]]
                copies = ((batch, self._copy(batch, out=True)) for batch in self._plan)
                if any(batch.device.type != "cpu" for batch in self._plan):
                    copies = list(copies)
                for batch, done in copies:
                    # The allocator knows nothing of the copy's stream: a block that is released while the copy still
                    # reads it can be handed on and overwritten.
                    if done is not None:
                        done.synchronize()
                    complete.append(batch)
                    for index in batch.members:
                        self._segments[index].storage.resize_(0)
        except BaseException:
            with self._open_streams():
                self._refill(complete)
            raise

    def restore(self) -> None:
        """Give the storages memory again and fill each; after a failure the next attempt uses no staging."""
        try:
            with self._open_streams():
                self._refill(self._plan)
        except BaseException:
            # The staging buffer itself takes GPU memory, which was short just now.
            self._staging = 0
            for segment in self._segments:
                segment.storage.resize_(0)
            raise

    @contextlib.contextmanager
    def _open_streams(self) -> Iterator[None]:
        """Open a stream to each device; at the end, complete all copies that were started."""
        try:
            for place in dict.fromkeys(batch.device for batch in self._plan):
                self._streams[place] = CopyStream(place, self._staging, self._bounds)
            yield
        finally:
            for stream in self._streams.values():
                stream.drain()
            self._streams = {}

    def _refill(self, plan: Sequence[Batch]) -> None:
        """Give the storages of some batches memory and content; a storage that still has memory keeps it."""
        for batch in plan:
            members = (self._segments[index] for index in batch.members)
            empty = (segment for segment in members if segment.storage.nbytes() != segment.nbytes)
            # Entering the stream once for each storage took three times as long (32,768 small ones on an H100).
            for stream, segments in itertools.groupby(empty, key=operator.attrgetter("stream")):
                with device_streams.allocating_on(batch.device, stream):
                    for segment in segments:
                        segment.storage.resize_(segment.nbytes)
            self._copy(batch, out=False)

    def _copy(self, batch: Batch, *, out: bool) -> torch.Event | None:
        """Copy a batch; return the event of its completion, None if it is complete already."""
        storages = [self._segments[index].storage for index in batch.members]
        place = self._memory[batch.offset : batch.offset + batch.nbytes]
        empty = allocate(0, batch.device)
        # A copy into the script's own tensor would raise its version counter, and autograd refuses a saved tensor
        # whose version has changed.
        raws = [empty.new().set_(storage) for storage in storages]
        return self._streams[batch.device].copy(raws, batch, place, out=out)


class CopyStream:
    """Copies of one device in one stream; small storages go through a staging buffer if there is memory for one."""

    def __init__(self, place: torch.device, staging: int, bounds: Sequence[int]) -> None:
        """``bounds`` are the offsets in host memory that no copy crosses."""
        self._bounds = bounds
        self._stream: torch.Stream | None = None
        self._context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._staging = allocate(0, place)
        if accelerator := device.of(place):
            # Nothing orders the new stream behind those of the script, whose kernels may still be writing the state.
            accelerator.synchronize(place)
            self._stream = accelerator.new_stream(place)
            self._context = accelerator.using(self._stream)
            with contextlib.suppress(RuntimeError):  # a full device: its small storages are copied one by one
                self._staging = allocate(staging, place)

    def copy(self, raws: list[torch.Tensor], batch: Batch, place: torch.Tensor, *, out: bool) -> torch.Event | None:
        """Copy storages to their common place in host memory, or back."""
        with torch.no_grad(), self._context:
            staged = batch.gathered and self._staging.nbytes >= batch.nbytes
            staging = self._staging[: batch.nbytes] if staged else place
            if staged and not out:
                copy_within(staging, place, self._bounds)
            _copy_each(_pieces(batch, staging), raws, self._bounds, out=out)
            if staged and out:
                copy_within(place, staging, self._bounds)
            return None if self._stream is None else self._stream.record_event()

    def drain(self) -> None:
        """Wait for the copies that were started."""
        if self._stream is not None:
            self._stream.synchronize()


def _copy_each(pieces: list[torch.Tensor], raws: list[torch.Tensor], bounds: Sequence[int], *, out: bool) -> None:
    """Copy storages to their pieces, or back; within one device in a single call, because each call has a cost."""
    targets, sources = (pieces, raws) if out else (raws, pieces)
    if targets[0].device == sources[0].device:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip_equal(targets, sources):
        copy_within(target, source, bounds)


def _pieces(batch: Batch, place: torch.Tensor) -> list[torch.Tensor]:
    """Divide a batch's place among its members."""
    whole = place.split_with_sizes(batch.spans)
    if batch.spans == batch.sizes:
        return list(whole)
    return [piece if piece.nbytes == size else piece[:size] for piece, size in zip_equal(whole, batch.sizes)]


def plan_of(segments: Sequence[Segment]) -> list[Batch]:
    """Return the batches of a move."""
    return copy_plan.plan([(segment.storage.device, segment.nbytes) for segment in segments])


def _empty_caches(devices: Sequence[torch.device], *, workspaces: bool = True) -> dict[torch.device, int]:
    """Give cached memory back to the devices; return the bytes that the allocator still reserves on each.

    A device that fails here is noticed by the next move: the state has left it, or is still away.
    """
    held = {}
    if devices and workspaces:
        # cuBLAS's workspaces are blocks of torch's allocator in use: empty_cache() alone would leave them.
        library_caches.release(devices)
    try:
        for place in devices:
            if accelerator := device.of(place):
                accelerator.empty_cache()
                held[place] = accelerator.reserved(place)
    except RuntimeError as error:
        _log.warning("cached GPU memory could not be given back: %s", error)
    return held


def _by_gpu(sizes: Mapping[torch.device, int], left: Mapping[torch.device, int]) -> dict[int, tuple[int, int]]:
    """Return the bytes that have left each GPU and those that stay there, by its index."""
    return {place.index or 0: (nbytes, left.get(place, 0)) for place, nbytes in sizes.items()}


def _total(segments: Sequence[Segment]) -> int:
    return sum(segment.nbytes for segment in segments)
