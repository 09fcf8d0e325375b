"""Proportional: g of a server's G GPUs come with g/G of its CPUs and memory (Synergy, OSDI'22, §2)."""

from __future__ import annotations

from cadenza.policies.allocation.demand import JobDemands, Spots, best_table
from cadenza.policies.allocation.free_resources import FreeResources
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import Job, JobKey, Placement


def proportional(case: Case) -> Plan:
    """Place every runnable job with its proportional share.

    A running job stays where it is; the others take the first free GPUs in order of servers, as Synergy's simulator
    does.
    """
    books = FreeResources(case.servers)
    asks = JobDemands(books.kinds, best_table)
    position = {server.name: number for number, server in enumerate(case.servers)}
    jobs = case.jobs[: case.runnable]
    placements: dict[JobKey, Placement] = {}
    # Speeds are 1 wherever a job is, so that staying changes none of the results of Synergy's simulator.
    for job in jobs:
        if job.placement and (spots := _stay(job, books, position, case.gpu_type.get(job.key, ""))):
            ask = asks.fair(job.gpus)
            books.take(ask, spots)
            placements[job.key] = books.placement(ask, spots)
    for job in jobs:
        if job.key not in placements:
            ask = asks.fair(job.gpus, case.gpu_type.get(job.key, ""))
            found = books.first_fit(ask) or books.first_fit(ask := asks.fair(job.gpus))
            if found:
                placements[job.key] = books.placement(ask, found)
    return Plan(placements)


def _stay(job: Job, books: FreeResources, position: dict[str, int], gpu_type: str) -> Spots | None:
    """Return where a running job is if it can stay there with all its GPUs, else None."""
    spots = []
    for share in job.placement:
        server = position.get(share.node)
        if server is None or books.gpus[server] < share.gpus:
            return None
        if gpu_type and books.servers[server].gpu_type != gpu_type:
            return None
        spots.append((server, share.gpus))
    return tuple(sorted(spots)) if sum(count for _, count in spots) == job.gpus else None
