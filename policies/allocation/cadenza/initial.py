"""The initial assignment: running jobs stay where they can, the others are spread; exchanges improve it later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import groupby

import numpy as np

from cadenza.policies.allocation.cadenza.assignment import Assignment


def keep(assignment: Assignment) -> list[int]:
    """Leave running jobs where they are, and return the others and those that cannot stay."""
    others = []
    for item, job in enumerate(assignment.jobs):
        if len(job.placement) == 1:
            node = assignment.node_of.get(job.placement[0].node, -1)
            assignment.home[item] = node
            if job.placement[0].gpus == job.gpus and _fits(assignment, item, node, job.gpus):
                assignment.assign(item, node)
                continue
        elif job.placement:
            spots = [(assignment.node_of.get(share.node, -1), share.gpus) for share in job.placement]
            whole = sum(gpus for _, gpus in spots) == job.gpus
            if whole and all(_fits(assignment, item, node, gpus) for node, gpus in spots):
                assignment.split(item, spots)
                continue
        others.append(item)
    return others


def _fits(assignment: Assignment, item: int, node: int, gpus: int) -> bool:
    return node >= 0 and assignment.free[node] >= gpus and assignment.may(item, assignment.kind_of[node])


def order(assignment: Assignment, items: Iterable[int]) -> list[int]:
    """Return jobs in the order in which they are dealt: most GPUs first, then the choosy, then the hungry."""
    numbers = sorted(items)
    appetites = [[options.appetite for options in assignment.rows[item] if options is not None] for item in numbers]
    gpus = np.array([assignment.gpus[item] for item in numbers])
    choices = np.array([len(each) for each in appetites])
    most = np.array([max(each, default=0.0) for each in appetites])
    return [numbers[at] for at in np.lexsort((-most, choices, -gpus)).tolist()]


def assign_evenly(assignment: Assignment, items: Sequence[int], everyone: Iterable[int], *, tight: bool) -> list[int]:
    """Seat jobs, in order, each on one node, and return those that find none.

    ``tight``: on the node with fewest free GPUs, so that few nodes are broken into; else, and between equals, where
    the jobs are the least hungry once ``everyone`` is spread evenly over the free GPUs.
    """
    if not items:
        return []
    left = []
    loads = _Loads(assignment, everyone)
    for _, group in groupby(items, key=lambda item: (assignment.gpus[item], _usable(assignment, item))):
        members = list(group)
        left += _assign_alike(assignment, members, loads, tight=tight)
    return left


class _Loads:
    """Demand of the jobs on each node, as a part of its CPUs and memory."""

    def __init__(self, assignment: Assignment, items: Iterable[int]) -> None:
        self.assignment = assignment
        self.load = [0.0] * len(assignment.servers)
        for node, members in enumerate(assignment.members):
            for item in members:
                self.add(item, node)
        wanted = sum(assignment.gpus[item] for item in items)
        total = [
            sum([options.appetite for item in items if (options := assignment.rows[item][kind]) is not None])
            for kind in range(len(assignment.kinds))
        ]
        self.usual = [appetite / max(wanted, sum(assignment.free), 1) for appetite in total]
        """Expected demand per free GPU, by node kind; lower than the jobs' average where GPUs stay free."""

    def add(self, item: int, node: int) -> None:
        """Count an item on a node."""
        options = self.assignment.rows[item][self.assignment.kind_of[node]]
        self.load[node] += options.appetite if options is not None else 0.0

    def expected(self, node: int) -> float:
        """Return a node's load once everyone has been dealt."""
        return self.load[node] + self.assignment.free[node] * self.usual[self.assignment.kind_of[node]]


def _usable(assignment: Assignment, item: int) -> list[bool]:
    return [options is not None for options in assignment.rows[item]]


def _assign_alike(assignment: Assignment, items: Sequence[int], loads: _Loads, *, tight: bool) -> list[int]:
    gpus, usable = assignment.gpus[items[0]], _usable(assignment, items[0])

    def rank(node: int) -> tuple[int, float, int]:
        return (assignment.free[node] if tight else -assignment.free[node], loads.expected(node), node)

    heap = [
        rank(node) for node, free in enumerate(assignment.free) if free >= gpus and usable[assignment.kind_of[node]]
    ]
    heapify(heap)
    for number, item in enumerate(items):
        if not heap:
            return list(items[number:])
        node = heap[0][2]
        assignment.assign(item, node)
        loads.add(item, node)
        if assignment.free[node] >= gpus:
            heapreplace(heap, rank(node))
        else:
            heappop(heap)
    return []
