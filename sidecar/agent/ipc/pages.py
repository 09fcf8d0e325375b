"""The shared page of one rank, agent's side: made sealed, read as counters, written as orders."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.budgets import FileBudget
from cadenza.sidecar.bounds import MAX_STEP

NS = 1e-9
MAX_COUNT = 2**45
"""Limit on iterations of one length, because a job can write anything into its half: a thousand years of 1 ms."""
MAX_READS = 16
"""Attempts to copy a record that changes during the copy. A write takes a microsecond, unless its process is stopped in
the middle of it; then waiting would not help."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A rank's counters in short; times in seconds, None before the first sample."""

    step: int
    iteration_s: float | None
    iteration_p99_s: float | None


@dataclass(frozen=True, slots=True)
class OrderTimes:
    """One stop on the rank's side: CLOCK_MONOTONIC of its boundary, and seconds from there (0: never)."""

    order: int
    boundary_at_s: float
    arrived_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class PageRecord:
    """One consistent copy of a rank's counters, all since the rank began; times in seconds, memory in bytes."""

    step: int
    iterations: int
    busy_s: float
    """Sum of the iteration times."""
    samples: int
    waited_s: float
    """Blocked in the loader; part of ``busy_s``."""
    memory_kind: int
    memory_low: int
    memory_peak: int
    orders: tuple[OrderTimes, ...]
    """Oldest first."""
    counts: Sequence[int]
    fine: bool

    def quantile_s(self, share: float) -> float | None:
        """Return the quantile ``share`` of the iteration times; None before the first iteration.

        From a client of layout 1 it is within 6 % of the exact value (for times from 1 µs to 36 min), from an older one
        it is the upper end of a bucket that is up to 25 % wide.
        """
        if not self.iterations:
            return None
        sums = enumerate(accumulate(self.counts))
        wanted = share * self.iterations
        return self.middle_s(next((index for index, total in sums if total >= wanted), len(self.counts) - 1))

    def middle_s(self, index: int) -> float:
        """Return the iteration time that represents a bucket."""
        if not self.fine:
            return wire.bucket_upper_ns(index) * NS
        low, high = wire.fine_bounds_ns(index)
        return 2 * low * high / (low + high) * NS  # equally far from both ends, relative to them


