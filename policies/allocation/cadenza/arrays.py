"""An assignment as the division's arrays: options laid end to end, values as whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from cadenza.policies.allocation.cadenza.assignment import Assignment
from cadenza.policies.allocation.cadenza.knapsack import MAX_NODE_VALUE, NEVER, Field, Ints, Longs, Nodes
from cadenza.policies.allocation.pareto import CPU_UNITS, CPUS, MEMORY_MB, MEMORY_UNITS, SPEED, Floats
from cadenza.policies.core.profile import TOLERANCE

MAX_SCALE = 1 << 20
"""The value of speed 1, unless speeds are so high that sums would not fit in 32 bits."""
MAX_LEVELS = 12
"""Most speeds that are tried for a job on several nodes."""


class Level(NamedTuple):
    """A speed for a job on several nodes: each part takes the least that reaches it."""

    value: int
    spans: tuple[tuple[int, int], ...]
    """First option and the one after the last, for each of its parts."""


class Arrays:
    """The arrays of the division, brought up to date by ``sync`` when the assignment changes."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._tables: list[Floats] = []
        self._kinds: list[int] = []
        self._weights: list[int] = []
        at = self._lay_out()
        levels = {job: self._lay_out_levels(job) for job in sorted(assignment.parts)}
        self._ends = np.cumsum([0, *(table.shape[1] for table in self._tables)])
        table = np.concatenate([np.zeros((5, 0)), *self._tables], axis=1)
        self.cpus = table[CPUS].astype(np.int64)
        self.memory_mb = table[MEMORY_MB].astype(np.int64)
        self.field = self._field(table, at)
        self.levels = {
            job: [
                Level(
                    round(speed * self.scale * assignment.weight(job)),
                    tuple((int(self._ends[at]), int(self._ends[at + 1])) for at in tables),
                )
                for speed, tables in found
            ]
            for job, found in levels.items()
        }
        self.nodes = _nodes(assignment)
        for job, found in self.levels.items():
            self.choose(job, found[0])

    def _lay_out(self) -> Longs:
        """Return the number of each item's table by kind, -1 where it has none; those of parts come later."""
        assignment = self.assignment
        at = np.full((len(assignment.rows), len(assignment.kinds)), -1, dtype=np.int64)
        for kind in range(len(assignment.kinds)):
            column = [row[kind] for row in assignment.rows[: len(assignment.jobs)]]
            names = list(map(id, column))
            numbers = dict.fromkeys([id(None), *names], -1)
            for name, options, gpus in zip(names, column, assignment.gpus, strict=False):
                if numbers[name] < 0 and options is not None:
                    numbers[name] = self._add(options.table, kind, gpus if assignment.case.weighted else 1)
            at[: len(column), kind] = [numbers[name] for name in names]
        return at

    def _add(self, table: Floats, kind: int, weight: int) -> int:
        self._tables.append(table)
        self._kinds.append(kind)
        self._weights.append(weight)
        return len(self._tables) - 1

    def _lay_out_levels(self, job: int) -> list[tuple[float, list[int]]]:
        """Return the speeds that a job on several nodes can have, ascending, and its parts' tables for each."""
        parts = [
            (kind, options.table)
            for item in self.assignment.parts[job]
            for kind, options in enumerate(self.assignment.rows[item])
            if options is not None
        ]
        return [
            (speed, [self._add(table[:, table[SPEED] >= speed - TOLERANCE], kind, 0) for kind, table in parts])
            for speed in _common_speeds([table[SPEED] for _, table in parts])
        ]

    def _field(self, table: Floats, at: Longs) -> Field:
        kinds = self.assignment.kinds
        counts = np.diff(self._ends)
        width = np.array([kind.memory_units + 1 for kind in kinds], dtype=np.int32)
        size = np.array([(kind.cpu_units + 1) * (kind.memory_units + 1) for kind in kinds], dtype=np.int32)
        kind = np.repeat(np.array(self._kinds, dtype=np.int64), counts)
        weighted = table[SPEED] * np.repeat(np.array(self._weights, dtype=np.float64), counts)
        most = float(weighted.max(initial=1.0)) * max((one.gpus for one in kinds), default=1)
        self.scale = min(MAX_SCALE, MAX_NODE_VALUE / most)
        value = np.rint(weighted * self.scale).astype(np.int32)
        highest = np.append(np.maximum.reduceat(value, self._ends[:-1]) if len(value) else value, NEVER)
        best = highest[at]  # number -1 is the last one
        home = np.array(self.assignment.home, dtype=np.int32)
        costs = self.assignment.case.costs
        moved = np.where(home >= 0, best.max(axis=1, initial=0), 0)
        return Field(
            width,
            size,
            (table[CPU_UNITS] * width[kind] + table[MEMORY_UNITS]).astype(np.int32),
            value,
            np.where(at < 0, 0, self._ends[at]).astype(np.int32),
            np.where(at < 0, 0, self._ends[at + 1]).astype(np.int32),
            best.astype(np.int32),
            np.array(self.assignment.gpus, dtype=np.int32),
            home,
            np.ceil(moved * (costs.move_s / costs.horizon_s)).astype(np.int64),  # as ``Assignment.price``
            np.arange(len(home)) >= len(self.assignment.jobs),
        )

    def choose(self, job: int, level: Level) -> None:
        """Let a job on several nodes run at a speed."""
        for item, (start, stop) in zip(self.assignment.parts[job], level.spans, strict=True):
            kind = self.assignment.kind_of[self.assignment.where[item]]
            self.field.start[item, kind], self.field.stop[item, kind], self.field.best[item, kind] = start, stop, 0

    def sync(self, node: int) -> None:
        """Take a node's items from the assignment."""
        members = self.assignment.members[node]
        self.nodes.items[node, : len(members)] = members
        self.nodes.filled[node] = len(members)
        self.nodes.free[node] = self.assignment.free[node]


def _common_speeds(parts: Sequence[Floats]) -> list[float]:
    """Return the speed that all parts have at least, and at most ``MAX_LEVELS`` higher ones that all can have."""
    least, most = min(float(part.min()) for part in parts), min(float(part.max()) for part in parts)
    higher = sorted({speed for part in parts for speed in part.tolist() if least < speed <= most}, reverse=True)
    step = max(len(higher) / MAX_LEVELS, 1)
    chosen = {higher[int(at * step)] for at in range(min(len(higher), MAX_LEVELS))}
    return sorted({least, *chosen})


def _nodes(assignment: Assignment) -> Nodes:
    width = max((kind.gpus for kind in assignment.kinds), default=1)
    count = np.array([len(members) for members in assignment.members], dtype=np.int32)
    items = np.zeros((len(count), width), dtype=np.int32)
    flat: Ints = np.fromiter(chain.from_iterable(assignment.members), dtype=np.int32, count=int(count.sum()))
    items[np.arange(width)[None, :] < count[:, None]] = flat
    return Nodes(np.array(assignment.kind_of, dtype=np.int32), items, count, np.array(assignment.free, dtype=np.int32))
