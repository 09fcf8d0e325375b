"""One point: wait out the start-up, take windows of telemetry until the mean is known well enough, or time is over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import psutil  # type: ignore[import-untyped]

from cadenza.profiler.measure.agent_stub import AgentStub
from cadenza.profiler.measure.gpu_use import Watch
from cadenza.profiler.measure.training_command import Run
from cadenza.profiler.model.batch_means import LEAST_WINDOWS, Window, estimate, settled
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import PageRecord
from cadenza.sidecar.agent.telemetry.gpus import GpuDevice
from cadenza.sidecar.clock import Clock

LOOK_S = 0.05
PREFETCH = 2
"""Batches that each loader worker reads ahead: the default of torch's DataLoader."""
SPARE = 0.1
"""CPUs that others may use without disturbing a measurement, besides those that the point leaves over."""
STOLEN = 0.05
"""Part of the CPU time asked for that a hypervisor may give to others without disturbing a measurement."""


class Rule(msgspec.Struct, frozen=True):
    """When a point is done; times in seconds."""

    within: float = 0.02
    """Half of the 95 % interval, relative to the mean."""
    warm_up_s: float = 1.0
    warm_up_steps: int = 10
    window_s: float = 0.4
    window_steps: int = 4
    most_s: float = 60.0
    start_s: float = 300.0
    """Time limit of the command's start-up, until its first steps."""


class Point(msgspec.Struct, frozen=True):
    """One measured point: all CPUs of the job on this node, seconds a step, and the load of the machine."""

    cpus: float
    iteration_s: float
    half_s: float
    steps: int
    spent_s: float
    cpu_s: float
    """CPU time of all its processes, a step."""
    samples: float = 0.0
    """Training samples a step, all ranks; 0 where the script does not say."""
    waited: float = 0.0
    """Share of a step in which the slowest rank waited for its loader."""
    settled: bool = True
    others: float = 0.0
    """CPUs that other processes used on average."""
    stolen: float = 0.0
    """Part of the CPU time asked for that a hypervisor gave to others, on average."""
    memory_gb: float = 0.0
    ranks: int = 1
    turn: int = 0
    """Number of the visit, where points are measured in turns."""
    gpu_peak_gb: float | None = None
    gpu_low_gb: float | None = None
    gpu_utilization: float | None = None


class Ended(Exception):  # noqa: N818 (not an error: a script may be short)
    """The command has come to its end before the point was done."""


