"""A job's pace in its present company: what begins anew, what it counts, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import PageRecord
from cadenza.sidecar.agent.jobs.step_rate import StepRateMeter, between

OTHER = JobKey(2, 0)


@dataclass
class FakePage:
    """A rank's record as it would read it."""

    counts: list[int] = field(default_factory=lambda: [0] * wire.FINE_BUCKETS)
    busy_s: float = 0.0
    waited_s: float = 0.0

    def step(self, *times_s: float, waited_s: float = 0.0) -> None:
        for time_s in times_s:
            self.counts[wire.fine_bucket(round(time_s * 1e9))] += 1
            self.busy_s += time_s
        self.waited_s += waited_s

    def record(self) -> PageRecord:
        total = sum(self.counts)
        return PageRecord(total, total, self.busy_s, 0, self.waited_s, 0, 0, 0, (), list(self.counts), fine=True)


def test_the_mean_is_exact_and_its_error_follows_the_spread() -> None:
    page = FakePage()
    page.step(*[7.0] * 50)
    mark = page.record()
    page.step(*[0.1, 0.3] * 50, waited_s=5.0)
    found = between(mark, page.record())
    assert (found.iterations, found.iteration_s, found.data_wait) == (100, pytest.approx(0.2), 0.25)
    assert found.error == pytest.approx(0.05, rel=0.1)
    assert between(mark, replace(mark, iterations=51, busy_s=357.0)).error == 1.0
    assert between(mark, mark).iterations == 0


def test_a_pace_begins_with_the_company_and_without_the_iteration_under_way() -> None:
    meter, pages = StepRateMeter(), {10: FakePage()}
    page = pages[10]
    meter.update(frozenset(), pages, 0.0)
    page.step(5.0)  # under way when it began
    meter.update(frozenset(), pages, 1.0)
    page.step(*[0.1] * 20)
    alone = meter.measure(pages, 3.0)
    assert (alone.iterations, alone.iteration_s, alone.window_s, alone.co_runners) == (20, pytest.approx(0.1), 3.0, ())
    meter.update(frozenset({OTHER}), pages, 4.0)
    assert meter.measure(pages, 4.0).iterations == 0
    page.step(0.15)
    meter.update(frozenset({OTHER}), pages, 5.0)
    page.step(*[0.2] * 10)
    together = meter.measure(pages, 7.0)
    assert (together.iterations, together.iteration_s) == (10, pytest.approx(0.2))
    assert (together.window_s, together.co_runners) == (3.0, ((2, 0),))


def test_a_job_that_waits_keeps_the_pace_of_its_last_run() -> None:
    meter, pages = StepRateMeter(), {10: FakePage()}
    page = pages[10]
    assert meter.measure(pages, 0.0) is None
    meter.update(frozenset(), pages, 0.0)
    page.step(0.1)
    meter.update(frozenset(), pages, 1.0)
    page.step(*[0.1] * 4)
    meter.update(None, pages, 2.0)
    page.step(*[9.0] * 4)
    assert (meter.measure(pages, 50.0).iterations, meter.measure(pages, 50.0).window_s) == (4, 2.0)
    meter.update(frozenset(), pages, 60.0)
    assert meter.measure(pages, 61.0).iterations == 0


def test_the_slowest_rank_sets_the_pace() -> None:
    meter, pages = StepRateMeter(), {10: FakePage(), 11: FakePage()}
    meter.update(frozenset(), pages, 0.0)
    for rank, time_s in ((10, 0.1), (11, 0.3)):
        pages[rank].step(time_s)
    meter.update(frozenset(), pages, 1.0)
    for rank, time_s in ((10, 0.1), (11, 0.3)):
        pages[rank].step(time_s, time_s)
    assert meter.measure(pages, 2.0).iteration_s == pytest.approx(0.3)
    del pages[11]
    assert meter.measure(pages, 3.0).iteration_s == pytest.approx(0.1)
