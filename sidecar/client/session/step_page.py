"""The step path: counters in the shared page, written with one clock read and no system call."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from cadenza.sidecar import wire
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import LinkLostError
from cadenza.sidecar.client.session import memory_use

STEP = wire.PAGE_STEP
LAST_NS = wire.PAGE_LAST_NS
SUM_NS = wire.PAGE_SUM_NS
SAMPLES = wire.PAGE_SAMPLES
SEQUENCE = wire.PAGE_SEQUENCE
WAITED_NS = wire.PAGE_WAITED_NS
STOP = wire.PAGE_STOP

MIN_BITS = wire.FINE_BITS
MAX_BITS = MIN_BITS + wire.FINE_BUCKETS // 8 - 1
FIRST_OCTAVE = wire.PAGE_FINE - 8 * (MIN_BITS + 1)
"""See :func:`cadenza.sidecar.wire.fine_bucket`; eight less, as a time's first four bits are from 8 to 15."""

MEMORY_EVERY = 256
"""Steps from one look at the GPU's memory to the next: it takes tens of microseconds."""
NS_PER_S = 1_000_000_000

T = TypeVar("T")


def private_page() -> memoryview:
    """Return a page that nobody else reads: the meter's when there is no agent."""
    return memoryview(bytearray(wire.PAGE_BYTES)).cast("Q")


def map_page(descriptor: int) -> memoryview:
    """Map an agent's page and close the descriptor; raise LinkLostError when it is not of this version."""
    try:
        if os.fstat(descriptor).st_size < wire.PAGE_BYTES:
            raise LinkLostError("the agent's page is too short")
        words = memoryview(mmap.mmap(descriptor, wire.PAGE_BYTES)).cast("Q")
    finally:
        os.close(descriptor)
    if words[wire.PAGE_MAGIC] not in (0, wire.MAGIC):
        raise LinkLostError("the agent's page is of another version")
    return words