@dataclass
class Probe:
    """Measures one running command."""

    stub: AgentStub
    run: Run
    clock: Clock
    rule: Rule
    devices: tuple[GpuDevice, ...] = ()
    alone: bool = True
    """True if other processes disturb; False where a second command is meant to run."""
    cache_mb: int | None = None
    """Cache size announced to the ranks; None: none is announced."""
    read_ahead: int = 0
    """The most batches that a rank may hold from earlier points."""

    def ready(self) -> None:
        """Wait until every rank has made its first steps; raise CommandFailedError or Ended when that fails."""
        limit = self.clock.monotonic() + self.rule.start_s
        while not (self.stub.complete() and self._least(self.stub.records()) >= self.rule.warm_up_steps):
            self._wait(limit, "no rank attached and made its first steps")

    def point(self, cpus: float) -> Point:
        """Return the time of a step with so many CPUs."""
        began = self.clock.monotonic()
        self.run.give(cpus)
        self.stub.tune(cpus, self.cache_mb)
        # 1. Let pass what belongs to the CPUs before: batches read ahead, caches, frequencies.
        self.read_ahead = max(self.read_ahead, self._ahead(cpus))
        count = self.rule.warm_up_steps + self.read_ahead
        limit = began + max(self.rule.most_s, self.rule.start_s)
        target = self._least(self.stub.records()) + count
        while self.clock.monotonic() < began + self.rule.warm_up_s or self._least(self.stub.records()) < target:
            self._wait(limit, f"no {count} steps within {self.rule.start_s:g} s")
        # 2. Take windows, with the counters of ranks, processes and GPUs before and after.
        watch = Watch(self.devices)
        first, cpu_s = self.stub.records(), self.run.cpu_s()
        windows = self._windows(cpus, began, watch)
        last, used = self.stub.records(), self.run.cpu_s() - cpu_s
        steps = max(1, self._least(last) - self._least(first))
        # 3. Estimate from the windows without disturbance, where they are enough.
        calm = [window for window in windows if not disturbed(window, cpus, alone=self.alone)]
        clean = settled(calm, self.rule.within)
        on_gpu = [record for record in last.values() if record.memory_kind == wire.MEMORY_GPU]
        found = estimate(calm if clean or len(calm) >= LEAST_WINDOWS else windows)
        return Point(
            cpus=cpus,
            iteration_s=found.mean_s,
            half_s=found.half_s,
            steps=found.steps,
            spent_s=self.clock.monotonic() - began,
            cpu_s=used / steps,
            samples=sum(last[pid].samples - first[pid].samples for pid in last if pid in first) / steps,
            waited=_waited(first, last),
            settled=clean,
            others=sum(window.others for window in windows) / len(windows),
            stolen=sum(window.stolen for window in windows) / len(windows),
            memory_gb=self.run.memory_gb(),
            ranks=len(last),
            gpu_peak_gb=max((record.memory_peak / 2**30 for record in on_gpu), default=None),
            gpu_low_gb=max((record.memory_low / 2**30 for record in on_gpu), default=None),
            gpu_utilization=watch.utilization,
        )

    def _ahead(self, cpus: float) -> int:
        """Return the batches that a rank with a worker for each of its CPUs reads ahead."""
        return PREFETCH * math.ceil(cpus / max(1, len(self.stub.ranks)))

    def _windows(self, cpus: float, began: float, watch: Watch) -> list[Window]:
        """Take windows until those without disturbance say enough, or the time is over."""
        windows: list[Window] = []
        calm: list[Window] = []
        while not settled(calm, self.rule.within):
            late = self.clock.monotonic() - began > self.rule.most_s
            if late and len(windows) >= 2:  # noqa: PLR2004 (an interval needs two)
                break
            windows.append(self._window(max(self.rule.window_steps, self._ahead(cpus))))
            watch.look()
            if not disturbed(windows[-1], cpus, alone=self.alone):
                calm.append(windows[-1])
        return windows

    def _window(self, steps: int) -> Window:
        """Return the window of the slowest rank in the next stretch of time.

        Workers that started together deliver together: ``steps`` should cover as many batches as they read ahead.
        """
        began = self.clock.monotonic()
        before, ours, spent = self.stub.records(), self.run.cpu_s(), _spent()
        limit = began + self.rule.start_s
        while True:
            self._wait(limit, f"no {steps} steps within {self.rule.start_s:g} s")
            now = self.clock.monotonic()
            after = self.stub.records()
            if after.keys() != before.keys():  # a rank was writing just then, or has come or gone: begin anew
                began, before, ours, spent = now, after, self.run.cpu_s(), _spent()
                continue
            if now - began >= self.rule.window_s and self._least(after) - self._least(before) >= steps:
                break
        busy_s, stolen_s = (later - earlier for later, earlier in zip(_spent(), spent, strict=True))
        others = (busy_s - (self.run.cpu_s() - ours)) / (now - began)
        stolen = stolen_s / (busy_s + stolen_s) if stolen_s > 0 else 0.0
        return slowest(before, after)._replace(others=max(0.0, others), stolen=stolen)

    def _wait(self, limit: float, what: str) -> None:
        """Serve the socket for a moment; raise when the command has ended or the time is over."""
        self.stub.wait(LOOK_S)
        code = self.run.code
        if code == 0:
            raise Ended
        if code is not None:
            raise self.run.failure(f"exit code {code}" if code > 0 else f"killed by signal {-code}")
        if self.clock.monotonic() > limit:
            raise self.run.failure(what)

    @staticmethod
    def _least(records: Mapping[int, PageRecord]) -> int:
        """Return the training steps of the rank that has made fewest."""
        return min((record.iterations for record in records.values()), default=0)


def disturbed(window: Window, cpus: float, *, alone: bool) -> bool:
    """Return whether other processes, or a hypervisor's other machines, took CPUs that the point needs.

    ``alone``: no other command is meant to run at the same time.
    """
    crowded = alone and window.others > (psutil.cpu_count() or 1) - cpus + SPARE
    return crowded or window.stolen > STOLEN


def slowest(before: Mapping[int, PageRecord], after: Mapping[int, PageRecord]) -> Window:
    """Return the window of the rank with the longest mean step; ranks of one job wait for each other."""
    windows = [
        Window(after[pid].busy_s - old.busy_s, after[pid].iterations - old.iterations)
        for pid, old in before.items()
        if pid in after and after[pid].iterations > old.iterations
    ]
    return max(windows, key=lambda window: window.seconds / window.steps)


def _waited(first: Mapping[int, PageRecord], last: Mapping[int, PageRecord]) -> float:
    """Return the share of its time that the rank which waited least was blocked in its loader."""
    shares = [
        (last[pid].waited_s - old.waited_s) / (last[pid].busy_s - old.busy_s)
        for pid, old in first.items()
        if pid in last and last[pid].busy_s > old.busy_s
    ]
    return min(shares, default=0.0)


def _spent() -> tuple[float, float]:
    """Return the CPU time that the machine has spent on anything, and what a hypervisor gave to others, seconds."""
    times = psutil.cpu_times()
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq
    return float(busy_s), float(getattr(times, "steal", 0.0))
