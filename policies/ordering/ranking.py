"""The input and output of an ordering: the jobs that want GPUs, and their ranking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cadenza.policies.core.model import Job, JobKey


@dataclass(frozen=True, slots=True)
class Queue:
    """The jobs to order, with what orderings may depend on. The order of ``jobs`` means nothing."""

    now_s: float
    jobs: tuple[Job, ...]
    """Pending, running and suspended managed jobs; all have ``progress``."""
    gpus: Mapping[str, int]
    """Usable GPUs by type ("" where a node names none)."""
    profiled: bool = True
    """True if jobs can get more than their proportional share, so that speed-ups count in remaining time."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds that a user (or account) has had, decayed; for fair shares."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of users (or accounts); 1 where none is given."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The order of the jobs."""

    jobs: tuple[Job, ...]
    """Every job of the queue, first to last; total: the queue's order changes nothing."""
    gpu_type: Mapping[JobKey, str] = field(default_factory=dict)
    """GPU type that a job is to run on this round, where the ordering chooses one (Gavel)."""


Order: TypeAlias = Callable[[Queue], Ranking]


def work_left(job: Job, queue: Queue) -> float:
    """Return the seconds a job still needs at the speed it can expect; infinite when its work is unknown.

    A running job goes on at its present speed, a waiting one at its best; at its proportional share where the
    allocation gives no more (Synergy's simulator, SRTF).
    """
    progress = job.progress
    left = progress.remaining(queue.now_s) if progress is not None else None
    if progress is None or left is None:
        return float("inf")
    if not queue.profiled or job.profile is None:
        return left
    speed = progress.speed if progress.running else job.profile.best_speed
    return left / speed if speed > 0 else float("inf")
