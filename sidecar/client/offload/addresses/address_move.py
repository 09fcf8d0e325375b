"""Move of an allocator's segments to host memory at which their addresses stay: all of them or none."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from cadenza.sidecar.client.offload import device
from cadenza.sidecar.client.offload.addresses.preloaded import OUT_OF_MEMORY, Library
from cadenza.sidecar.client.offload.copy_plan import AddressPlan, Range
from cadenza.sidecar.client.offload.host_memory import HostBuffer, copy_within

BATCH_BYTES = 32 * 2**20
"""Bytes whose copies are waited for together, before their segments are let go."""
UNDO_TRIES = 20
UNDO_WAIT_S = 0.5
"""Tries to get back what was just let go, when a move is undone, and the seconds between them."""

_log = logging.getLogger("cadenza.client")


class AddressMove:
    """A move by a plan; the copies go straight between the segments and pinned host memory."""

    def __init__(self, library: Library, plan: AddressPlan, kind: str, buffer: HostBuffer) -> None:
        self._library, self.plan, self._kind, self._buffer = library, plan, kind, buffer
        self._accelerator = device.ACCELERATORS[kind]
        self._memory = buffer.reserve(plan.host_bytes, torch.device(kind, plan.devices[0]) if plan.devices else None)
        self._streams: dict[int, torch.Stream] = {}

    def offload(self) -> None:
        """Copy all, and let each segment go when its copy is complete; after a failure all is where it was."""
        gone: list[Range] = []
        try:
            # 1. Start all copies, after the work of all streams, also of the GPUs on which nothing is in use.
            for index in self.plan.devices:
                self._accelerator.synchronize(torch.device(self._kind, index))
            with self._open_streams():
                batches = [(batch, self._copy(batch, out=True)) for batch in _batches(self.plan.ranges)]
                # 2. Let the segments go, those without content first.
                copied = {one.segment for one in self.plan.ranges}
                self._release([number for number in self.plan.segments if number not in copied])
                waiting: list[Range] = []
                for batch, events in batches:
                    for event in events:
                        event.synchronize()
                    gone += batch
                    waiting = self._release_complete([*waiting, *batch], batch[-1])
                self._release([one.segment for one in waiting])
        except BaseException:
            self._undo(gone)
            raise

    def restore(self) -> None:
        """Give all segments memory, then copy; raise MemoryError when a GPU is too full, with all still away."""
        error = self._library.resume()
        if error == OUT_OF_MEMORY:
            raise MemoryError(f"a GPU has no {self.plan.nbytes >> 20} MiB for the segments")
        if error:
            raise RuntimeError(f"the driver gives the segments no memory (error {error})")
        try:
            self._refill(self.plan.ranges)
        except BaseException:
            # Half of the content is no state: all segments go again, and the next try starts from the whole copy.
            self._library.release(self.plan.segments)
            raise

    def host_copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the host copy of a storage that is away, None for any other."""
        if storage.device.type != self._kind:
            return None
        start, nbytes = storage.data_ptr(), storage.nbytes()
        for one in self.plan.ranges:
            inside = one.address <= start and start + nbytes <= one.address + one.nbytes
            if inside and one.device == storage.device.index:
                return self._buffer.part(one.offset + start - one.address, nbytes)
        return None

    @contextlib.contextmanager
    def _open_streams(self) -> Iterator[None]:
        """Open a stream on each GPU that has ranges; at the end, complete the copies that were started."""
        try:
            for index in dict.fromkeys(one.device for one in self.plan.ranges):
                self._streams[index] = self._accelerator.new_stream(torch.device(self._kind, index))
            yield
        finally:
            for stream in self._streams.values():
                stream.synchronize()
            self._streams = {}

    def _copy(self, ranges: Sequence[Range], *, out: bool) -> list[torch.Event]:
        """Start the copies of some ranges; return the events of their completion."""
        with torch.no_grad():
            for one in ranges:
                raw = self._accelerator.at_address(torch.device(self._kind, one.device), one.address, one.nbytes)
                place = self._memory[one.offset : one.offset + one.nbytes]
                with self._accelerator.using(self._streams[one.device]):
                    copy_within(*((place, raw) if out else (raw, place)), self._buffer.bounds)
        return [self._streams[index].record_event() for index in dict.fromkeys(one.device for one in ranges)]

    def _refill(self, ranges: Sequence[Range]) -> None:
        """Copy ranges back, apart from those whose segment was freed while it was away."""
        living = {one.number for one in self._library.segments()}
        with self._open_streams():
            self._copy([one for one in ranges if one.segment in living], out=False)

    def _release_complete(self, copied: list[Range], last: Range) -> list[Range]:
        """Let the segments of copied ranges go but that of the last, which may go on; return that one's ranges."""
        self._release([one.segment for one in copied if one.segment != last.segment])
        return [one for one in copied if one.segment == last.segment]

    def _release(self, numbers: Sequence[int]) -> None:
        if error := self._library.release(numbers):
            raise RuntimeError(f"the driver keeps a segment (error {error})")

    def _undo(self, gone: Sequence[Range]) -> None:
        """Bring back what a move has let go before it failed; its memory was this process's a moment ago."""
        pause = threading.Event()
        for _ in range(UNDO_TRIES):
            if not (error := self._library.resume()):
                self._refill(gone)
                return
            _log.warning("segments that were let go have no memory yet (error %d)", error)
            pause.wait(UNDO_WAIT_S)
        raise RuntimeError("a move that failed cannot be undone: the GPU is full")


def _batches(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Yield the ranges in batches of about BATCH_BYTES."""
    batch: list[Range] = []
    nbytes = 0
    for one in ranges:
        batch.append(one)
        nbytes += one.nbytes
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
