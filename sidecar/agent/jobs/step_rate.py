"""How fast each job runs in its present company: iteration times since who uses its GPUs with it last changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING

from cadenza.policies.core.model import JobKey, Pace
from cadenza.sidecar.agent.ipc.pages import PageRecord

if TYPE_CHECKING:
    from cadenza.sidecar.agent.jobs.host_state import Host
    from cadenza.sidecar.agent.jobs.job_run import Rank
    from cadenza.sidecar.agent.leases.lease_table import Lease

FRESH_S = 0.2
"""A pace is worked out anew at most this often."""
NOTHING = Pace(0.0, 0, error=1.0)


@dataclass
class StepRateMeter:
    """Follows one job; monotonic times in seconds."""

    company: frozenset[JobKey] | None = None
    """Who runs on its GPUs with it; None: it does not run itself."""
    last: Pace | None = None
    """As of the last look, or of the end of its last run."""
    _since: float = 0.0
    _measured_at: float = float("-inf")
    _at_change: dict[int, int] = field(default_factory=dict)
    """Iterations of each rank when the company changed, by pid: the one under way then belongs to neither."""
    _marks: dict[int, PageRecord] = field(default_factory=dict)
    """Each rank's record from which the pace counts."""

    def look(self, company: frozenset[JobKey] | None, ranks: Mapping[int, Rank], now: float) -> None:
        """Take in who runs now, and begin anew when that changed."""
        if company == self.company:
            if company is not None and self._at_change:
                self._mark(ranks)
            return
        self._measure(ranks, now)  # the last of the company that ends
        self.company = company
        if company is None:
            return
        self._since, self._marks = now, {}
        self._at_change = {pid: record.iterations for pid, rank in ranks.items() if (record := rank.page.record())}
        self.last = NOTHING._replace(beside=tuple(sorted(company)))

    def measure(self, ranks: Mapping[int, Rank], now: float) -> Pace | None:
        """Return the pace as of a moment ago; of a job that does not run, that of its last run."""
        if now - self._measured_at >= FRESH_S:
            self._measure(ranks, now)
        return self.last

    def _measure(self, ranks: Mapping[int, Rank], now: float) -> None:
        if self.company is None or self.last is None:
            return
        self._measured_at = now
        found = [
            between(mark, record)
            for pid, mark in self._marks.items()
            if pid in ranks and (record := ranks[pid].page.record()) is not None
        ]
        slowest = max(found, key=lambda one: one.iteration_s, default=NOTHING)
        self.last = slowest._replace(beside=self.last.beside, window_s=round(max(0.0, now - self._since), 3))

    def _mark(self, ranks: Mapping[int, Rank]) -> None:
        """Begin to count with each rank that has ended the iteration under way at the change."""
        for pid, iterations in list(self._at_change.items()):
            rank = ranks.get(pid)
            record = rank.page.record() if rank is not None else None
            if rank is None or (record is not None and record.iterations > iterations):
                del self._at_change[pid]
                if record is not None:
                    self._marks[pid] = record


def between(mark: PageRecord, now: PageRecord) -> Pace:
    """Return the pace of one rank from one record to a later one, without window and company (pure)."""
    count, busy_s = now.iterations - mark.iterations, now.busy_s - mark.busy_s
    if count <= 0 or busy_s <= 0:
        return NOTHING
    counts = [after - before for before, after in zip(mark.counts, now.counts, strict=False)]
    error = 1.0 if count == 1 else min(_spread(replace(now, counts=counts)) / sqrt(count), 1.0)
    waited = min(max(now.waited_s - mark.waited_s, 0.0) / busy_s, 1.0)
    return Pace(busy_s / count, count, 0.0, round(error, 4), round(waited, 4))


def _spread(record: PageRecord) -> float:
    """Return the standard deviation of the iteration times of a record, relative to their mean."""
    times = [(count, record.middle_s(index)) for index, count in enumerate(record.counts) if count > 0]
    total = sum(count for count, _ in times)
    mean = sum(count * time for count, time in times) / total
    variance = sum(count * (time - mean) ** 2 for count, time in times) / max(total - 1, 1)
    return sqrt(variance) / mean


def look(host: Host) -> None:
    """Bring every job's pace up to date with who runs."""
    running = [lease for lease in host.leases if _runs(host, lease)]
    now = host.clock.monotonic()
    for lease in host.leases:
        run = host.run(lease.key)
        company = None
        if lease in running:
            company = frozenset(other.key for other in running if other is not lease and other.overlaps(lease))
        run.pacer.look(company, run.ranks, now)


def _runs(host: Host, lease: Lease) -> bool:
    """Whether a job computes on its GPUs: it has them, and its state is on them."""
    run = host.run(lease.key)
    return lease.occupying and run.resume is None and any(not rank.out for rank in run.ranks.values())
