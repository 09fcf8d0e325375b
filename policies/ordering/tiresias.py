"""Two-dimensional least attained service in discretized queues (Tiresias, NSDI'19 §3)."""

from __future__ import annotations

from bisect import bisect_right

from cadenza.policies.core.model import Job
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival, waited

THRESHOLDS = (3250.0, 7200.0)
"""Attained GPU seconds at which a job leaves the first and the second of three queues: those of Tiresias' published
simulator."""
PROMOTE_KNOB = 8.0
"""A job that has waited this many times longer than it has run goes back to the first queue. The paper leaves the
factor to the operator, and its simulator ships with promotion off."""


def tiresias(queue: Queue) -> Ranking:
    """Order by queue, and first come, first served inside a queue."""
    return Ranking(tuple(sorted(queue.jobs, key=lambda job: (level(job, queue), arrival(job)))))


def level(job: Job, queue: Queue) -> int:
    """Return a job's queue, 0 first."""
    found = bisect_right(THRESHOLDS, queue.service(job))
    # Tiresias sets the times of a promoted job back to zero. A policy without memory cannot: the job stays in the first
    # queue until it runs, and its next promotion takes as long a wait again.
    promoted = found and waited(job, queue.now_s) > PROMOTE_KNOB * queue.attained(job)
    return 0 if promoted else found
