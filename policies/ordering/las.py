"""Least attained GPU service first."""

from __future__ import annotations

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.ordering.ranking import Queue, Ranking
from cadenza.policies.ordering.sort_keys import arrival, attained_service


def las(queue: Queue) -> Ranking:
    """Order by attained GPU seconds, GPUs times time, ascending (Synergy, OSDI'22 §5; Tiresias, NSDI'19 §3)."""

    def key(job: Job) -> tuple[float, tuple[float, JobKey]]:
        return attained_service(job, queue.now_s), arrival(job)

    return Ranking(tuple(sorted(queue.jobs, key=key)))
