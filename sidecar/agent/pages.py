"""The shared page of one rank, agent's side: made sealed, read as counters, written as orders."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from itertools import accumulate

from cadenza.sidecar import wire

NS = 1e-9
MAX_STEP = 2**62
"""A job can write anything into its half: steps beyond this are taken as this."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a rank's counters say; times in seconds, None before the first sample."""

    step: int
    iteration_s: float | None
    iteration_p99_s: float | None


class Page:
    """One rank's memfd, mapped; its size is sealed so that a job cannot pull it away from under the agent."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("cadenza-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, wire.PAGE_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, wire.PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._words[wire.PAGE_MAGIC] = wire.MAGIC

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
        """Set the step counter of a fresh page to what the rank said when it attached."""
        self._words[wire.PAGE_STEP] = min(step, MAX_STEP)

    def order(self, number: int, stop: int) -> None:
        """Write an order; the number goes first, so that a rank that sees the stop sees its order too."""
        self._words[wire.PAGE_ORDER] = number
        self._words[wire.PAGE_STOP] = stop

    def telemetry(self) -> Telemetry:
        """Return the step and the iteration times."""
        counts = self._words[wire.PAGE_HISTOGRAM : wire.PAGE_HISTOGRAM + wire.HISTOGRAM_BUCKETS].tolist()
        total = sum(counts)
        if not total:
            return Telemetry(self.step, None, None)
        mean = int(self._words[wire.PAGE_SUM_NS]) * NS / total
        return Telemetry(self.step, mean, wire.bucket_upper_ns(_percentile(counts, 0.99 * total)) * NS)


def _percentile(counts: list[int], wanted: float) -> int:
    """Return the bucket in which the count reaches ``wanted``."""
    reached = accumulate(counts)
    return next((index for index, seen in enumerate(reached) if seen >= wanted), len(counts) - 1)