class Meter:
    """Counts boundaries of one rank; ``words`` is its page, ``step`` the boundaries completed so far."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.step = 0
        self.last_ns = monotonic_ns()
        self.sum_ns = 0
        self.samples = 0
        self.waited_ns = 0
        self.sequence = 0
        self.memory_step = 1
        """The step at which memory is looked at next."""
        self.order = 0
        self.order_at = 0
        """The last order that this rank came to, and the first word of its entry."""
        words[wire.PAGE_LAYOUT] = wire.LAYOUT

    def boundary(self, samples: int = 0, *, training: bool = True) -> None:
        """Say that a training step has ended; ``samples`` is how many training samples it took.

        Returns at once, or, when the agent wants this job to stop here, after the job has its lease back: its
        state was moved to host memory in between. Time spent that way is in no iteration time. With
        ``training=False``, as after a batch of an evaluation, the job can stop here all the same, but nothing of
        the time since the last boundary counts as training: no iteration, no samples, no waiting in the loader.
        """
        if not training:
            self._pass_by()
            return
        words = self.words
        now = monotonic_ns()
        spent = now - self.last_ns
        self.last_ns = now
        step = self.step = self.step + 1
        total = self.sum_ns = self.sum_ns + spent
        words[SEQUENCE] = sequence = self.sequence + 1
        # wire.fine_bucket, written out: the call would make a step half as expensive again.
        bits = spent.bit_length()
        if MIN_BITS <= bits <= MAX_BITS:
            words[FIRST_OCTAVE + 8 * bits + (spent >> (bits - 4))] += 1
        else:
            words[wire.PAGE_FINE + wire.fine_bucket(spent)] += 1
        words[STEP] = step
        words[LAST_NS] = now
        words[SUM_NS] = total
        words[WAITED_NS] = self.waited_ns
        if samples:
            self.samples += samples
            words[SAMPLES] = self.samples
        words[SEQUENCE] = self.sequence = sequence + 1
        stop = words[STOP]
        if stop and step >= stop:
            self.order_seen()
            self.reached()
            self.last_ns = monotonic_ns()
        elif step >= self.memory_step:
            self.look_at_memory()

    def _pass_by(self) -> None:
        """End a step that is no training: it counts for where ranks stop together, and for nothing else."""
        self.step += 1
        self.waited_ns = self.words[WAITED_NS]
        self.last_ns = monotonic_ns()
        self._tell((STEP, self.step), (LAST_NS, self.last_ns))
        if 0 < self.words[STOP] <= self.step:
            self.order_seen()
            self.reached()
            self.last_ns = monotonic_ns()

    def reached(self) -> None:
        """Act on the page's stop step; a meter alone has nobody to obey."""
        self.words[STOP] = 0

    @property
    def trained(self) -> int:
        """Training steps so far: boundaries less those with ``training=False``."""
        return sum(self.words[wire.PAGE_FINE : wire.PAGE_FINE + wire.FINE_BUCKETS])

    def restart_clock(self) -> None:
        """Begin the iteration time anew: what was waited for so far is no training."""
        self.last_ns = monotonic_ns()

    def move_to(self, words: memoryview) -> None:
        """Go on counting in another page, with all that was counted so far."""
        old, self.words = self.words, words
        words[SEQUENCE] = self.sequence + 1
        words[wire.PAGE_STEP : SEQUENCE] = old[wire.PAGE_STEP : SEQUENCE]
        words[SEQUENCE + 1 : STOP] = old[SEQUENCE + 1 : STOP]
        words[wire.PAGE_FINE :] = old[wire.PAGE_FINE :]
        self._tell((STEP, self.step), (wire.PAGE_MAGIC, wire.MAGIC))

    # --- data loading --------------------------------------------------------------------------------------

    def waited(self, seconds: float) -> None:
        """Add time in which the training loop was blocked in its loader; it is told at the next boundary.

        Any thread may call this; when two do at the same moment one of the times may be lost.
        """
        self.waited_ns += int(seconds * NS_PER_S)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield what a loader yields and count the time it takes to come; for loaders that do not say it."""
        if getattr(batches, "tells_waits", False):
            yield from batches
            return
        source = iter(batches)
        while True:
            asked = monotonic_ns()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.waited_ns += monotonic_ns() - asked
            yield batch

    # --- off the step path ---------------------------------------------------------------------------------

    def look_at_memory(self) -> None:
        """Tell how much GPU memory is in use at this boundary; without a GPU only stops look, at the host's."""
        self.memory_step = self.step + MEMORY_EVERY
        if (seen := memory_use.on_gpu()) is not None:
            self._tell_memory(wire.MEMORY_GPU, *seen)

    def order_seen(self) -> None:
        """Begin the entry of an order when this is the first boundary it stops; the meter itself calls this."""
        words = self.words
        order = words[wire.PAGE_ORDER]
        if order in (0, self.order):
            return
        count = words[wire.PAGE_ORDER_COUNT]
        self.order, self.order_at = order, wire.PAGE_ORDERS + count % wire.ORDERS_KEPT * wire.ORDER_WORDS
        self._tell((wire.PAGE_ORDER_COUNT, count + 1), *enumerate((order, self.last_ns, 0, 0), self.order_at))
        if (seen := memory_use.on_gpu()) is not None:
            self._tell_memory(wire.MEMORY_GPU, *seen)
        elif (seen := memory_use.on_host()) is not None:
            self._tell_memory(wire.MEMORY_HOST, *seen)

    def order_arrived(self) -> None:
        """Say that the rank is ready to stop at this boundary: what would move is known."""
        self._tell_order(2)

    def order_done(self) -> None:
        """Say that the rank's state is out."""
        self._tell_order(3)

    def _tell_order(self, offset: int) -> None:
        """Write the time since the order's boundary into its entry; without an order there is nothing to tell."""
        if self.order_at:
            since = self.words[self.order_at + 1]
            self._tell((self.order_at + offset, max(1, monotonic_ns() - since)))

    def _tell_memory(self, kind: int, now: int, peak: int) -> None:
        """Write what is in use at this boundary and was at most; both in bytes."""
        words = self.words
        if words[wire.PAGE_MEMORY_KIND] == kind:
            now = min(now, words[wire.PAGE_MEMORY_LOW])
            peak = max(peak, words[wire.PAGE_MEMORY_PEAK])
        self._tell((wire.PAGE_MEMORY_KIND, kind), (wire.PAGE_MEMORY_LOW, now), (wire.PAGE_MEMORY_PEAK, peak))

    def _tell(self, *pairs: tuple[int, int]) -> None:
        """Write words of the record as one change of it."""
        words = self.words
        words[SEQUENCE] = self.sequence + 1
        for index, value in pairs:
            words[index] = value
        self.sequence += 2
        words[SEQUENCE] = self.sequence
