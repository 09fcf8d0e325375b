"""Observations of a running job's speed at its CPUs, each over a window in which nothing else changed (pure).

A window consists of batches of iterations, each long enough for the data that loaders read ahead. It begins anew when
the job's CPUs, memory or GPUs change, and rests while the job is away from its GPUs, stops for a checkpoint or shares
them; iteration times leave out the time in between (see ``Pace``). Time after a start, a turn or a tune is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import median, stdev
from typing import NamedTuple

from cadenza.policies.core.model import Gpu, Job, JobKey, StepRate
from cadenza.policies.core.profile import MB_PER_GB

SETTLE_S = 20.0
"""Time after a change until batches that were read ahead with other CPUs are used up."""
MIN_BATCH_S = 3.0
"""Least time of a batch's iterations together."""
MIN_BATCH_ITERATIONS = 8
READ_AHEAD_BATCHES = 2
"""Batches that a loader reads ahead for each worker; it may have one worker for each CPU."""
MIN_BATCHES, MAX_BATCHES = 4, 12
"""Batches of a window, which ends between them as soon as its mean is precise enough."""
TARGET_ERROR = 0.02
"""Standard error of a window's mean, relative to it, at which the window ends."""
OUTLIER_RATIO = 1.5
"""Batches that take this many times the median are left out: checkpoints or evaluations of the script."""


class Setting(NamedTuple):
    """The resources that must stay the same within a window."""

    job: JobKey
    gpus: tuple[Gpu, ...]
    cpus: float
    """CPUs for each GPU, on the node with fewest."""
    memory_gb: float
    """Memory for each GPU, on the node with least."""


class Observation(NamedTuple):
    """The mean iteration time of one window; ``error`` is its standard error, relative to it."""

    setting: Setting
    iteration_s: float
    error: float


class Batch(NamedTuple):
    """Some iterations in a row, and their mean time."""

    iterations: int
    iteration_s: float

    @property
    def busy_s(self) -> float:
        """Return the time of its iterations together."""
        return self.iterations * self.iteration_s


@dataclass(frozen=True, slots=True)
class Window:
    """One job's window so far; its setting began at ``since_s``, seconds since the epoch."""

    setting: Setting
    since_s: float
    mark: StepRate | None = None
    """The pace at the start of the batch under way."""
    batches: tuple[Batch, ...] = ()


def watch(window: Window | None, job: Job, now_s: float) -> tuple[Window | None, Observation | None]:
    """Return a job's window as of now, and its observation when the window is complete."""
    setting, lease = setting_of(job), job.lease
    pace = lease.pace if lease is not None and lease.state == "held" else None
    if setting is None or pace is None or pace.co_runners or not pace.iterations:  # it is away, stops or shares them
        return replace(window, mark=None) if window is not None else None, None
    if window is None or window.setting != setting:
        return Window(setting, now_s), None
    mark = window.mark
    if min(now_s - window.since_s, pace.window_s) < SETTLE_S:
        return replace(window, mark=None), None
    if mark is None or pace.window_s < mark.window_s or pace.iterations < mark.iterations:
        return replace(window, mark=pace), None
    count = pace.iterations - mark.iterations
    spent_s = pace.iterations * pace.iteration_s - mark.iterations * mark.iteration_s
    batch = Batch(count, spent_s / count) if count and spent_s > 0 else Batch(0, 0.0)
    if (
        batch.iterations < max(MIN_BATCH_ITERATIONS, READ_AHEAD_BATCHES * ceil(setting.cpus * job.gpus))
        or batch.busy_s < MIN_BATCH_S
    ):
        return window, None
    window = replace(window, mark=pace, batches=(*window.batches, batch))
    observation = _observation(window)
    return (window, None) if observation is None else (replace(window, batches=()), observation)


def setting_of(job: Job) -> Setting | None:
    """Return a running job's resources for each GPU: as its agents have set them, else as it was placed."""
    lease, placement = job.lease, job.placement
    if lease is None or job.state != "RUNNING" or not placement or any(share.gpus < 1 for share in placement):
        return None
    placed = min(share.cpus / share.gpus for share in placement)
    cpus = placed if lease.cpus_per_gpu is None else lease.cpus_per_gpu
    memory_gb = min(share.memory_mb / share.gpus for share in placement) / MB_PER_GB
    return Setting(job.key, lease.gpus, cpus, memory_gb) if cpus > 0 else None


def _observation(window: Window) -> Observation | None:
    """Return the window's mean once it is precise enough or has the most batches."""
    batches = window.batches
    if len(batches) < MIN_BATCHES:
        return None
    middle = median(batch.iteration_s for batch in batches)
    kept = [batch for batch in batches if batch.iteration_s <= OUTLIER_RATIO * middle]
    mean = sum(batch.busy_s for batch in kept) / sum(batch.iterations for batch in kept)
    spread = stdev(batch.iteration_s for batch in kept) if len(kept) > 1 else mean
    error = spread / mean / sqrt(len(kept))
    precise = error <= TARGET_ERROR or len(batches) >= MAX_BATCHES
    return Observation(window.setting, mean, error) if precise else None
