"""GREEDY: first fit of the best-case demand; a job that fits nowhere is passed over (Synergy, OSDI'22, §3)."""

from __future__ import annotations

from cadenza.policies.allocation.demand import JobDemands, best_table
from cadenza.policies.allocation.free_resources import FreeResources
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import JobKey, Placement


def greedy(case: Case) -> Plan:
    """Offer the servers, empty, to the whole queue in its order."""
    books = FreeResources(case.servers)
    asks = JobDemands(books.kinds, best_table)
    free = sum(books.gpus)
    placements: dict[JobKey, Placement] = {}
    hopeless = set()
    for job in case.jobs:
        if not free:
            break
        ask = asks.best(job, case.gpu_type.get(job.key, ""))
        if job.gpus > free or ask in hopeless:
            continue
        # Synergy's simulator passes over a job that fits nowhere. What it leaves goes to any later job: GPUs can be
        # stranded without CPUs, and the order of the queue is not kept.
        spots = books.first_fit(ask)
        if spots is None:
            hopeless.add(ask)
            continue
        placements[job.key] = books.placement(ask, spots)
        free -= job.gpus
    return Plan(placements)
