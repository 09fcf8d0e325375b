"""The input and output of an ordering, the sort keys that several share, and a bound on waiting over any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cadenza.policies.core.decision import EndedJobs
from cadenza.policies.core.model import Job, JobKey, Progress


def first_submit_s(job: Job) -> float:
    """Return when a job was first submitted, seconds since the epoch."""
    # A requeue sets Slurm's time of submission anew.
    first_s = job.progress.submitted_s if job.progress is not None else None
    return job.submit_s if first_s is None else first_s


def arrival(job: Job) -> tuple[float, JobKey]:
    """Return the key of the order of arrival, which breaks every tie: first submission, then job id."""
    return first_submit_s(job), job.key


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
    ended: EndedJobs = field(default_factory=EndedJobs)
    """For orderings that learn from ended jobs."""

    def attained(self, job: Job) -> float:
        """Return the seconds on its GPUs that a job counts with."""
        return progress_of(job).attained(self.now_s)

    def service(self, job: Job) -> float:
        """Return the attained GPU service that a job counts with, in GPU seconds (Tiresias, NSDI'19 §3)."""
        return self.attained(job) * job.gpus


@dataclass(frozen=True, slots=True)
class Ranking:
    """The order of the jobs."""

    jobs: tuple[Job, ...]
    """Every job of the queue, first to last; total: the queue's order changes nothing."""
    gpu_type: Mapping[JobKey, str] = field(default_factory=dict)
    """GPU type that a job is to run on this round, where the ordering chooses one (Gavel)."""


Order: TypeAlias = Callable[[Queue], Ranking]


def work_left(job: Job, now_s: float, *, profiled: bool = True) -> float:
    """Return the seconds a job still needs at the speed it can expect; infinite when its work is unknown.

    A running job goes on at its present speed, a waiting one at its best; at its proportional share where the
    allocation gives no more (Synergy's simulator, SRTF).
    """
    progress = job.progress
    left = progress.remaining(now_s) if progress is not None else None
    if progress is None or left is None:
        return float("inf")
    if not profiled or job.profile is None:
        return left
    speed = progress.speed if progress.running else job.profile.best_speed
    return left / speed if speed > 0 else float("inf")


def progress_of(job: Job) -> Progress:
    """Return the progress of a job; a job without a record has not run and its work is unknown."""
    return job.progress if job.progress is not None else Progress(at_s=job.submit_s)


def attained_service(job: Job, now_s: float) -> float:
    """Return a job's attained GPU service: GPUs times the seconds that it has had them (Tiresias, NSDI'19 §3)."""
    progress = job.progress
    return (progress_of(job) if progress is None else progress).attained(now_s) * job.gpus


def waited(job: Job, now_s: float) -> float:
    """Return the seconds since a job last ran, or was submitted when it never did; 0 while it runs."""
    progress = progress_of(job)
    if progress.running:
        return 0.0
    since = progress.ran_s if progress.ran_s is not None else first_submit_s(job)
    return max(now_s - since, 0.0)


def starving_first(ranking: Ranking, queue: Queue, bound_s: float) -> Ranking:
    """Return the ranking with jobs that have waited for more than ``bound_s`` seconds first, longest wait first.

    A wait counts from when the job last ran, or from its submission; a running job never starves. The others keep
    their order, and chosen GPU types stay (Synergy's simulator does this with 1000 h, except for FIFO).
    """
    starving = sorted(
        (job for job in ranking.jobs if waited(job, queue.now_s) > bound_s),
        key=lambda job: (-waited(job, queue.now_s), arrival(job)),
    )
    if not starving:
        return ranking
    keys = {job.key for job in starving}
    others = (job for job in ranking.jobs if job.key not in keys)
    return Ranking((*starving, *others), ranking.gpu_type)
