"""An upper bound on the total throughput of any placement that keeps a job within one node where it fits.

Column generation over node configurations (Gilmore and Gomory, 1961): a column says how many jobs of each kind a node
has and with which grid points; the master program mixes columns over identical nodes so that every job is somewhere;
pricing finds the best columns for the master's prices by exact dynamic programming over GPUs, CPUs and memory. At any
prices the sum of what the jobs pay and of what the nodes' best columns earn is a bound (Lagrange), so that stopping
early only makes it weaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

from cadenza.policies.allocation.ilp import Choice, Pool, points
from cadenza.policies.allocation.problem import Server
from cadenza.policies.core.model import Job
from cadenza.policies.core.profile import MB_PER_GB, TOLERANCE

UNITS = 24
"""Steps in which pricing counts a node's memory. A size within 1/1000 of whole steps counts as these, any other is
rounded down; both keep every column that fits (1/1000 of 24 steps is less than one), so that the bound holds."""
CLOSE = 1e-3
GAP = 1e-5
"""Stop when the bound is this close to the master's value, relatively."""
MOST_ROUNDS = 200
PENALTY = 1e3
"""Price of a job without a column in the master; more than any job earns."""


class Kind(NamedTuple):
    """Jobs that are alike, or the equal parts of those larger than a node."""

    gpus: int
    choices: tuple[Choice, ...]
    value: float
    """Value of a part at speed 1. A job runs at its slowest node; the mean of its parts is never below that."""


class Piece(NamedTuple):
    """A kind with one of its choices, as pricing sees it."""

    kind: int
    gpus: int
    cpus: int
    memory: int
    value: float


@dataclass(frozen=True, slots=True)
class NodeBound:
    """The result: ``bound`` holds; ``master`` is the relaxation's value, equal to it when solved to the end."""

    bound: float
    master: float
    rounds: int


def node_bound(nodes: int, node: Server, jobs: Sequence[Job], *, weighted: bool = False) -> NodeBound:
    """Return the bound for jobs that all run on identical nodes, none below its proportional throughput.

    A job counts its speed once, or once for each GPU when ``weighted``. A job with more GPUs than a node has is on the
    fewest nodes that hold it, in equal parts.
    """
    counts = _kinds(node, jobs, weighted=weighted)
    kinds, needed = list(counts), np.array(list(counts.values()), dtype=float)
    pricing = Pricing(node, kinds)
    columns: dict[tuple[int, ...], int] = {}
    found: list[tuple[Any, float]] = []
    bound, value, rounds = np.inf, -np.inf, 0
    prices = np.array([-PENALTY] * len(kinds))
    while rounds < MOST_ROUNDS and (rounds == 0 or bound - value > GAP * bound):
        rounds += 1
        earned, fresh = pricing.best(prices)
        bound = min(bound, float(prices @ needed) + nodes * max(earned, 0.0))
        for key, (column, worth) in fresh.items():
            if key not in columns:
                columns[key] = len(found)
                found.append((column, worth))
        value, prices = _master(found, needed, nodes)
    return NodeBound(bound, value, rounds)


