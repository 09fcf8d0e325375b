"""Local search: newcomers go to the node to which they add most, then jobs change places while that pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cadenza.policies.allocation.cadenza import knapsack
from cadenza.policies.allocation.cadenza.arrays import Arrays, Level
from cadenza.policies.allocation.cadenza.knapsack import Longs, Search

BLOCK = 32
"""Nodes between which exchanges are looked for at once: their tables together fit in a processor's cache."""


def insert(arrays: Arrays, items: Sequence[int]) -> None:
    """Seat jobs, in order, each on the node with room to which it adds most."""
    assignment, field, nodes = arrays.assignment, arrays.field, arrays.nodes
    which = np.flatnonzero(nodes.free > 0).astype(np.int32)
    tables = np.empty((len(which), int(field.size.max())), dtype=np.int32)
    knapsack.fill(field, nodes, which, tables)
    kinds = nodes.kind[which]
    gains: Longs = np.empty(len(which), dtype=np.int64)
    for item in items:
        knapsack.joins(field, kinds, item, tables, gains)
        gains[nodes.free[which] < assignment.gpus[item]] = np.iinfo(np.int64).min
        if field.home[item] >= 0:
            gains[which == field.home[item]] += field.cost[item]
        row = int(np.argmax(gains))
        node = int(which[row])
        assignment.assign(item, node)
        arrays.sync(node)
        knapsack.fill(field, nodes, which[row : row + 1], tables[row : row + 1])


class Improver:
    """Exchanges between the nodes of a block, until none pays or the evaluations are used up.

    An evaluation is the division of one node with each of its jobs left out. ``moves`` limits those of running jobs.
    """

    def __init__(self, arrays: Arrays, block: Sequence[int], evaluations: int, moves: int) -> None:
        self.arrays = arrays
        self.block = block
        self.evaluations, self.moves = evaluations, moves
        field, nodes = arrays.field, arrays.nodes
        shape = (len(block), nodes.items.shape[1] + 1, int(field.size.max(initial=1)))
        self.tables = np.empty(shape, dtype=np.int32)
        self.slot = np.full(len(nodes.kind), -1, dtype=np.int32)
        self.slot[list(block)] = np.arange(len(block))
        self._divide(block)

    def _divide(self, changed: Sequence[int]) -> None:
        for node in changed:
            self.evaluations -= 1
            knapsack.leave_out(self.arrays.field, self.arrays.nodes, node, self.tables[self.slot[node]])

    def improve(self, starts: Sequence[int]) -> None:
        """Look for exchanges of the nodes ``starts``, and of those that change, with any node of the block."""
        field, nodes, assignment = self.arrays.field, self.arrays.nodes, self.arrays.assignment
        partners = np.array(self.block, dtype=np.int32)
        waiting = dict.fromkeys(starts)
        while waiting and self.evaluations > 1:
            node = next(iter(waiting))
            del waiting[node]
            search = Search(partners, self.slot, self.tables, self.moves)
            found = knapsack.exchange(field, nodes, node, search)
            if found.net > 0:
                mine = assignment.members[node][found.mine : found.mine + 1]
                theirs = assignment.members[found.partner][found.theirs : found.theirs + 1]
                self.moves -= self._swap(mine, theirs, (node, found.partner))
                self._divide((node, found.partner))
                waiting.update({node: None, found.partner: None})

    def regroup(self, gangs: Iterable[int], tries: int) -> None:
        """Try to exchange jobs with several GPUs for some smaller ones; ``tries`` for each that is in the block.

        The others are drawn by a fixed sequence of numbers, so that a replay tries the same.
        """
        assignment, draw = self.arrays.assignment, _Draw()
        here = [gang for gang in gangs if assignment.where[gang] >= 0 and self.slot[assignment.where[gang]] >= 0]
        for gang in here * tries:
            node, other = assignment.where[gang], self.block[draw.below(len(self.block))]
            if node == other or self.evaluations < 1:
                continue
            others = self._drawn(other, assignment.gpus[gang], draw)
            if len(others) > 1 and self._pays(gang, others, node, other):
                self.moves -= self._swap([gang], others, (node, other))
                self._divide((node, other))
                self.improve((node, other))

    def _drawn(self, node: int, gpus: int, draw: _Draw) -> list[int]:
        """Return some jobs of a node that together make room for so many GPUs there; none where they do not."""
        assignment = self.arrays.assignment
        left = [item for item in assignment.members[node] if item < len(assignment.jobs)]
        missing = gpus
        drawn = []
        while left and missing > 0:
            item = left.pop(draw.below(len(left)))
            if assignment.gpus[item] <= missing:
                drawn.append(item)
                missing -= assignment.gpus[item]
        return drawn if missing <= assignment.free[node] else []

    def _pays(self, gang: int, others: Sequence[int], node: int, other: int) -> bool:
        assignment, field = self.arrays.assignment, self.arrays.field
        now, then = 0, 0
        for at, out, into in ((node, (gang,), others), (other, others, (gang,))):
            kind = assignment.kind_of[at]
            if any(assignment.rows[item][kind] is None for item in into):
                return False
            stay = [item for item in assignment.members[at] if item not in out]
            worth = knapsack.worth(field, kind, np.array([*stay, *into], dtype=np.int32))
            if worth < 0:
                return False
            then += worth
            now += int(self.tables[self.slot[at], len(assignment.members[at]), field.size[kind] - 1])
        cost, moves = self._price((gang,), node, other), self._price(others, other, node)
        return then - now > cost[0] + moves[0] and cost[1] + moves[1] <= self.moves

    def _price(self, items: Iterable[int], source: int, target: int) -> tuple[int, int]:
        """Return the cost of bringing items from one node to another, and the number of running jobs that move."""
        home, cost = self.arrays.assignment.home, self.arrays.field.cost
        away = [(item, (home[item] != target) - (home[item] != source)) for item in items if home[item] >= 0]
        return sum(int(cost[item]) * step for item, step in away), sum(step for _, step in away)

    def _swap(self, mine: Sequence[int], theirs: Sequence[int], nodes: tuple[int, int]) -> int:
        """Let items change places, and return how many running jobs that moves."""
        assignment, (node, partner) = self.arrays.assignment, nodes
        moved = self._price(mine, node, partner)[1] + self._price(theirs, partner, node)[1]
        for item in (*mine, *theirs):
            assignment.unassign(item)
        for items, target in ((mine, partner), (theirs, node)):
            for item in items:
                assignment.assign(item, target)
        self.arrays.sync(node)
        self.arrays.sync(partner)
        return moved


class _Draw:
    """A fixed sequence of numbers (Knuth's MMIX generator)."""

    def __init__(self) -> None:
        self.state = 1

    def below(self, most: int) -> int:
        """Return the next number from 0 to before ``most``."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self.state >> 33) * most >> 31


def level(arrays: Arrays, job: int) -> None:
    """Choose the speed of a job on several nodes: what it gains by it against what the others there lose."""
    assignment = arrays.assignment
    which = np.array(sorted({assignment.where[item] for item in assignment.parts[job]}), dtype=np.int32)
    choice = np.zeros(len(assignment.gpus), dtype=np.int32)
    total: Longs = np.zeros(len(assignment.servers), dtype=np.int64)

    def value(candidate: Level) -> int:
        arrays.choose(job, candidate)
        knapsack.divide(arrays.field, arrays.nodes, which, choice, total)
        feasible = bool((total[which] >= 0).all())
        return candidate.value + int(total[which].sum()) if feasible else -1

    values = [value(candidate) for candidate in arrays.levels[job]]
    arrays.choose(job, arrays.levels[job][values.index(max(values))])
