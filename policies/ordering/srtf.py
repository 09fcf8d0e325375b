"""Shortest remaining time first."""

from __future__ import annotations

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival, work_left


def srtf(queue: Queue) -> Ranking:
    """Order by the seconds that a job still needs at the speed it can expect; unknown work last (Synergy §5)."""

    def key(job: Job) -> tuple[float, tuple[float, JobKey]]:
        return work_left(job, queue.now_s, profiled=queue.profiled), arrival(job)

    return Ranking(tuple(sorted(queue.jobs, key=key)))
