"""When a running job's iteration time says something of its CPUs: windows in which nothing else changed (pure).

A window is made of batches of iterations, each long enough for what loaders read ahead. It begins anew when the job's
CPUs, memory or GPUs change, and rests while the job is away from its GPUs, stops for a checkpoint or shares them;
iteration times leave out the time in between (see ``Pace``). What follows a start, a turn or a tune does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import median, stdev
from typing import NamedTuple

from cadenza.policies.core.model import Gpu, Job, JobKey, Pace
from cadenza.policies.core.profile import MB_PER_GB

SETTLE_S = 20.0
"""After a change, until batches that were read ahead with other CPUs are used up."""
BATCH_S = 3.0
"""Least time of a batch's iterations together."""
BATCH = 8
"""Least iterations of a batch."""
AHEAD = 2
"""Batches that a loader reads ahead for each worker, of which it may have one for each CPU."""
FEWEST, MOST = 4, 12
"""Batches of a window: it ends when their mean is known well enough, or with the most."""
ENOUGH = 0.02
"""Standard error of a window's mean, relative to it, at which the window ends."""
OUTLIER = 1.5
"""Batches that take so many times the median are left out: a checkpoint of the script's own, an evaluation."""


class Setting(NamedTuple):
    """What must stay the same within a window."""

    job: JobKey
    gpus: tuple[Gpu, ...]
    cpus: float
    """For each GPU, where it has fewest."""
    memory_gb: float
    """The same of memory."""


class Sight(NamedTuple):
    """The mean iteration time of one window; ``error`` is its standard error, relative to it."""

    setting: Setting
    iteration_s: float
    error: float


class Batch(NamedTuple):
    """Some iterations in a row, and their mean time."""

    iterations: int
    iteration_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """One job's window so far; ``since_s`` is when its setting began, seconds since the epoch."""

    setting: Setting
    since_s: float
    mark: Pace | None = None
    """The pace at which the batch under way began."""
    batches: tuple[Batch, ...] = ()


def watch(window: Window | None, job: Job, now_s: float) -> tuple[Window | None, Sight | None]:
    """Return a job's window as of now, and what it has shown when it is complete."""
    setting, pace = setting_of(job), _pace(job)
    if setting is None or pace is None:
        return replace(window, mark=None) if window is not None else None, None
    if window is None or window.setting != setting:
        return Window(setting, now_s), None
    mark = window.mark
    if min(now_s - window.since_s, pace.window_s) < SETTLE_S:
        return replace(window, mark=None), None
    if mark is None or pace.window_s < mark.window_s or pace.iterations < mark.iterations:
        return replace(window, mark=pace), None
    batch = _between(mark, pace)
    if batch.iterations < max(BATCH, AHEAD * ceil(setting.cpus * job.gpus)) or _busy_s(batch) < BATCH_S:
        return window, None
    window = replace(window, mark=pace, batches=(*window.batches, batch))
    sight = _sight(window)
    return (window, None) if sight is None else (replace(window, batches=()), sight)


def setting_of(job: Job) -> Setting | None:
    """Return what a running job has for each GPU: as its agents have set it, else as it was placed."""
    lease, placement = job.lease, job.placement
    if lease is None or job.state != "RUNNING" or not placement or any(share.gpus < 1 for share in placement):
        return None
    placed = min(share.cpus / share.gpus for share in placement)
    cpus = placed if lease.cpus_per_gpu is None else lease.cpus_per_gpu
    memory_gb = min(share.memory_mb / share.gpus for share in placement) / MB_PER_GB
    return Setting(job.key, lease.gpus, cpus, memory_gb) if cpus > 0 else None


def _pace(job: Job) -> Pace | None:
    """Return the pace of a job that has its GPUs to itself, None for one that is away, stops or shares them."""
    lease = job.lease
    if lease is None or lease.state != "held" or lease.pace is None or lease.pace.beside:
        return None
    return lease.pace if lease.pace.iterations else None


def _between(mark: Pace, now: Pace) -> Batch:
    count = now.iterations - mark.iterations
    spent_s = now.iterations * now.iteration_s - mark.iterations * mark.iteration_s
    return Batch(count, spent_s / count) if count and spent_s > 0 else Batch(0, 0.0)


def _busy_s(batch: Batch) -> float:
    return batch.iterations * batch.iteration_s


def _sight(window: Window) -> Sight | None:
    """Return the window's mean when it is known well enough, or will not get better."""
    batches = window.batches
    if len(batches) < FEWEST:
        return None
    middle = median(batch.iteration_s for batch in batches)
    kept = [batch for batch in batches if batch.iteration_s <= OUTLIER * middle]
    mean = sum(map(_busy_s, kept)) / sum(batch.iterations for batch in kept)
    spread = stdev(batch.iteration_s for batch in kept) if len(kept) > 1 else mean
    error = spread / mean / sqrt(len(kept))
    return Sight(window.setting, mean, error) if error <= ENOUGH or len(batches) >= MOST else None
