"""Measurement of packs: the jobs' speed together against the speed of each alone (Gandiva, OSDI'18, §4).

The throughput of a pack is the sum of its jobs' speeds, each relative to its own alone; that of turns is 1. An
iteration time counts once it was measured over one window and is known well enough for the margin; after three windows
it counts as it is, so that a pair which loses is found by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cadenza.policies.core.decision import Alone, SharingMemory
from cadenza.policies.core.model import Job, JobKey, Lease, StepRate
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.core.text import job_names
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings

TURNS_THROUGHPUT = 1.0
"""Throughput of jobs that take turns, each relative to its own alone."""
MAX_WINDOWS = 3
"""After so many windows a measurement counts however noisy it is."""
MIN_ITERATIONS = 10
"""Fewest iterations of a mean."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a measurement counts; seconds."""

    window_s: float
    margin: float

    @classmethod
    def under(cls, sharing: SharingSettings, gandiva: GandivaSettings) -> Rule:
        """Return the rule of these settings: three windows have room in a slice."""
        return cls(max(min(gandiva.measure_s, sharing.slice_s / MAX_WINDOWS), sharing.min_run_s), gandiva.pack_margin)

    def counts(self, pace: StepRate) -> bool:
        """Return True if the mean is reliable: its error is below half the margin, or the measuring time is over."""
        if pace.iterations < MIN_ITERATIONS or pace.window_s < self.window_s:
            return False
        return pace.error <= self.margin / 2 or self.waited(pace)

    def waited(self, pace: StepRate) -> bool:
        """Return True if the measuring time is over."""
        return pace.window_s >= MAX_WINDOWS * self.window_s

    def together_s(self, pace: StepRate) -> float | None:
        """Return a packed job's iteration time, or None as long as it may not be judged.

        One that has come to next to no iteration in all that time is slow: it counts as if one ended now.
        """
        if self.counts(pace):
            return pace.iteration_s
        return max(pace.iteration_s, pace.window_s / (pace.iterations + 1)) if self.waited(pace) else None

    def pays_off(self, speed: float) -> bool:
        """Return True if a pack of this throughput is better than turns."""
        return speed > TURNS_THROUGHPUT + self.margin


# --- Alone ---------------------------------------------------------------------------------------------


def alone(jobs: Mapping[JobKey, Job], memory: SharingMemory, rule: Rule) -> dict[JobKey, Alone]:
    """Return how each job ran when it last had its GPUs alone, as far as that was measured."""
    rows = {row.job: row for row in memory.alone if row.job in jobs}
    for key, job in jobs.items():
        lease = job.lease
        if lease is not None and lease.pace is not None and not lease.pace.co_runners and rule.counts(lease.pace):
            rows[key] = _row(key, lease, lease.pace, rows.get(key))
    return rows


def _row(key: JobKey, lease: Lease, pace: StepRate, before: Alone | None) -> Alone:
    """Return a new row; what is measured of a running job only is kept while it does not run."""
    old = before or Alone(key, pace.iteration_s)
    use = lease.use if lease.state == "held" else None
    row = old._replace(iteration_s=pace.iteration_s, data_wait=pace.data_wait)
    if use is None:
        return row
    held = (use.gpu_memory_mb or 0.0) / max(len(lease.gpus), 1)
    peak_gb = max(held, use.memory_peak_mb or 0.0, (old.gpu_memory_gb or 0.0) * MB_PER_GB) / MB_PER_GB
    return row._replace(
        busy=old.busy if use.gpu_percent is None else use.gpu_percent / 100,
        cpus=old.cpus if use.cpu_percent is None else use.cpu_percent / 100,
        gpu_memory_gb=peak_gb or None,
    )


# --- Together ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A packed job's iteration time alone, and with all others of its pack; None: not measured yet. Seconds."""

    job: JobKey
    alone_s: float | None
    together_s: float | None

    @property
    def speed(self) -> float | None:
        """Return its speed relative to its own alone."""
        return self.alone_s / self.together_s if self.alone_s and self.together_s else None


@dataclass(frozen=True, slots=True)
class PackMeasurement:
    """Measurements of one pack."""

    members: tuple[Member, ...]

    @property
    def speed(self) -> float | None:
        """Return its throughput over that of turns; None before all are measured."""
        speeds = [member.speed for member in self.members]
        measured = [speed for speed in speeds if speed is not None]
        return sum(measured) if len(measured) == len(speeds) else None

    @property
    def text(self) -> str:
        """Return the measurement for people."""
        if self.speed is None:
            return "what they do together is being measured"
        times = ", ".join(
            f"job {one.job} {_ms(one.together_s)} an iteration, {_ms(one.alone_s)} alone" for one in self.members
        )
        return f"together {self.speed:.0%} of what turns do ({times})"


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1000:.3g} ms"


def evaluate(pack: Sequence[Job], before: Mapping[JobKey, Alone], rule: Rule) -> PackMeasurement:
    """Return the measurements of a pack."""
    keys = {job.key for job in pack}
    return PackMeasurement(
        tuple(
            Member(job.key, row.iteration_s if (row := before.get(job.key)) else None, _together_s(job, keys, rule))
            for job in sorted(pack, key=lambda job: job.key)
        )
    )


def _together_s(job: Job, pack: set[JobKey], rule: Rule) -> float | None:
    """Return a job's iteration time with all others of its pack."""
    pace = job.lease.pace if job.lease is not None else None
    return rule.together_s(pace) if pace is not None and {job.key, *pace.co_runners} == pack else None


def packed_text(key: JobKey, measured: PackMeasurement) -> str:
    """Return a reason for a packed job."""
    others = job_names(member.job for member in measured.members if member.job != key)
    return f"runs with {others}: {measured.text}"
