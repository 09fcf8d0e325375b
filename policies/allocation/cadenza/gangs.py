"""Jobs with several GPUs: on one node, from which small jobs move out where that pays, else on several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nsmallest

from cadenza.policies.allocation.cadenza.assignment import Assignment

CANDIDATES = 16
"""Nodes on which room is looked for: those with most free GPUs."""


def reunite(assignment: Assignment, moves: int) -> int:
    """Bring running jobs from several nodes together on one that has room, and return how many moves are left."""
    for job in sorted(assignment.parts):
        own: Counter[int] = Counter()
        for item in assignment.parts[job]:
            own[assignment.where[item]] += assignment.gpus[item]
        fits = [
            node
            for node, free in enumerate(assignment.free)
            if free + own[node] >= assignment.gpus[job] and assignment.rows[job][assignment.kind_of[node]] is not None
        ]
        if moves > 0 and fits and assignment.price(job) < assignment.case.costs.span * assignment.best(job):
            assignment.join(job)
            assignment.assign(job, min(fits, key=lambda node: (node not in own, assignment.free[node], node)))
            moves -= 1
    return moves


def make_room(assignment: Assignment, job: int, moves: int) -> list[int] | None:
    """Seat a job on one node by taking others off it; return those, or None where that is impossible or pays not.

    The others find free GPUs elsewhere. What their moves cost must be less than what the network would cost the job.
    """
    gpus, gain = assignment.gpus[job], assignment.case.costs.span * assignment.best(job)
    usable = [node for node, kind in enumerate(assignment.kind_of) if assignment.rows[job][kind] is not None]
    roomy = nsmallest(CANDIDATES, usable, key=lambda node: (-assignment.free[node], node))
    rooms = [
        (sum(assignment.price(item) for item in out if assignment.home[item] >= 0), node, out)
        for node in roomy
        if (out := _leavers(assignment, node, gpus - assignment.free[node])) is not None and len(out) <= moves
    ]
    if not rooms or min(rooms)[0] >= gain:
        return None
    _, node, out = min(rooms)
    for item in out:
        assignment.unassign(item)
    assignment.assign(job, node)
    return out


def _leavers(assignment: Assignment, node: int, missing: int) -> list[int] | None:
    """Return the one-GPU jobs of a node that cost least to move and free so many GPUs; None where there are too few."""
    small = [item for item in assignment.members[node] if assignment.gpus[item] == 1 and item < len(assignment.jobs)]
    small.sort(key=lambda item: (assignment.price(item) if assignment.home[item] >= 0 else 0.0, item))
    elsewhere = sum(assignment.free) - assignment.free[node]
    return sorted(small[:missing]) if missing <= min(len(small), elsewhere) else None


def span(assignment: Assignment, job: int) -> None:
    """Put a job on several nodes, as few as possible, of one GPU type where that has enough free GPUs."""
    gpus, free = assignment.gpus[job], [node for node, count in enumerate(assignment.free) if count > 0]
    usable = [node for node in free if assignment.may(job, assignment.kind_of[node])]
    if sum(assignment.free[node] for node in usable) < gpus:
        usable = free
    of_type: Counter[str] = Counter()
    for node in usable:
        of_type[assignment.servers[node].gpu_type] += assignment.free[node]
    fullest = min(of_type, key=lambda kind: (-of_type[kind], kind))
    if of_type[fullest] >= gpus:
        usable = [node for node in usable if assignment.servers[node].gpu_type == fullest]
    assignment.split(job, _spots(assignment, gpus, usable))


def _spots(assignment: Assignment, gpus: int, nodes: Iterable[int]) -> list[tuple[int, int]]:
    """Take the nodes with most free GPUs, and last the one with fewest that is enough; in order of nodes."""
    left = set(nodes)
    spots = []
    while gpus:
        enough = [node for node in left if assignment.free[node] >= gpus]
        node = min(enough or left, key=lambda node: (assignment.free[node] if enough else -assignment.free[node], node))
        left.discard(node)
        spots.append((node, min(gpus, assignment.free[node])))
        gpus -= spots[-1][1]
    return sorted(spots)
