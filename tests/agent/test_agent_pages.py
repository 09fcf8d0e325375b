"""The shared page from the agent's side."""

from __future__ import annotations

import mmap
import os

import msgspec
import pytest

from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import MAX_STEP, Page
from cadenza.sidecar.agent.ipc.processes import is_stopped, start_ticks
from cadenza.sidecar.agent.telemetry.collector import Stretch, joined


def test_counters_become_telemetry() -> None:
    page = Page()
    words = memoryview(mmap.mmap(page.fd, wire.PAGE_BYTES)).cast("Q")
    assert words[wire.PAGE_MAGIC] == wire.MAGIC
    assert page.telemetry().iteration_s is None
    for milliseconds in [10] * 98 + [50, 500]:
        words[wire.PAGE_SUM_NS] += milliseconds * 1_000_000
        words[wire.PAGE_HISTOGRAM + wire.bucket(milliseconds * 1_000_000)] += 1
    words[wire.PAGE_STEP] = 100
    counters = page.telemetry()
    assert counters.step == 100
    assert counters.iteration_s == pytest.approx(0.0153)
    assert counters.iteration_p99_s == pytest.approx(0.05, rel=0.25)
    page.order(12, 101)
    assert (words[wire.PAGE_ORDER], words[wire.PAGE_STOP]) == (12, 101)


def test_a_jobs_nonsense_in_its_page_does_no_harm() -> None:
    page = Page()
    words = memoryview(mmap.mmap(page.fd, wire.PAGE_BYTES)).cast("Q")
    for index in range(len(words)):
        words[index] = 2**64 - 1
    assert page.step == MAX_STEP
    page.order(1, page.step + 1)
    assert page.telemetry().iteration_p99_s is None, "a record that is always being written"
    words[wire.PAGE_SEQUENCE] -= 1
    assert page.telemetry().iteration_p99_s is not None
    record = page.record()
    assert record is not None
    assert len(msgspec.json.encode(joined(5.0, None, [Stretch(record, record)] * 2))) < 1000
    page.close()
    page.close()


@pytest.mark.parametrize("nanoseconds", [0, 1, 3, 4, 7, 8, 1000, 10**6, 10**9, 10**12])
def test_a_bucket_holds_what_falls_into_it(nanoseconds: int) -> None:
    index = wire.bucket(nanoseconds)
    assert nanoseconds <= wire.bucket_upper_ns(index)
    assert index == 0 or nanoseconds > wire.bucket_upper_ns(index - 1)


def test_processes_are_told_apart() -> None:
    assert start_ticks(os.getpid()) is not None
    assert start_ticks(2**22 + 1) is None
    assert not is_stopped(os.getpid())
