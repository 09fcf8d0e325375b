"""Least attained service in levels of factor four: first come, first served within a level."""

from __future__ import annotations

from bisect import bisect_right
from math import inf

from cadenza.policies.core.model import Job
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival

THRESHOLDS = (600.0, 3_600.0, 14_400.0, 57_600.0, 230_400.0, 921_600.0, 3_686_400.0)
"""Attained GPU seconds at which a job leaves each level but the last.

The first level is short, so that each job soon has its first slice. Tiresias (NSDI'19, §3) has two thresholds; seven of
a factor of about four keep equals from sharing to the end, and long jobs from delaying short ones: the last is 1,024
GPU hours, for of two jobs above it the first submitted one runs to its end.
"""


def levels(queue: Queue) -> Ranking:
    """Order by level, and within a level by submission, then job id: its jobs run one after the other."""
    return Ranking(tuple(sorted(queue.jobs, key=lambda job: (level_of(queue.service(job)), arrival(job)))))


def level_of(service_s: float) -> int:
    """Return the level of a job with this attained service in GPU seconds, 0 first."""
    return bisect_right(THRESHOLDS, service_s)


def leaves_level_s(job: Job, now_s: float) -> float:
    """Return the time at which a running job leaves its level; infinite for a job that waits, and in the last level.

    Seconds, on the clock of ``now_s``.
    """
    progress = job.progress
    if progress is None or not progress.running or not job.gpus:
        return inf
    service_s = progress.attained(now_s) * job.gpus
    reached = level_of(service_s)
    return inf if reached == len(THRESHOLDS) else now_s + (THRESHOLDS[reached] - service_s) / job.gpus
