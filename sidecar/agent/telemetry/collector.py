"""Joins each job's rank pages with the use of its processes, every ``telemetry_s`` seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import OrderTimes, PageRecord
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.telemetry.records import Records
from cadenza.sidecar.agent.telemetry.sampler import Background, Target, Usage
from cadenza.sidecar.orders import JobTelemetry

log = logging.getLogger(__name__)

KINDS = {wire.MEMORY_HOST: "host", wire.MEMORY_GPU: "gpu"}
MB = 1 << 20
MAX_FIGURE = 2**53
"""Limit on reported figures, because a job can write anything into its pages."""


class Stretch(NamedTuple):
    """One rank's records at the last sample and now."""

    before: PageRecord | None
    now: PageRecord


@dataclass
class Collector:
    """Requests samples when they are due and keeps the last of each job; lives in the event loop's thread."""

    host: Host
    background: Background
    records: Records
    _due: float = 0.0
    _joined_at: float | None = None
    _latest: dict[JobKey, JobTelemetry] = field(default_factory=dict)
    _pages: dict[tuple[JobKey, int], PageRecord] = field(default_factory=dict)
    """The last record of each rank, by pid."""
    _warned: bool = False

    def latest(self, key: JobKey) -> JobTelemetry | None:
        """Return the last sample of a job; None before there is one."""
        return self._latest.get(key)

    def tick(self) -> None:
        """Take in a finished sample, and request the next one when it is due."""
        answer = self.background.answer()
        if answer is not None:
            self._join(answer)
        now = self.host.clock.monotonic()
        if now < self._due:
            return
        self._due = now + self.host.settings.expert.telemetry_s
        if self.background.busy:  # psutil or the GPU driver hangs: the pages alone go on
            if not self._warned:
                log.warning("the last sample of the jobs' processes and GPUs has not come back; going on without")
            self._warned = True
            self._join({})
        elif len(self.host.leases):
            self.background.ask(
                [
                    Target(lease.key, tuple(process.pid for process in lease.processes), lease.gpus)
                    for lease in self.host.leases
                ]
            )
        elif self._latest:
            self._join({})

    def close(self) -> None:
        """End the thread and the record files."""
        self.background.close()
        self.records.close()

    def _join(self, usage: dict[JobKey, Usage]) -> None:
        """Make each job's telemetry from its use and its ranks' pages."""
        now = self.host.clock.monotonic()
        window = 0.0 if self._joined_at is None else now - self._joined_at
        self._joined_at = now
        pages, self._pages = self._pages, {}
        self._latest = {}
        for lease in self.host.leases:
            with self.host.supervise(lease.key, "its telemetry"):
                stretches = self._stretches(lease.key, pages)
                self._latest[lease.key] = one = joined(window, usage.get(lease.key), stretches)
                step = max((stretch.now.step for stretch in stretches), default=0)
                self.records.write(lease, self.host.clock.now(), step, one)
        self.records.keep_only(set(self._latest))

    def _stretches(self, key: JobKey, pages: dict[tuple[JobKey, int], PageRecord]) -> list[Stretch]:
        """Read a job's pages; for a page that cannot be read consistently the last record counts."""
        stretches = []
        for pid, rank in self.host.run(key).ranks.items():
            before = pages.get((key, pid))
            record = rank.page.record() or before
            if record is not None:
                self._pages[key, pid] = record
                stretches.append(Stretch(before, record))
        return stretches


def joined(window_s: float, usage: Usage | None, stretches: Sequence[Stretch]) -> JobTelemetry:
    """Return one job's telemetry of the last ``window_s`` seconds (pure)."""
    usage = usage or Usage()
    records = [stretch.now for stretch in stretches]
    kind, low, peak = _memory(records)
    orders: list[OrderTimes] = [record.orders[-1] for record in records if record.orders]
    newest = max((one.order for one in orders), default=None)
    last = [one for one in orders if one.order == newest]
    arrived, done = _largest(one.arrived_s or None for one in last), _largest(one.done_s or None for one in last)
    return JobTelemetry(
        window_s=round(window_s, 3),
        iterations=int(max((_grown(one, lambda record: record.iterations) for one in stretches), default=0)),
        iteration_p50_s=_largest(record.quantile_s(0.5) for record in records),
        iteration_p99_s=_largest(record.quantile_s(0.99) for record in records),
        samples_s=_samples_s(window_s, stretches),
        data_wait=_data_wait(stretches),
        processes=usage.processes,
        cpu_percent=_rounded(usage.cpu_percent),
        rss_mb=_rounded(usage.rss_bytes / MB if usage.processes else None),
        read_mb_s=_rounded(None if usage.read_bytes_s is None else usage.read_bytes_s / MB),
        write_mb_s=_rounded(None if usage.write_bytes_s is None else usage.write_bytes_s / MB),
        gpu_percent=_rounded(usage.gpu_percent),
        gpu_memory_mb=_rounded(None if usage.gpu_memory_bytes is None else usage.gpu_memory_bytes / MB),
        memory_kind=kind,
        memory_low_mb=low,
        memory_peak_mb=peak,
        order_arrived_s=arrived,
        order_done_s=done,
    )


def _grown(stretch: Stretch, counter: Callable[[PageRecord], float]) -> float:
    """Return the growth of a counter; 0 for a rank without a former record."""
    grown = counter(stretch.now) - counter(stretch.before) if stretch.before else 0.0
    return max(0.0, min(grown, MAX_FIGURE))


def _samples_s(window_s: float, stretches: Sequence[Stretch]) -> float | None:
    """Return the ranks' training samples a second; None if no rank has ever reported any."""
    if window_s <= 0 or not any(one.before and one.now.samples for one in stretches):
        return None
    return _rounded(sum(_grown(one, lambda record: record.samples) for one in stretches) / window_s)


def _data_wait(stretches: Sequence[Stretch]) -> float | None:
    """Return the share of the iteration time spent in the loader; None without an iteration."""
    busy = sum(_grown(one, lambda record: record.busy_s) for one in stretches)
    waited = sum(_grown(one, lambda record: record.waited_s) for one in stretches)
    return round(min(waited / busy, 1.0), 4) if busy > 0 else None


def _memory(records: Sequence[PageRecord]) -> tuple[str, float | None, float | None]:
    """Return kind, low and peak in MB of the rank that has used most."""
    counted = [record for record in records if record.memory_kind in KINDS]
    if not counted:
        return "", None, None
    most = max(counted, key=lambda record: (record.memory_kind, record.memory_peak))
    return KINDS[most.memory_kind], _rounded(most.memory_low / MB), _rounded(most.memory_peak / MB)


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value that is not None."""
    return max((min(value, MAX_FIGURE) for value in values if value is not None), default=None)


def _rounded(value: float | None) -> float | None:
    """Return a figure for a report, three digits after the point."""
    return None if value is None else round(min(value, MAX_FIGURE), 3)