def _kinds(node: Server, jobs: Sequence[Job], *, weighted: bool) -> dict[Kind, int]:
    """Return how many there are of each kind."""
    pool = Pool("", node.gpus, node.cpus, node.memory_mb / MB_PER_GB)
    counts: dict[Kind, int] = {}
    for job in jobs:
        parts = next(parts for parts in range(-(-job.gpus // node.gpus), job.gpus + 1) if job.gpus % parts == 0)
        some = points(job.profile, pool)
        least = next(choice.speed for choice in some if choice.fair) - TOLERANCE
        good = tuple(choice._replace(fair=False) for choice in some if choice.speed >= least)
        kind = Kind(job.gpus // parts, good, (job.gpus if weighted else 1) / parts)
        counts[kind] = counts.get(kind, 0) + parts
    return counts


def _master(found: Sequence[tuple[Any, float]], needed: Any, nodes: int) -> tuple[float, Any]:
    """Return the value of the best mixture of the columns found so far, and what it says each kind is worth."""
    own = np.array([column for column, _ in found]).T
    matrix = csc_array(np.hstack([own, np.eye(len(needed))]))
    earns = np.concatenate([[worth for _, worth in found], np.full(len(needed), -PENALTY)])
    on_nodes = np.concatenate([np.ones(len(found)), np.zeros(len(needed))])[np.newaxis, :]
    result = linprog(-earns, A_ub=on_nodes, b_ub=[nodes], A_eq=matrix, b_eq=needed, method="highs-ds")
    if result.status:
        raise RuntimeError(f"master program: {result.message}")
    return -result.fun, -result.eqlin.marginals


class Pricing:
    """Finds the node configurations that earn most at given prices, exactly.

    ``best[g][c, m]`` is the most that g GPUs, c CPUs and m memory steps can earn. It is padded with minus infinity, so
    that what does not fit looks up something that never wins.
    """

    def __init__(self, node: Server, kinds: Sequence[Kind]) -> None:
        self.gpus, self.cpus = node.gpus, node.cpus
        self.kinds = len(kinds)
        step = node.memory_mb / MB_PER_GB / UNITS
        pieces = {_piece(number, kind, choice, step) for number, kind in enumerate(kinds) for choice in kind.choices}
        self.pieces = sorted(piece for piece in pieces if piece.cpus <= self.cpus and piece.memory <= UNITS)
        self.values = np.array([piece.value for piece in self.pieces])
        self.owner = np.array([piece.kind for piece in self.pieces])
        self.sizes = sorted({piece.gpus for piece in self.pieces})
        self.of_size = {size: np.flatnonzero([piece.gpus == size for piece in self.pieces]) for size in self.sizes}
        self.lookup = {size: self._lookup(size) for size in self.sizes}

    def _lookup(self, size: int) -> Any:
        """Return, for each piece of a size and each (CPUs, memory), the padded index of the remainder."""
        some = [self.pieces[at] for at in self.of_size[size]]
        cpus = np.arange(self.cpus + 1)[np.newaxis, :, np.newaxis] + self.cpus
        memory = np.arange(UNITS + 1)[np.newaxis, np.newaxis, :] + UNITS
        taken_cpus = np.array([piece.cpus for piece in some])[:, np.newaxis, np.newaxis]
        taken_memory = np.array([piece.memory for piece in some])[:, np.newaxis, np.newaxis]
        return (cpus - taken_cpus) * (2 * UNITS + 1) + memory - taken_memory

    def best(self, prices: Any) -> tuple[float, dict[tuple[int, ...], tuple[Any, float]]]:
        """Return the most that a node can earn at prices by kind, and for each kind the best column that has it.

        A column is the number of each kind on the node; with it comes what it is worth without prices.
        """
        gains = self.values - prices[self.owner]
        most, chosen = self._fill(gains)
        columns: dict[tuple[int, ...], tuple[Any, float]] = {}
        firsts: dict[int, tuple[float, int]] = {}
        for at, piece in enumerate(self.pieces):
            rest = most[self.gpus - piece.gpus][2 * self.cpus - piece.cpus, 2 * UNITS - piece.memory]
            firsts[piece.kind] = max(firsts.get(piece.kind, (-np.inf, -1)), (float(gains[at] + rest), at))
        for _, at in firsts.values():
            column, worth = self._trace(chosen, at)
            columns[*(int(count) for count in column), round(worth * 1e6)] = (column, worth)
        return float(most[self.gpus][2 * self.cpus, 2 * UNITS]), columns

    def _fill(self, gains: Any) -> tuple[list[Any], Any]:
        """Return the padded tables for 0, 1, 2 … GPUs, and the piece that each entry takes (-1: a GPU less)."""
        shape = (self.cpus + 1, UNITS + 1)
        padded = np.full((2 * self.cpus + 1, 2 * UNITS + 1), -np.inf)
        padded[self.cpus :, UNITS:] = 0.0
        most, chosen = [padded], np.full((self.gpus + 1, *shape), -1)
        for gpus in range(1, self.gpus + 1):
            table = most[gpus - 1][self.cpus :, UNITS:].copy()
            for size in self.sizes:
                if size <= gpus:
                    of_size = self.of_size[size]
                    earned = most[gpus - size].ravel()[self.lookup[size]] + gains[of_size][:, np.newaxis, np.newaxis]
                    winner = earned.argmax(axis=0)
                    top = np.take_along_axis(earned, winner[np.newaxis], axis=0)[0]
                    better = top > table
                    table[better] = top[better]
                    chosen[gpus][better] = of_size[winner[better]]
            padded = np.full_like(padded, -np.inf)
            padded[self.cpus :, UNITS:] = table
            most.append(padded)
        return most, chosen

    def _trace(self, chosen: Any, first: int) -> tuple[Any, float]:
        """Return the column that begins with a piece and goes on best, and its worth."""
        column, worth = np.zeros(self.kinds), 0.0
        gpus, cpus, memory, at = self.gpus, self.cpus, UNITS, first
        while gpus > 0:
            if at < 0:
                gpus -= 1
            else:
                piece = self.pieces[at]
                column[piece.kind] += 1
                worth += piece.value
                gpus, cpus, memory = gpus - piece.gpus, cpus - piece.cpus, memory - piece.memory
            at = int(chosen[gpus, cpus, memory])
        return column, worth


def _piece(number: int, kind: Kind, choice: Choice, step: float) -> Piece:
    """Return a kind's choice in whole CPUs and memory steps, none more than it takes."""
    cpus, steps = choice.cpus * kind.gpus, choice.memory_gb * kind.gpus / step
    whole = round(steps)
    memory = whole if abs(steps - whole) <= CLOSE * whole else int(steps)
    return Piece(number, kind.gpus, int(cpus + TOLERANCE), memory, kind.value * choice.speed)
