"""The step path: counters in the shared page, written with one clock read and no system call."""

from __future__ import annotations

import mmap
import os

from cadenza.sidecar import wire
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import LinkLostError

STEP = wire.PAGE_STEP
LAST_NS = wire.PAGE_LAST_NS
SUM_NS = wire.PAGE_SUM_NS
SAMPLES = wire.PAGE_SAMPLES
STOP = wire.PAGE_STOP
CLIENT_WORDS = wire.PAGE_STOP
"""The client's half is the words before the agent's first."""

MIN_BITS = 3
"""Shorter times have a bucket each (see :func:`cadenza.sidecar.wire.bucket`)."""
MAX_BITS = wire.HISTOGRAM_BUCKETS // 4 + 1
FIRST_OCTAVE = wire.PAGE_HISTOGRAM - 2 * 4
LAST_BUCKET = wire.PAGE_HISTOGRAM + wire.HISTOGRAM_BUCKETS - 1


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

    def boundary(self, samples: int = 0) -> None:
        """Say that a training step has ended; ``samples`` is how many training samples it took.

        Returns at once, or, when the agent wants this job to stop here, after the job has its lease back: its
        state was moved to host memory in between. Time spent that way is in no iteration time.
        """
        words = self.words
        now = monotonic_ns()
        spent = now - self.last_ns
        self.last_ns = now
        step = self.step = self.step + 1
        total = self.sum_ns = self.sum_ns + spent
        # wire.bucket, written out: the call would double the price of a step.
        bits = spent.bit_length()
        if MIN_BITS <= bits <= MAX_BITS:
            words[FIRST_OCTAVE + 4 * bits + ((spent >> (bits - 3)) & 3)] += 1
        else:
            words[LAST_BUCKET if bits > MAX_BITS else FIRST_OCTAVE + 8 + spent] += 1
        words[STEP] = step
        words[LAST_NS] = now
        words[SUM_NS] = total
        if samples:
            self.samples += samples
            words[SAMPLES] = self.samples
        stop = words[STOP]
        if stop and step >= stop:
            self.reached()
            self.last_ns = monotonic_ns()

    def reached(self) -> None:
        """Act on the page's stop step; a meter alone has nobody to obey."""
        self.words[STOP] = 0

    def restart_clock(self) -> None:
        """Begin the iteration time anew: what was waited for so far is no training."""
        self.last_ns = monotonic_ns()

    def move_to(self, words: memoryview) -> None:
        """Go on counting in another page, with all that was counted so far."""
        words[:CLIENT_WORDS] = self.words[:CLIENT_WORDS]
        words[wire.PAGE_MAGIC] = wire.MAGIC
        words[STEP] = self.step
        self.words = words
