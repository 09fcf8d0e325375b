"""Worst finish-time fairness first (Themis, NSDI'20 §3)."""

from __future__ import annotations

from cadenza.policies.core.model import Job
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival, first_submit_s, progress_of

UNKNOWN_S = 3600.0
"""Smallest work assumed of a job with unknown work, seconds."""


def ftf(queue: Queue) -> Ranking:
    """Order by finish-time fairness rho, the worst, which is the largest, first; see ``rho``."""
    crowd = contention(queue)
    return Ranking(tuple(sorted(queue.jobs, key=lambda job: (-rho(job, queue.now_s, crowd), arrival(job)))))


def contention(queue: Queue) -> float:
    """Return N: the GPUs that all jobs ask for over the GPUs there are, at least 1.

    Themis averages N over a job's life; a policy without memory has only the present, so N is the present one.
    """
    wanted = sum(job.gpus for job in queue.jobs)
    return max(wanted / max(sum(queue.gpus.values()), 1), 1.0)


def rho(job: Job, now_s: float, contention: float) -> float:
    """Return rho = T_shared / T_ideal, a ratio of seconds; fair is 1, more is worse than fair.

    ``T_shared = (now - submitted) + remaining * N`` is when the job will have finished if the cluster stays as crowded
    as now, ``T_ideal = total * N`` how long it takes alone on a 1/N share of the cluster. Work is in seconds at the
    proportional share, so a job that was given more than that has less remaining and a smaller rho. A job of unknown
    work counts as half done, and as ``UNKNOWN_S`` of work at least.
    """
    progress = progress_of(job)
    done = progress.done(now_s)
    total = progress.total_s if progress.total_s is not None else max(2 * done, UNKNOWN_S)
    remaining = max(total - done, 0.0)
    shared = max(now_s - first_submit_s(job), 0.0) + remaining * contention
    return shared / max(total * contention, 1e-9)
