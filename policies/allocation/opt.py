"""OPT: ILP1's choices, placed by LP2, with a rounding that keeps the guarantee (Synergy, OSDI'22, §4)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cadenza.policies.allocation.bin_packing import Packing
from cadenza.policies.allocation.demand import JobDemand, allows, fair_table, promised_table, sound_table
from cadenza.policies.allocation.ilp import Choice, Item, ilp1, item_of, lp2
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.allocation.tune import place, settle, tune
from cadenza.policies.core.errors import SolverError
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.core.profile import Demand


def opt(case: Case) -> Plan:
    """Place every runnable job, none below the throughput of its proportional share, for the most in all.

    ILP1 gives each job a grid point as if all servers were one; LP2 puts as many jobs as it can whole on servers. The
    jobs left over are rounded: as chosen where that fits, split over servers if it must be; else with the proportional
    share, for which jobs that hold more make room. Where GPU types leave ILP1 no solution, the plan is TUNE's.
    """
    weights = {job.key: float(job.gpus) for job in case.jobs[: case.runnable]} if case.weighted else None
    try:
        choices = ilp1(case, weights).choices
    except SolverError:
        if len({server.gpu_type for server in case.servers}) > 1:
            return tune(case)
        raise
    packing = Packing(case.servers, partial(sound_table, margin=case.margin))
    asks = {job.key: _ask(packing, case, job, choices[job.key]) for job in case.jobs[: case.runnable]}
    left = _put_whole(packing, case, choices, asks)
    # The published rounding goes down to one CPU and 25 GB a GPU, below the guarantee.
    for job in sorted(left, key=lambda job: -job.gpus):
        if not place(packing, job, asks[job.key]):
            place(packing, job, packing.asks.best(job))
    return packing.plan()


def _ask(packing: Packing, case: Case, job: Job, choice: Choice) -> JobDemand:
    """Return the ask for a choice: as promised on each kind of server, the proportional share where it is not."""
    tables, above = [], False
    for kind in packing.books.kinds:
        table = fair_table(kind, job.gpus) if allows(kind, choice.gpu_type) else ()
        if table and job.profile is not None and not choice.fair:
            wanted = Demand(choice.cpus, choice.memory_gb)
            table, exceeds = promised_table(job.profile, kind, job.gpus, wanted, case.margin)
            above = above or exceeds
        tables.append(table)
    return JobDemand(job.gpus, choice.gpu_type, tuple(tables), exceeds=above)


def _put_whole(
    packing: Packing, case: Case, choices: Mapping[JobKey, Choice], asks: dict[JobKey, JobDemand]
) -> list[Job]:
    """Put jobs where LP2 puts them whole, or in equal parts if larger than a server; return the others."""
    alike: dict[tuple[Item, int], list[Job]] = {}
    for job in case.jobs[: case.runnable]:
        alike.setdefault(item_of(case.servers, job.gpus, choices[job.key]), []).append(job)
    counts = lp2(case.servers, [(item, parts * len(jobs)) for (item, parts), jobs in alike.items()])
    left = []
    for ((item, parts), jobs), row in zip(alike.items(), counts, strict=True):
        places = [at for at, count in enumerate(row) for _ in range(count)]
        for job in jobs:
            at, places = places[:parts], places[parts:]
            if len(set(at)) < parts:
                left.append(job)
                continue
            spots = tuple((server, item.gpus) for server in at)
            packing.books.take(asks[job.key], spots)
            packing.put(job, asks[job.key], spots)
            settle(packing, spots)
    return left
