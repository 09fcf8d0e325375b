"""The step counters' record in the page, as the wire format defines it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sidecar import wire
from cadenza.sidecar.client.session import step_page
from cadenza.sidecar.client.session.step_page import MEMORY_EVERY, StepCounters, private_page

GIB = 1 << 30


class Ticking:
    """A clock in ns that the test moves."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    ticking = Ticking()
    monkeypatch.setattr(step_page, "monotonic_ns", ticking)
    return ticking


def fine(words: memoryview) -> list[int]:
    return words[wire.PAGE_FINE : wire.PAGE_FINE + wire.FINE_BUCKETS].tolist()


@given(st.lists(st.integers(0, 2**43), max_size=20))
def test_the_inlined_buckets_are_those_of_the_wire(times: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ticking = Ticking()
        patch.setattr(step_page, "monotonic_ns", ticking)
        words = private_page()
        counted = StepCounters(words)
        for spent in times:
            ticking.now += spent
            counted.boundary()
    expected = [0] * wire.FINE_BUCKETS
    for spent in times:
        expected[wire.fine_bucket(spent)] += 1
    assert fine(words) == expected
    assert words[wire.PAGE_SUM_NS] == sum(times)
    assert words[wire.PAGE_STEP] == len(times)


@given(st.integers(1 << (wire.FINE_BITS - 1), (1 << 41) - 1))
def test_a_fine_bucket_holds_what_falls_into_it_and_is_an_eighth_wide(nanoseconds: int) -> None:
    low, high = wire.fine_bounds_ns(wire.fine_bucket(nanoseconds))
    assert low <= nanoseconds < high
    assert high * 8 <= low * 9


def test_the_fine_histogram_fills_the_page_to_its_end() -> None:
    assert wire.PAGE_FINE + wire.FINE_BUCKETS == wire.PAGE_BYTES // 8
    assert wire.PAGE_ORDERS + wire.ORDERS_KEPT * wire.ORDER_WORDS <= wire.PAGE_HISTOGRAM
    assert wire.PAGE_HISTOGRAM + wire.HISTOGRAM_BUCKETS <= wire.PAGE_STOP
    assert wire.fine_bounds_ns(wire.FINE_BUCKETS - 1)[1] == 1 << 41


def test_samples_and_time_in_the_loader_are_written_at_the_next_boundary(clock: Ticking) -> None:
    words = private_page()
    counted = StepCounters(words)
    counted.waited(0.25)
    assert words[wire.PAGE_WAITED_NS] == 0
    counted.boundary(32)
    assert (words[wire.PAGE_WAITED_NS], words[wire.PAGE_SAMPLES]) == (250_000_000, 32)
    assert words[wire.PAGE_SEQUENCE] % 2 == 0
    assert words[wire.PAGE_LAYOUT] == wire.LAYOUT


def test_a_step_that_is_no_training_is_in_no_figure_of_training(clock: Ticking) -> None:
    words = private_page()
    rank = StepCounters(words)
    for spent, training in ((500, True), (90_000, False), (70_000, False), (600, True)):
        clock.now += 1000 * spent
        rank.waited(spent / 2e6)
        rank.boundary(8, training=training)
    assert words[wire.PAGE_STEP] == rank.step == 4
    assert (sum(fine(words)), words[wire.PAGE_SUM_NS], words[wire.PAGE_SAMPLES]) == (2, 1_100_000, 16)
    assert words[wire.PAGE_WAITED_NS] == 550_000
    assert words[wire.PAGE_LAST_NS] == clock.now
    words[wire.PAGE_STOP] = 5
    rank.boundary(training=False)
    assert words[wire.PAGE_STOP] == 0, "it stops here all the same"


def test_any_loader_is_timed(clock: Ticking) -> None:
    def loader() -> object:
        for batch in "abc":
            clock.now += 7
            yield batch
        clock.now += 100

    counted = StepCounters(private_page())
    seen = []
    for batch in counted.timed(loader()):
        clock.now += 1000
        seen.append(batch)
    assert seen == ["a", "b", "c"]
    assert counted.waited_ns == 21


def test_another_page_goes_on_with_everything() -> None:
    old, new = private_page(), private_page()
    counted = StepCounters(old)
    counted.waited(1)
    old[wire.PAGE_STOP] = 1
    counted.boundary(3)
    new[wire.PAGE_STOP], new[wire.PAGE_ORDER] = 5, 9
    counted.switch_page(new)
    own = [index for index in range(wire.PAGE_BYTES // 8) if not wire.PAGE_STOP <= index < wire.PAGE_FINE]
    changed = [index for index in own if old[index] != new[index]]
    assert changed == [wire.PAGE_MAGIC, wire.PAGE_SEQUENCE]
    assert new[wire.PAGE_SEQUENCE] % 2 == 0
    assert (new[wire.PAGE_STOP], new[wire.PAGE_ORDER]) == (5, 9)


def test_the_last_orders_are_in_the_ring(clock: Ticking) -> None:
    words = private_page()

    class Rank(StepCounters):
        def on_stop_step(self) -> None:
            clock.now += 20
            self.order_arrived()
            clock.now += 300
            self.order_done()
            self.words[wire.PAGE_STOP] = 0

    rank = Rank(words)
    for order in range(1, 11):
        clock.now += 1000
        words[wire.PAGE_ORDER], words[wire.PAGE_STOP] = order, 1
        rank.boundary()
    assert words[wire.PAGE_ORDER_COUNT] == 10
    at = wire.PAGE_ORDERS + 9 % wire.ORDERS_KEPT * wire.ORDER_WORDS
    assert words[at : at + 4].tolist() == [10, clock.now - 320, 20, 320]
    assert {words[wire.PAGE_ORDERS + 4 * index] for index in range(wire.ORDERS_KEPT)} == set(range(3, 11))


def test_an_order_whose_stop_was_raised_keeps_its_first_boundary(clock: Ticking) -> None:
    words = private_page()
    rank = StepCounters(words)
    words[wire.PAGE_ORDER] = 7
    for _ in range(2):
        clock.now += 1000
        words[wire.PAGE_STOP] = 1
        rank.boundary()
    clock.now += 50
    rank.order_done()
    assert words[wire.PAGE_ORDER_COUNT] == 1
    assert words[wire.PAGE_ORDERS : wire.PAGE_ORDERS + 4].tolist() == [7, clock.now - 1050, 0, 1050]


def test_without_an_order_no_time_is_written() -> None:
    words = private_page()
    rank = StepCounters(words)
    rank.order_arrived()
    rank.order_done()
    assert not any(words[wire.PAGE_ORDER_COUNT : wire.PAGE_HISTOGRAM])


def test_a_rank_without_a_gpu_records_its_resident_set_when_it_stops() -> None:
    words = private_page()
    rank = StepCounters(words)
    rank.boundary()
    assert words[wire.PAGE_MEMORY_KIND] == wire.MEMORY_UNKNOWN
    words[wire.PAGE_ORDER], words[wire.PAGE_STOP] = 4, 1
    rank.boundary()
    assert words[wire.PAGE_MEMORY_KIND] == wire.MEMORY_HOST
    assert 1 << 20 < words[wire.PAGE_MEMORY_LOW] <= words[wire.PAGE_MEMORY_PEAK] < GIB * 64


def test_gpu_memory_is_sampled_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has those of the GPU with most; the peak of each is kept."""
    looks = iter([{1: (GIB, 2 * GIB), 3: (sizes[0] * GIB, sizes[1] * GIB)} for sizes in ((5, 9), (4, 9), (6, 10))])
    monkeypatch.setattr(step_page, "gpu_memory", lambda: next(looks))
    words = private_page()
    rank = StepCounters(words)
    rank.boundary()
    assert words[wire.PAGE_MEMORY_KIND : wire.PAGE_MEMORY_PEAK + 1].tolist() == [wire.MEMORY_GPU, 5 * GIB, 9 * GIB]
    for _ in range(2 * MEMORY_EVERY):
        rank.boundary()
    assert words[wire.PAGE_MEMORY_LOW : wire.PAGE_MEMORY_PEAK + 1].tolist() == [4 * GIB, 10 * GIB]
    assert rank.peaks == {1: 2 * GIB, 3: 10 * GIB}


def test_the_statistics_of_torchs_allocator_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape is that of torch.cuda.memory_stats_as_nested_dict; no GPU is needed."""
    told = {"allocated_bytes": {"all": {"current": 3, "peak": 8, "allocated": 20, "freed": 17}}}
    cuda = pytest.importorskip("torch.cuda", reason="needs the extra `client`")
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", lambda place: told if place.index == 5 else {})
    monkeypatch.setattr(cuda, "device_count", lambda: 8)
    assert step_page.gpu_memory() == {5: (3, 8)}
    told.clear()
    assert step_page.gpu_memory() == {}
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    assert step_page.gpu_memory() == {}