class Page:
    """One rank's memfd, mapped; its size is sealed so that a job cannot pull it away from under the agent."""

    def __init__(self, files: FileBudget | None = None) -> None:
        """Make the memfd; raise OSError without a free descriptor, or with none but those in root's reserve."""
        self.fd = os.memfd_create("cadenza-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if files is not None and files.is_reserved(self.fd):
            os.close(self.fd)
            raise OSError(errno.EMFILE, "the users' part of its descriptors is in use")
        os.ftruncate(self.fd, wire.PAGE_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, wire.PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._words[wire.PAGE_MAGIC] = wire.MAGIC
        self._last: PageRecord | None = None

    def close(self) -> None:
        """Unmap; the job's own mapping lives on."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    @property
    def step(self) -> int:
        """Completed boundaries."""
        return min(int(self._words[wire.PAGE_STEP]), MAX_STEP)

    @property
    def state(self) -> int:
        """One of the wire's ``STATE_…``."""
        return int(self._words[wire.PAGE_STATE])

    def start_at(self, step: int) -> None:
        """Set the step counter of a new page to the rank's step at its attach."""
        self._words[wire.PAGE_STEP] = min(step, MAX_STEP)

    @property
    def saves(self) -> bool:
        """True if the rank can save a checkpoint on order."""
        return bool(self._words[wire.PAGE_SAVES])

    @property
    def saves_away(self) -> bool:
        """True if the rank can also save one while its state is in host memory: it has made a step to save."""
        return int(self._words[wire.PAGE_SAVES]) == wire.SAVES_AWAY and self.step > 0

    @property
    def passed(self) -> str:
        """Why the rank's last boundary was no save point, in words; "" if it was, or none was asked of it."""
        return wire.PASSED_WORDS.get(int(self._words[wire.PAGE_PASSED]), "")

    @property
    def save_every(self) -> int:
        """Training steps between the last two saves that the rank's script made by itself; 0: not known."""
        return min(int(self._words[wire.PAGE_SAVE_EVERY]), MAX_STEP)

    @property
    def lost_s(self) -> float:
        """Training that a move now would repeat, in seconds."""
        return min(int(self._words[wire.PAGE_LOST_MS]), MAX_COUNT) / 1000

    def order(self, number: int, stop: int, purpose: int = wire.PURPOSE_YIELD) -> None:
        """Write an order; its number goes before the stop, so that a rank that sees the stop sees its order too."""
        self._words[wire.PAGE_PURPOSE] = purpose
        self._words[wire.PAGE_ORDER] = number
        self._words[wire.PAGE_STOP] = stop

    def tune(self, cpus: float, cache_mb: int | None) -> None:
        """Tell the rank its whole job's present CPUs on this node, and MiB for loaders' caches (None: unsaid)."""
        self._words[wire.PAGE_CPUS_CENTI] = max(1, round(100 * cpus))
        self._words[wire.PAGE_CACHE_MB] = wire.UNSAID if cache_mb is None else cache_mb
        self._words[wire.PAGE_TUNE_COUNT] += 1

    def telemetry(self) -> Telemetry:
        """Return the step and the iteration times, at worst from the last consistent record."""
        record = self.record() or self._last
        if record is None or not record.iterations:
            return Telemetry(self.step, None, None)
        return Telemetry(self.step, record.busy_s / record.iterations, record.quantile_s(0.99))

    def record(self) -> PageRecord | None:
        """Return a consistent copy of the rank's record; None if it was being written at each attempt."""
        for _ in range(MAX_READS):
            before = self._words[wire.PAGE_SEQUENCE]
            copy = self._map[:]
            # No lock: a job that is stopped in the middle of a write would keep it, and with it the agent.
            if before % 2 == 0 and self._words[wire.PAGE_SEQUENCE] == before:
                self._last = read_record(array("Q", copy))
                return self._last
        return None


def read_record(words: Sequence[int]) -> PageRecord:
    """Return the record in the words of a page, its counters within their bounds."""
    fine = words[wire.PAGE_LAYOUT] >= wire.LAYOUT
    first, buckets = (wire.PAGE_FINE, wire.FINE_BUCKETS) if fine else (wire.PAGE_HISTOGRAM, wire.HISTOGRAM_BUCKETS)
    counts = words[first : first + buckets]
    if max(counts) > MAX_COUNT:
        counts = [min(count, MAX_COUNT) for count in counts]
    return PageRecord(
        step=min(words[wire.PAGE_STEP], MAX_STEP),
        iterations=sum(counts),
        busy_s=words[wire.PAGE_SUM_NS] * NS,
        samples=min(words[wire.PAGE_SAMPLES], MAX_STEP),
        waited_s=words[wire.PAGE_WAITED_NS] * NS,
        memory_kind=words[wire.PAGE_MEMORY_KIND],
        memory_low=words[wire.PAGE_MEMORY_LOW],
        memory_peak=words[wire.PAGE_MEMORY_PEAK],
        orders=_orders(words),
        counts=counts,
        fine=fine,
    )


def _orders(words: Sequence[int]) -> tuple[OrderTimes, ...]:
    """Return the written entries of the ring, oldest first."""
    count = words[wire.PAGE_ORDER_COUNT]
    orders = []
    for number in range(max(0, count - wire.ORDERS_KEPT), count):
        at = wire.PAGE_ORDERS + number % wire.ORDERS_KEPT * wire.ORDER_WORDS
        order, boundary, arrived, done = words[at : at + wire.ORDER_WORDS]
        orders.append(OrderTimes(order, boundary * NS, arrived * NS, done * NS))
    return tuple(orders)
