"""Finish-time fairness as Synergy's published simulator has it: the least behind goes first."""

from __future__ import annotations

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival, progress_of, work_left


def ftf_coded(queue: Queue) -> Ranking:
    """Order by (now - arrival + remaining) / (duration at the proportional share), ascending; unknown work last.

    Remaining time is that of ``srtf``.
    """

    def ratio(job: Job) -> tuple[float, tuple[float, JobKey]]:
        total = progress_of(job).total_s
        if total is None:
            return float("inf"), arrival(job)
        left = work_left(job, queue.now_s, profiled=queue.profiled)
        return (queue.now_s - job.submit_s + left) / max(total, 1e-9), arrival(job)

    # Themis serves the largest ratio first. The least is kept here to compare with published figures.
    return Ranking(tuple(sorted(queue.jobs, key=ratio)))
