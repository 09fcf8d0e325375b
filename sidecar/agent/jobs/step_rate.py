"""Iteration times of each job since its co-runners, the jobs on its GPUs at the same time, last changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

from cadenza.policies.core.model import JobKey, StepRate
from cadenza.sidecar.agent.ipc.pages import Page, PageRecord

MIN_INTERVAL_S = 0.2
"""Least time between two measurements of the same run."""
NOTHING = StepRate(0.0, 0, error=1.0)


@dataclass
class StepRateMeter:
    """Follows one job; monotonic times in seconds."""

    co_runners: frozenset[JobKey] | None = None
    """Jobs that run on its GPUs at the same time; None while it does not run itself."""
    last: StepRate | None = None
    """Result of the last measurement, or of the end of its last run."""
    _since: float = 0.0
    _measured_at: float = float("-inf")
    _at_change: dict[int, int] = field(default_factory=dict)
    """Iterations of each rank when the co-runners changed, by pid: the iteration under way then counts for neither."""
    _marks: dict[int, PageRecord] = field(default_factory=dict)
    """Each rank's record from which its iterations are counted."""

    def update(self, co_runners: frozenset[JobKey] | None, pages: Mapping[int, Page], now: float) -> None:
        """Take in the present co-runners, and start a new measurement if they changed."""
        if co_runners == self.co_runners:
            for pid, iterations in list(self._at_change.items()) if co_runners is not None else ():
                record = pages[pid].record() if pid in pages else None
                if pid not in pages or (record is not None and record.iterations > iterations):
                    del self._at_change[pid]
                    if record is not None:
                        self._marks[pid] = record
            return
        self._measure(pages, now)  # the end of the run with the former co-runners
        self.co_runners = co_runners
        if co_runners is not None:
            self._since, self._marks = now, {}
            self._at_change = {pid: record.iterations for pid, page in pages.items() if (record := page.record())}
            self.last = NOTHING._replace(co_runners=tuple(sorted(co_runners)))

    def measure(self, pages: Mapping[int, Page], now: float) -> StepRate | None:
        """Return the present rate, at most MIN_INTERVAL_S old; for a job that does not run, that of its last run."""
        if now - self._measured_at >= MIN_INTERVAL_S:
            self._measure(pages, now)
        return self.last

    def _measure(self, pages: Mapping[int, Page], now: float) -> None:
        """Measure the slowest rank."""
        if self.co_runners is None or self.last is None:
            return
        self._measured_at = now
        rates = [
            between(mark, record)
            for pid, mark in self._marks.items()
            if pid in pages and (record := pages[pid].record()) is not None
        ]
        slowest = max(rates, key=lambda rate: rate.iteration_s, default=NOTHING)
        self.last = slowest._replace(co_runners=self.last.co_runners, window_s=round(max(0.0, now - self._since), 3))


def between(mark: PageRecord, now: PageRecord) -> StepRate:
    """Return the rate of one rank from one record to a later one, without window and co-runners (pure)."""
    count, busy_s = now.iterations - mark.iterations, now.busy_s - mark.busy_s
    if count <= 0 or busy_s <= 0 or now.fine != mark.fine:
        return NOTHING
    counts = [after - before for before, after in zip(mark.counts, now.counts, strict=False)]
    error = 1.0 if count == 1 else min(_spread(replace(now, counts=counts)) / sqrt(count), 1.0)
    waited = min(max(now.waited_s - mark.waited_s, 0.0) / busy_s, 1.0)
    return StepRate(busy_s / count, count, 0.0, round(error, 4), round(waited, 4))


def _spread(record: PageRecord) -> float:
    """Return the standard deviation of the iteration times of a record, relative to their mean; 1 without a mean."""
    times = [(count, record.middle_s(index)) for index, count in enumerate(record.counts) if count > 0]
    total = sum(count for count, _ in times)
    mean = sum(count * time for count, time in times) / max(total, 1)
    if mean <= 0:  # all of them in the first bucket, which holds times of 0
        return 1.0
    variance = sum(count * (time - mean) ** 2 for count, time in times) / max(total - 1, 1)
    return sqrt(variance) / mean
