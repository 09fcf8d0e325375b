"""DRF: the least dominant share first (Ghodsi et al., NSDI'11), as Synergy's published simulator does it."""

from __future__ import annotations

from dataclasses import replace

from cadenza.policies.allocation.demand import static_need
from cadenza.policies.allocation.free_resources import Totals, starves
from cadenza.policies.allocation.greedy import greedy
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import Job


def drf(case: Case) -> Plan:
    """Offer the servers to the whole queue by ascending dominant share of the best-case demand, as GREEDY.

    The dominant share is the largest of g/G, c/C and m/M over the whole cluster, whatever the job has had. Ties keep
    the order of the queue; jobs that have not run for very long go first.
    """
    totals = Totals.of(case.servers)

    def dominant(job: Job) -> tuple[bool, float]:
        need = static_need(job.profile, totals.kinds, job.gpus)
        return not starves(job, case.now_s), max(totals.shares(job.gpus, need))

    return greedy(replace(case, jobs=tuple(sorted(case.jobs, key=dominant))))
