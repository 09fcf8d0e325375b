"""The step path: counters in the shared page, written with one clock read and no system call."""

from __future__ import annotations

import mmap
import operator
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from cadenza.sidecar import wire
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import LinkLostError

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
"""See :func:`cadenza.sidecar.wire.fine_bucket`; eight less, because a time's first four bits are from 8 to 15."""

MEMORY_EVERY = 256
"""Steps between two readings of the GPU's memory; one takes tens of microseconds."""
NS_PER_S = 1_000_000_000
STATM = Path("/proc/self/statm")

T = TypeVar("T")


def private_page() -> memoryview:
    """Return a page that no other process reads, for a rank without an agent."""
    return memoryview(bytearray(wire.PAGE_BYTES)).cast("Q")


def map_page(descriptor: int) -> memoryview:
    """Map an agent's page and close the descriptor; raise LinkLostError when its version is another one."""
    try:
        if os.fstat(descriptor).st_size < wire.PAGE_BYTES:
            raise LinkLostError("the agent's page is too short")
        words = memoryview(mmap.mmap(descriptor, wire.PAGE_BYTES)).cast("Q")
    finally:
        # A mapping outlives its descriptor (mmap(2)).
        os.close(descriptor)
    if words[wire.PAGE_MAGIC] not in (0, wire.MAGIC):
        raise LinkLostError("the agent's page is of another version")
    return words


def gpu_memory() -> dict[int, tuple[int, int]]:
    """Return the allocated bytes of each GPU that this process has used, now and at the peak, by the GPU's index.

    The figures are those of torch's caching allocator, read under its lock and without a system call or a wait for the
    device. Neither torch nor CUDA is loaded for it.
    """
    if "torch" not in sys.modules:
        return {}
    from cadenza.sidecar.client.offload import device  # noqa: PLC0415 - it imports torch

    accelerator = device.in_use()
    try:
        found = {one.index: accelerator.in_use_and_peak(one) for one in accelerator.devices()} if accelerator else {}
    except RuntimeError:  # the training step reports a device that has failed
        return {}
    return {index: sizes for index, sizes in found.items() if sizes[1]}


