"""A bound on waiting, over any ordering."""

from __future__ import annotations

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.ordering.ranking import Queue, Ranking
from cadenza.policies.ordering.sort_keys import arrival, waited


def starving_first(ranking: Ranking, queue: Queue, bound_s: float) -> Ranking:
    """Return the ranking with jobs that have waited for more than ``bound_s`` seconds first, longest wait first.

    A wait counts from when the job last ran, or from its submission; a running job never starves. The others keep
    their order, and chosen GPU types stay (Synergy's simulator does this with 1000 h, except for FIFO).
    """

    def longest(job: Job) -> tuple[float, tuple[float, JobKey]]:
        return -waited(job, queue.now_s), arrival(job)

    starving = sorted((job for job in ranking.jobs if waited(job, queue.now_s) > bound_s), key=longest)
    if not starving:
        return ranking
    keys = {job.key for job in starving}
    others = (job for job in ranking.jobs if job.key not in keys)
    return Ranking((*starving, *others), ranking.gpu_type)
