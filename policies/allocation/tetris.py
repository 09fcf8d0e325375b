"""Tetris: what aligns best with the free resources first (Grandl et al., SIGCOMM'14, §3.2); demands as GREEDY's."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.policies.allocation.demand import JobDemand, JobDemands, Need, Table, best_table
from cadenza.policies.allocation.free_resources import FreeResources, starves
from cadenza.policies.allocation.problem import Case, Plan
from cadenza.policies.core.model import Job, JobKey, Placement


def tetris(case: Case) -> Plan:
    """Put again and again the job on the server whose free resources and its demand have the largest dot product.

    Demands are best-case; GPUs, CPUs and memory count as parts of the server. What fits nowhere is passed over. Jobs
    that have not run for very long, and jobs with more GPUs than any server, come before, by first fit. Ties: the
    earlier in the queue, then the earlier server.
    """
    books = FreeResources(case.servers)
    asks = JobDemands(books.kinds, best_table)
    largest = max((server.gpus for server in case.servers), default=0)
    placements: dict[JobKey, Placement] = {}
    queues: dict[JobDemand, list[Job]] = {}
    same: dict[tuple[int, tuple[Table, ...]], JobDemand] = {}
    for job in case.jobs:
        ask = asks.best(job, case.gpu_type.get(job.key, ""))
        if not (job.gpus > largest or starves(job, case.now_s)):
            queues.setdefault(same.setdefault((ask.gpus, ask.take), ask), []).append(job)
        elif spots := books.first_fit(ask):
            placements[job.key] = books.placement(ask, spots)
    _align(books, queues, placements)
    return Plan(placements)


def _align(books: FreeResources, queues: dict[JobDemand, list[Job]], placements: dict[JobKey, Placement]) -> None:
    """Place jobs, each whole on one server, in descending order of alignment; jobs of one ask leave first to last."""
    for queue in queues.values():
        queue.reverse()
    waiting = list(queues)
    picks = [_pick(books, waiting, at) for at in range(len(books.gpus))]
    while True:
        at = max(range(len(picks)), key=lambda at: (picks[at][0], -at), default=0)
        ask = picks[at][1] if picks else None
        if ask is None:
            return
        books.take(ask, spots := ((at, ask.gpus),))
        placements[queues[ask].pop().key] = books.placement(ask, spots)
        stale = [at]
        if not queues[ask]:
            waiting.remove(ask)
            stale = [server for server, pick in enumerate(picks) if pick[1] is ask]
        for server in stale:
            picks[server] = _pick(books, waiting, server)


def _pick(books: FreeResources, waiting: Sequence[JobDemand], at: int) -> tuple[float, JobDemand | None]:
    """Return the highest alignment on a server and whose it is; -1 and None where nothing fits."""
    best: tuple[float, JobDemand | None] = (-1.0, None)
    if books.gpus[at]:
        for ask in waiting:
            if books.most(ask, at, ask.gpus) == ask.gpus:
                score = alignment(books, ask.gpus, books.need(ask, at, ask.gpus), at)
                if score > best[0]:
                    best = (score, ask)
    return best


def alignment(books: FreeResources, gpus: int, need: Need, at: int) -> float:
    """Return the dot product of what a job wants and what a server has free, each as parts of the server."""
    server = books.servers[at]
    return (
        gpus * books.gpus[at] / server.gpus**2
        + need.cpus * books.cpus[at] / server.cpus**2
        + need.memory_mb * books.memory_mb[at] / server.memory_mb**2
    )