def host_memory() -> tuple[int, int] | None:
    """Return the resident set in bytes, now and at the peak (proc_pid_statm(5), getrusage(2)); some system calls."""
    try:
        pages = int(STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    now = pages * resource.getpagesize()
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


class StepCounters:
    """Counters of one rank's boundaries; ``words`` is its page, ``step`` the boundaries completed so far."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.step = 0
        self._untrained = 0
        """Boundaries with ``training=False``."""
        self.last_ns = monotonic_ns()
        self.sum_ns = 0
        self.samples = 0
        self.waited_ns = 0
        self.sequence = 0
        self.memory_step = 1
        """Step of the next reading of memory."""
        self.peaks: dict[int, int] = {}
        """The most memory that torch has given out on each GPU, by its index."""
        self.training = True
        """The boundary that reached the stop step ended a training step."""
        self.out = False
        """True while this rank's state is out: each boundary leads to the wait for the lease."""
        self.order = 0
        self.order_at = 0
        """Last order that stopped this rank, and the first word of its entry in the page."""
        words[wire.PAGE_LAYOUT] = wire.LAYOUT

    def boundary(self, samples: int = 0, *, training: bool = True) -> None:
        """End a training step; ``samples`` is the number of training samples in it.

        Returns at once or, when the agent wants this job to stop here, after the job has its lease back: its
        state was in host memory in between. No iteration time includes that stay. With ``training=False``, as
        after a batch of an evaluation, the job can stop here too, but the time since the last boundary does not
        count as training: no iteration, no samples, no waiting in the loader.
        """
        if not training:
            self._count_other_step()
            return
        words = self.words
        now = monotonic_ns()
        spent = now - self.last_ns
        self.last_ns = now
        step = self.step = self.step + 1
        total = self.sum_ns = self.sum_ns + spent
        # A sequence lock: while the number is odd, the agent reads again. Another lock would cost a system call a step.
        words[SEQUENCE] = sequence = self.sequence + 1
        # wire.fine_bucket, written in place: a call would make the step path 50 % slower.
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
        if (stop and step >= stop) or self.out:
            self.training = True
            self._begin_order()
            self.on_stop_step()
            self.last_ns = monotonic_ns()
        elif step >= self.memory_step:
            self.sample_memory()

    def _count_other_step(self) -> None:
        """End a step without training: it counts for the stop step that ranks share, and for nothing else."""
        self.step += 1
        self._untrained += 1
        self.waited_ns = self.words[WAITED_NS]
        self.last_ns = monotonic_ns()
        self._write((STEP, self.step), (LAST_NS, self.last_ns))
        if 0 < self.words[STOP] <= self.step or self.out:
            self.training = False
            self._begin_order()
            self.on_stop_step()
            self.last_ns = monotonic_ns()

    def on_stop_step(self) -> None:
        """Handle the stop step. Without an agent there is none, so clear it."""
        self.words[STOP] = 0

    @property
    def trained(self) -> int:
        """Training steps so far: boundaries less those with ``training=False``."""
        return self.step - self._untrained

    def restart_clock(self) -> None:
        """Start the iteration time again: the time since the last boundary was not spent on training."""
        self.last_ns = monotonic_ns()

    def switch_page(self, words: memoryview) -> None:
        """Continue in another page, with all counts so far."""
        old, self.words = self.words, words
        words[SEQUENCE] = self.sequence + 1
        words[wire.PAGE_STEP : SEQUENCE] = old[wire.PAGE_STEP : SEQUENCE]
        words[SEQUENCE + 1 : STOP] = old[SEQUENCE + 1 : STOP]
        words[wire.PAGE_FINE :] = old[wire.PAGE_FINE :]
        self._write((STEP, self.step), (wire.PAGE_MAGIC, wire.MAGIC))

    # --- data loading --------------------------------------------------------------------------------------

    def waited(self, seconds: float) -> None:
        """Add time in which the training loop was blocked in its loader; the next boundary writes it.

        Any thread may call this; when two do at the same moment, one of the times may be lost.
        """
        self.waited_ns += int(seconds * NS_PER_S)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield a loader's batches and count the waits for them; for loaders that do not report their waits."""
        if getattr(batches, "reports_waits", False):
            yield from batches
            return
        source = iter(batches)
        while True:
            began = monotonic_ns()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.waited_ns += monotonic_ns() - began
            yield batch

    # --- off the step path ---------------------------------------------------------------------------------

    def sample_memory(self) -> None:
        """Record GPU memory in use at this boundary; without a GPU, only stops record memory, the host's."""
        self.memory_step = self.step + MEMORY_EVERY
        self._sample_gpus()

    def order_arrived(self) -> None:
        """Record when the rank is ready to stop at this boundary: the state that would move is surveyed."""
        self._write_order_time(2)

    def order_done(self) -> None:
        """Record when the rank's state is out."""
        self._write_order_time(3)

    def _begin_order(self) -> None:
        """Begin the entry of an order when this is the first boundary it stops."""
        words = self.words
        order = words[wire.PAGE_ORDER]
        if order in (0, self.order):
            return
        count = words[wire.PAGE_ORDER_COUNT]
        self.order, self.order_at = order, wire.PAGE_ORDERS + count % wire.ORDERS_KEPT * wire.ORDER_WORDS
        self._write((wire.PAGE_ORDER_COUNT, count + 1), *enumerate((order, self.last_ns, 0, 0), self.order_at))
        if not self._sample_gpus() and (sample := host_memory()) is not None:
            self._write_memory(wire.MEMORY_HOST, *sample)

    def _write_order_time(self, offset: int) -> None:
        """Write the time since the order's boundary into its entry; without an order there is none to write."""
        if self.order_at:
            since = self.words[self.order_at + 1]
            self._write((self.order_at + offset, max(1, monotonic_ns() - since)))

    def _sample_gpus(self) -> bool:
        """Record the memory in use on the GPU that has most, and the peak of each; return False without a GPU."""
        sample = gpu_memory()
        for index, (_, peak) in sample.items():
            self.peaks[index] = max(peak, self.peaks.get(index, 0))
        if sample:
            self._write_memory(wire.MEMORY_GPU, *max(sample.values(), key=operator.itemgetter(1)))
        return bool(sample)

    def _write_memory(self, kind: int, now: int, peak: int) -> None:
        """Write the lowest use at a boundary and the peak; both in bytes."""
        words = self.words
        if words[wire.PAGE_MEMORY_KIND] == kind:
            now = min(now, words[wire.PAGE_MEMORY_LOW])
            peak = max(peak, words[wire.PAGE_MEMORY_PEAK])
        self._write((wire.PAGE_MEMORY_KIND, kind), (wire.PAGE_MEMORY_LOW, now), (wire.PAGE_MEMORY_PEAK, peak))

    def _write(self, *pairs: tuple[int, int]) -> None:
        """Write words of the record as one change of it."""
        words = self.words
        words[SEQUENCE] = self.sequence + 1
        for index, value in pairs:
            words[index] = value
        self.sequence += 2
        words[SEQUENCE] = self.sequence
