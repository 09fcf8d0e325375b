"""TETRIS as Synergy's published simulator does it: the least work first, then greedy."""

from __future__ import annotations

from dataclasses import replace

from cadenza.policies.allocation.demand import static_need
from cadenza.policies.allocation.free_resources import Totals, starves
from cadenza.policies.allocation.greedy import greedy
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import Job
from cadenza.policies.ordering.ranking import work_left


def tetris_coded(case: Case) -> Plan:
    """Offer the servers to the whole queue by ascending work: the shares of the cluster wanted times the time left.

    So does Synergy's published simulator under the name TETRIS; nothing in it aligns. Time left is at the speed that
    the job ran last or, while it waits, at its best; jobs whose work is unknown come last.
    """
    totals = Totals.of(case.servers)

    def work(job: Job) -> tuple[bool, float]:
        need = static_need(job.profile, totals.kinds, job.gpus)
        return not starves(job, case.now_s), sum(totals.shares(job.gpus, need)) * work_left(job, case.now_s)

    return greedy(replace(case, jobs=tuple(sorted(case.jobs, key=work))))
