"""Finish-time fairness as Synergy's published simulator has it: the least behind goes first."""

from __future__ import annotations

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.ordering.ranking import Queue, Ranking, work_left
from cadenza.policies.ordering.sort_keys import arrival, progress_of


def ftf_coded(queue: Queue) -> Ranking:
    """Order by (now - arrival + remaining) / (duration at the proportional share), ascending; unknown work last.

    Remaining time is that of ``srtf``. Themis serves the largest ratio first; this one is kept to compare with
    published figures.
    """

    def key(job: Job) -> tuple[float, tuple[float, JobKey]]:
        return _ratio(job, queue), arrival(job)

    return Ranking(tuple(sorted(queue.jobs, key=key)))


def _ratio(job: Job, queue: Queue) -> float:
    total = progress_of(job).total_s
    if total is None:
        return float("inf")
    return (queue.now_s - job.submit_s + work_left(job, queue)) / max(total, 1e-9)
