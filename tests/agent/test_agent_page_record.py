"""A rank's record as the agent reads it, while the rank writes it, and of old clients."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rig import until
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import NS, Page, PageRecord
from cadenza.sidecar.client.session import resources

WRITER = Path(__file__).with_name("page_writer.py")


def words_of(page: Page) -> memoryview:
    return memoryview(mmap.mmap(page.fd, wire.PAGE_BYTES)).cast("Q")


@pytest.fixture
def written() -> Iterator[tuple[Page, subprocess.Popen[bytes]]]:
    """A page that a process in the middle of its training writes into."""
    page = Page()
    page.start_at(0)
    writer = subprocess.Popen([sys.executable, str(WRITER), str(page.fd)], pass_fds=[page.fd])
    until(lambda: page.step > 100, "steps of the writer")
    yield page, writer
    writer.kill()
    writer.wait()
    page.close()


def consistent(record: PageRecord) -> bool:
    """Return True if all counters of page_writer are of the same step."""
    waited = round(record.waited_s / NS)
    return (record.iterations, 3 * record.step, 5 * record.step) == (record.step, record.samples, waited)


@pytest.mark.slow
def test_a_copy_is_never_of_two_steps(written: tuple[Page, subprocess.Popen[bytes]]) -> None:
    page, _ = written
    steps: set[int] = set()

    def read() -> bool:
        for _ in range(200):
            record = page.record()
            if record is not None:
                assert consistent(record), record
                steps.add(record.step)
        page.order(len(steps) + 1, 1)
        return len(steps) > 1000

    until(read, "a thousand different steps read")
    last = page.telemetry()
    assert last.iteration_s is not None
    assert last.iteration_p99_s is not None


@pytest.mark.slow
def test_a_rank_that_stands_still_in_the_middle_of_a_write_costs_nobody_time(
    written: tuple[Page, subprocess.Popen[bytes]],
) -> None:
    page, writer = written
    words = words_of(page)

    def stopped_inside() -> bool:
        writer.send_signal(signal.SIGSTOP)
        os.waitpid(writer.pid, os.WUNTRACED)
        if words[wire.PAGE_SEQUENCE] % 2:
            return True
        assert page.record() is not None
        writer.send_signal(signal.SIGCONT)
        return False

    until(page.record, "a first record")
    until(stopped_inside, "a stop in the middle of a write")
    assert page.record() is None
    assert page.telemetry().iteration_s is not None, "the last consistent record still tells"
    writer.send_signal(signal.SIGCONT)
    until(lambda: (record := page.record()) is not None and consistent(record), "a record after it went on")


def test_an_old_clients_page_stays_readable() -> None:
    page = Page()
    words = words_of(page)
    words[wire.PAGE_STEP], words[wire.PAGE_SUM_NS], words[wire.PAGE_SAMPLES] = 2, 30_000_000, 64
    words[wire.PAGE_HISTOGRAM + wire.bucket(10_000_000)] += 1
    words[wire.PAGE_HISTOGRAM + wire.bucket(20_000_000)] += 1
    record = page.record()
    assert record is not None
    assert (record.iterations, record.samples, record.waited_s, record.orders) == (2, 64, 0.0, ())
    assert record.quantile_s(0.99) == pytest.approx(0.02, rel=0.25)
    assert page.telemetry().iteration_s == pytest.approx(0.015)


@given(st.lists(st.floats(1.1e-6, 2000.0), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_within_six_percent_of_the_exact_ones(times: list[float], share: float) -> None:
    counts = [0] * wire.FINE_BUCKETS
    for spent in times:
        counts[wire.fine_bucket(int(spent / NS))] += 1
    record = PageRecord(0, len(times), 0.0, 0, 0.0, 0, 0, 0, (), counts, fine=True)
    ordered = sorted(times)
    exact = next(spent for rank, spent in enumerate(ordered, 1) if rank >= share * len(times))
    assert record.quantile_s(share) == pytest.approx(exact, rel=0.06)


def test_a_rank_reads_what_its_job_was_given() -> None:
    page = Page()
    words = words_of(page)
    assert resources.read(words) is None
    page.tune(6.25, 4096)
    assert resources.read(words) == (6.25, 4096)
    page.tune(0.0, None)
    assert resources.read(words) == (0.01, None)
    page.tune(3.0, 0)
    assert resources.read(words) == (3.0, 0)
    assert words[wire.PAGE_TUNE_COUNT] == 3


def test_orders_come_back_oldest_first() -> None:
    page = Page()
    words = words_of(page)
    words[wire.PAGE_ORDER_COUNT] = wire.ORDERS_KEPT + 2
    for number in range(wire.ORDERS_KEPT + 2):
        at = wire.PAGE_ORDERS + number % wire.ORDERS_KEPT * wire.ORDER_WORDS
        words[at], words[at + 2], words[at + 3] = number + 1, 1_000_000, 5_000_000
    record = page.record()
    assert record is not None
    assert [one.order for one in record.orders] == list(range(3, wire.ORDERS_KEPT + 3))
    assert record.orders[-1].arrived_s == pytest.approx(0.001)
    assert record.orders[-1].done_s == pytest.approx(0.005)
