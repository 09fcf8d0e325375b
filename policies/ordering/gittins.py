"""Gittins index over attained service, learned from the site's ended jobs (Gittins 1979; Tiresias, NSDI'19 §3.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, expm1

from cadenza.policies.core.decision import EndedJobs, Memory
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.policies.ordering.levels import levels
from cadenza.policies.ordering.ranking import Queue, Ranking, arrival, attained_service

EDGES = tuple(600.0 * 1.5**number for number in range(24))
"""Attained GPU seconds that part the bands, from 10 GPU minutes to 1,900 GPU hours. Jobs of a band have the same index.

The first band is the first level of *levels*, so that each job soon has its first slice.
"""
BANDS = len(EDGES) + 1
LEAST_ENDED = 5_000
"""Ended jobs from which the index is used.

With 500 the few long jobs among them say too little: on samples of the Philly trace the mean completion time is between
0.3 % shorter and 2.3 % longer than that of *levels* (docs/measurements).
"""
MOST_ENDED = 50_000
"""Ended jobs at which all counts are halved: what the site ran long ago counts less and less."""


def gittins(queue: Queue) -> Ranking:
    """Order by the index of each job's band, highest first, and by arrival where it is equal.

    Until ``LEAST_ENDED`` jobs have ended, the order is that of *levels*.
    """
    ended = queue.ended
    if sum(ended.count) < LEAST_ENDED:
        return levels(queue)
    # With the service of ended jobs alone the long ones would be missing.
    live_s = service_by_band([service_s for _, service_s in ended.live])
    index = indices(ended.count, [sum(pair) for pair in zip(ended.service_s, live_s, strict=True)])
    keyed = [(-index[band_of(queue.service(job))], arrival(job), job) for job in queue.jobs]
    return Ranking(tuple(job for *_, job in sorted(keyed, key=lambda row: row[:2])))


def band_of(service_s: float) -> int:
    """Return the band of a job with this attained service in GPU seconds, 0 first."""
    return bisect_right(EDGES, service_s)


def indices(count: Sequence[float], service_s: Sequence[float]) -> list[float]:
    """Return the Gittins index of each band in ends a GPU second.

    It is the largest ratio, over all later bands at whose end one could stop, of the chance that the job ends until
    then to the service that it takes on average. Within a band a job ends at a constant rate: ``count``, the jobs that
    ended there, over ``service_s``, the GPU seconds that all jobs, live ones included, have spent there.
    """
    rates = [ends / spent_s if spent_s > 0 else 0.0 for ends, spent_s in zip(count, service_s, strict=True)]
    bounds = (0.0, *EDGES, 2 * EDGES[-1])
    widths = [end_s - begin_s for begin_s, end_s in pairwise(bounds)]
    found = []
    for band in range(BANDS):
        alive, invested_s, best = 1.0, 0.0, 0.0
        for rate, width_s in zip(rates[band:], widths[band:], strict=True):
            invested_s += alive * (-expm1(-rate * width_s) / rate if rate > 0 else width_s)
            alive *= exp(-rate * width_s)
            best = max(best, (1.0 - alive) / invested_s)
        found.append(best)
    return found


def with_ended(memory: Memory, snapshot: ClusterSnapshot) -> Memory:
    """Return the memory with the jobs that have ended since the last round."""
    ended, now_s, live = memory.ended, snapshot.time_s, snapshot.by_id
    # 1. The service of the jobs that are here; a job whose record is lost keeps what it had.
    served = dict(ended.live)
    served.update(
        (job.key.id, attained_service(job, now_s)) for job in live.values() if job.opted_in and job.progress is not None
    )
    # 2. Those that are gone, by band. A job that was requeued keeps its id and goes on; one that never had GPUs teaches
    #    nothing.
    gone = [service_s for number, service_s in served.items() if number not in live and service_s > 0]
    count, spent_s = list(ended.count) or [0.0] * BANDS, list(ended.service_s) or [0.0] * BANDS
    for service_s in gone:
        count[band_of(service_s)] += 1
    spent_s = [sum(pair) for pair in zip(spent_s, service_by_band(gone), strict=True)]
    # 3. Older ones count less.
    if sum(count) >= MOST_ENDED:
        count, spent_s = [number / 2 for number in count], [service_s / 2 for service_s in spent_s]
    left = tuple(sorted((number, service_s) for number, service_s in served.items() if number in live))
    return replace(memory, ended=EndedJobs(tuple(count), tuple(spent_s), left))


def service_by_band(services_s: Sequence[float]) -> list[float]:
    """Return the GPU seconds that jobs with these attained services have spent in each band."""
    spent_s, reached = [0.0] * BANDS, [0] * BANDS
    for service_s in services_s:
        band = band_of(service_s)
        spent_s[band] += service_s - (EDGES[band - 1] if band else 0.0)
        reached[band] += 1
    above = 0
    for band in reversed(range(BANDS - 1)):
        above += reached[band + 1]
        spent_s[band] += above * (EDGES[band] - (EDGES[band - 1] if band else 0.0))
    return spent_s
