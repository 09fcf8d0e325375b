"""Least attained GPU service first."""

from __future__ import annotations

from cadenza.policies.ordering.ranking import Queue, Ranking, arrival


def las(queue: Queue) -> Ranking:
    """Order by attained GPU seconds, GPUs times time, ascending (Synergy, OSDI'22 §5; Tiresias, NSDI'19 §3)."""
    return Ranking(tuple(sorted(queue.jobs, key=lambda job: (queue.service(job), arrival(job)))))
