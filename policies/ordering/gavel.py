"""Max-min throughput over heterogeneous GPU types, by the time received (Gavel, OSDI'20 §4-5)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np

from cadenza.policies.core.model import Job
from cadenza.policies.core.profile import Profile
from cadenza.policies.ordering.max_min_lp import Floats, time_shares
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival, first_submit_s, progress_of

MAX_CLASSES = 256
"""Above so many classes of jobs, relative speeds are rounded so that some become equal."""
ROUNDING = (0.02, 0.1, 0.5)
"""To powers of two of multiples of this, tried in turn."""
LEAST_SHARE = 1e-6
"""Smaller shares of time are the solver's noise."""
LEAST_TIME = 1e-9
"""Share of its life that a job counts as having had when it has had nothing."""

Class = tuple[tuple[float, ...], int]
"""Relative speed on each GPU type, and GPUs."""


def gavel(queue: Queue) -> Ranking:
    """Order by X / (share of its life that the job has had the type), and choose a GPU type for each job that runs.

    X, the share of time that a job is to have on a type, comes from ``max_min_lp.time_shares`` over classes of jobs
    with equal speeds and GPUs. Then, as in Gavel's round mechanism (§5), the pairs (job, type) are taken by priority
    while the type has GPUs left; GPUs that no job with X > 0 can use go to the next jobs that fit, on their fastest
    type. Jobs without a choice come last, the highest priority first. With one GPU type this is max-min fairness of
    time: for jobs that were submitted together, the order of LAS.

    Raises:
        SolverError: the linear program has no optimum, which cannot be.

    """
    jobs = sorted(queue.jobs, key=arrival)
    types = tuple(sorted(name for name, gpus in queue.gpus.items() if gpus > 0))
    if not jobs or not types:
        return Ranking(tuple(jobs))
    capacity = np.array([float(queue.gpus[name]) for name in types])
    # 1. The share of time that each job is to have on each type, from that of its class.
    classes, member = _classify(jobs, types)
    shares = _shares(classes, member, capacity)[member]
    # 2. The pairs (job, type) with a share, highest priority first; ties: larger share, earlier arrival, type.
    priority = shares / np.maximum(_received(jobs, types, queue.now_s), LEAST_TIME)
    job, kind = np.nonzero(shares)
    order = np.lexsort((kind, job, -shares[job, kind], -priority[job, kind]))
    left = [queue.gpus[name] for name in types]
    chosen = _assign(jobs, list(zip(job[order].tolist(), kind[order].tolist(), strict=True)), left)
    # 3. The jobs without a choice, by their highest priority, then arrival.
    queued = np.argsort(-priority.max(axis=1), kind="stable").tolist()
    waiting = [index for index in queued if index not in chosen]
    chosen |= _use_up(jobs, waiting, [classes[number][0] for number in member], left)
    rest = (index for index in waiting if index not in chosen)
    ranked = tuple(jobs[index] for index in (*chosen, *rest))
    return Ranking(ranked, {jobs[index].key: types[kind] for index, kind in chosen.items()})


# --- classes and their shares of time ------------------------------------------------------------------


def _classify(jobs: Sequence[Job], types: Sequence[str]) -> tuple[list[Class], list[int]]:
    """Return the classes in a fixed order and the class of each job."""
    exact = _speeds(jobs, types)
    keys = [(exact[job.profile], job.gpus) for job in jobs]
    for step in ROUNDING:
        if len(set(keys)) <= MAX_CLASSES:
            break
        rounded = {
            profile: tuple(2.0 ** (round(log2(max(speed, 1e-9)) / step) * step) for speed in speeds)
            for profile, speeds in exact.items()
        }
        keys = [(rounded[job.profile], job.gpus) for job in jobs]
    classes = sorted(set(keys))
    number = {key: index for index, key in enumerate(classes)}
    return classes, [number[key] for key in keys]


def _speeds(jobs: Sequence[Job], types: Sequence[str]) -> dict[Profile | None, tuple[float, ...]]:
    """Return each profile's speed on each GPU type, relative to the mean; 1 everywhere without a profile."""
    found: dict[Profile | None, tuple[float, ...]] = {None: (1.0,) * len(types)}
    for job in jobs:
        if job.profile is not None and job.profile not in found:
            speeds = [job.profile.relative(name) for name in types]
            mean = sum(speeds) / len(speeds)
            # Only ratios count, and equal ratios must be equal numbers.
            found[job.profile] = tuple(round(speed / mean, 9) for speed in speeds)
    return found


def _shares(classes: Sequence[Class], member: Sequence[int], capacity: Floats) -> Floats:
    """Return X[class, type]; noise is 0."""
    speeds = np.array([speeds for speeds, _ in classes])
    gpus = np.array([float(gpus) for _, gpus in classes])
    shares = time_shares(speeds, gpus, np.bincount(member, minlength=len(classes)).astype(float), capacity)
    return np.where(shares < LEAST_SHARE, 0.0, shares)


# --- the round mechanism -------------------------------------------------------------------------------


def _received(jobs: Sequence[Job], types: Sequence[str], now_s: float) -> Floats:
    """Return [job, type]: the share of its life, 0 to 1, that a job has had GPUs of the type."""
    received = np.zeros((len(jobs), len(types)))
    for index, job in enumerate(jobs):
        progress = progress_of(job)
        if progress.running or progress.attained_s:
            life = max(now_s - first_submit_s(job), 1.0)
            received[index] = [progress.attained_by_type(name, now_s) / life for name in types]
    return received


def _assign(jobs: Sequence[Job], order: Sequence[tuple[int, int]], left: list[int]) -> dict[int, int]:
    """Return the type of each job that runs, in the order in which they are chosen, and take it from ``left``."""
    chosen: dict[int, int] = {}
    for index, kind in order:
        if index not in chosen and jobs[index].gpus <= left[kind]:
            chosen[index] = kind
            left[kind] -= jobs[index].gpus
            if not any(left):
                break
    return chosen


def _use_up(
    jobs: Sequence[Job], waiting: Sequence[int], speeds: Sequence[tuple[float, ...]], left: list[int]
) -> dict[int, int]:
    """Return the fastest type with room for each waiting job that still fits, and take it from ``left``."""
    chosen: dict[int, int] = {}
    for index in waiting:
        if not any(left):
            break
        room = [(-speed, kind) for kind, speed in enumerate(speeds[index]) if left[kind] >= jobs[index].gpus]
        if room:
            chosen[index] = min(room)[1]
            left[chosen[index]] -= jobs[index].gpus
    return chosen
