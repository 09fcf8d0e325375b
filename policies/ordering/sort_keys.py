"""Sort keys of several orderings: arrival, attained service, progress."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from cadenza.policies.core.model import Job, JobKey, Progress

arrival: Callable[[Job], tuple[float, JobKey]] = attrgetter("submit_s", "key")
"""The order of arrival, which breaks every tie: submission, then job id."""


def progress_of(job: Job) -> Progress:
    """Return the progress of a job; a job without a record has not run and its work is unknown."""
    return job.progress if job.progress is not None else Progress(at_s=job.submit_s)


def attained_service(job: Job, now_s: float) -> float:
    """Return a job's attained GPU service: GPUs times the seconds that it has had them (Tiresias, NSDI'19 §3)."""
    return progress_of(job).attained(now_s) * job.gpus


def waited(job: Job, now_s: float) -> float:
    """Return the seconds since a job last ran, or was submitted when it never did; 0 while it runs."""
    progress = progress_of(job)
    if progress.running:
        return 0.0
    since = progress.ran_s if progress.ran_s is not None else job.submit_s
    return max(now_s - since, 0.0)
