"""The exact division of a node among its jobs: tables over what a node has, and what exchanges between nodes gain.

A table holds, for each amount of CPUs (rows) and memory (columns, next to each other), the highest total value of
some jobs within it, or a negative number where they do not fit. Values are whole numbers, so that a sum does not
depend on its order. This file says it with numpy; ``division_compiled`` is the same for numba, many times faster.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
NEVER = -(1 << 30)
MOST = 1 << 29
"""The most that the values on one node may come to, so that ``NEVER`` with values added stays negative."""


class Field(NamedTuple):
    """What does not change while jobs are placed: sizes of node kinds, jobs and their options on each kind."""

    width: Ints
    """By kind: columns of its tables, one more than its memory units."""
    size: Ints
    """By kind: entries of its tables."""
    offset: Ints
    """By option: how far back in a table its CPUs and memory reach."""
    value: Ints
    """By option."""
    start: Ints
    stop: Ints
    """By (item, kind): its first option, and the one after its last; none where the job may not run."""
    best: Ints
    """By (item, kind): the highest value of its options; ``NEVER`` without any."""
    gpus: Ints
    """By item."""
    home: Ints
    """By item: the node where it runs now, or -1."""
    cost: Longs
    """By item: the value that a move away from home must gain."""
    fixed: NDArray[np.bool_]
    """By item: it stays, for now or because it is part of a job on several nodes."""


class Nodes(NamedTuple):
    """Which items are on which node, all by node."""

    kind: Ints
    items: Ints
    """By (node, position): items in ascending order; meaningless from ``filled`` on."""
    filled: Ints
    """How many items."""
    free: Ints
    """GPUs that nobody has."""


class Exchange(NamedTuple):
    """Two items to change places; a position after the last is nothing, so that the other one moves."""

    net: int
    """What it gains, moves paid for; 0: there is none."""
    partner: int
    mine: int
    theirs: int


class Division(Protocol):
    """The operations; ``Compiled`` and ``Plain`` give the same answers."""

    def divide(self, field: Field, nodes: Nodes, which: Ints, choice: Ints, total: Longs) -> None:
        """Write each item's best option into ``choice`` and each node's value into ``total``, for the nodes ``which``.

        Of several best divisions it is one with fewest CPUs in all, then least memory. Where the items do not fit the
        total is negative and nothing is chosen.
        """

    def leave_out(self, field: Field, nodes: Nodes, node: int, out: Ints) -> None:
        """Write into ``out[k]`` the table of a node without its item at position k, and last the one with all.

        Nothing is written for items that are fixed: nobody asks for a table without them.
        """

    def exchange(self, field: Field, nodes: Nodes, node: int, search: Search) -> Exchange:
        """Return the best exchange of an item of ``node`` with one of a partner, the first of several."""

    def fill(self, field: Field, nodes: Nodes, which: Ints, out: Ints) -> None:
        """Write the tables of the nodes ``which`` with all their items into ``out``."""

    def joins(self, field: Field, kinds: Ints, item: int, tables: Ints, out: Longs) -> None:
        """Write into ``out`` what an item more adds to the value of each table; negative: it does not fit."""

    def worth(self, field: Field, kind: int, items: Ints) -> int:
        """Return the value of a node of a kind with these items; negative when they do not fit."""


class Search(NamedTuple):
    """The nodes between which exchanges are looked for."""

    partners: Ints
    slot: Ints
    """By node: the position of its tables."""
    tables: Ints
    """By (slot, position): as ``leave_out`` writes them."""
    moves: int
    """How many more running jobs may be moved."""


@cache
def division(*, compiled: bool = True) -> Division:
    """Return the compiled operations where numba is installed and they are wanted, else the plain ones."""
    if not compiled:
        return Plain()
    try:
        return cast("Division", import_module("cadenza.policies.allocation.cadenza.knapsack_numba").Compiled())
    except ImportError:
        return Plain()


class Plain:
    """The operations with numpy alone."""

    def divide(self, field: Field, nodes: Nodes, which: Ints, choice: Ints, total: Longs) -> None:
        """See ``Division``."""
        for node in which.tolist():
            kind = int(nodes.kind[node])
            items = nodes.items[node, : nodes.filled[node]].tolist()
            tables = [_empty(field, kind)]
            for item in items:
                tables.append(_insert(field, kind, tables[-1], item))
            best = tables[-1][-1, -1]
            total[node] = best
            if best < 0:
                continue
            row, column = np.unravel_index(int(np.argmax(tables[-1] == best)), tables[-1].shape)
            here = int(row) * int(field.width[kind]) + int(column)
            for item, before, after in zip(reversed(items), tables[-2::-1], tables[:0:-1], strict=True):
                choice[item] = option = _traced(field, kind, item, before.ravel(), here, int(after.ravel()[here]))
                here -= int(field.offset[option])

    def leave_out(self, field: Field, nodes: Nodes, node: int, out: Ints) -> None:
        """See ``Division``."""
        kind = int(nodes.kind[node])
        size = int(field.size[kind])
        items = nodes.items[node, : nodes.filled[node]].tolist()
        table = _empty(field, kind)
        for item in items:
            if field.fixed[item]:
                table = _insert(field, kind, table, item)
        loose = [position for position, item in enumerate(items) if not field.fixed[item]]

        def spread(table: Ints, lacking: list[int]) -> None:
            """Spread a table that lacks the items at some positions to those that lack one."""
            if len(lacking) == 1:
                out[lacking[0], :size] = table.ravel()
                out[len(items), :size] = _insert(field, kind, table, items[lacking[0]]).ravel()
                return
            middle = len(lacking) // 2
            for lack, put in ((lacking[:middle], lacking[middle:]), (lacking[middle:], lacking[:middle])):
                more = table
                for position in put:
                    more = _insert(field, kind, more, items[position])
                spread(more, lack)

        if loose:
            spread(table, loose)
        else:
            out[len(items), :size] = table.ravel()

    def exchange(self, field: Field, nodes: Nodes, node: int, search: Search) -> Exchange:
        """See ``Division``."""
        found = Exchange(0, -1, -1, -1)
        for partner in search.partners.tolist():
            if partner == node:
                continue
            net = _nets(field, nodes, node, partner, search)
            at = int(np.argmax(net))
            if net.flat[at] > found.net:
                mine, theirs = divmod(at, net.shape[1])
                found = Exchange(int(net.flat[at]), partner, mine, theirs)
        return found

    def fill(self, field: Field, nodes: Nodes, which: Ints, out: Ints) -> None:
        """See ``Division``."""
        for row, node in enumerate(which.tolist()):
            kind = int(nodes.kind[node])
            table = _empty(field, kind)
            for item in nodes.items[node, : nodes.filled[node]].tolist():
                table = _insert(field, kind, table, item)
            out[row, : field.size[kind]] = table.ravel()

    def joins(self, field: Field, kinds: Ints, item: int, tables: Ints, out: Longs) -> None:
        """See ``Division``."""
        out[:] = NEVER
        for kind in np.unique(kinds).tolist():
            first, last = field.start[item, kind], field.stop[item, kind]
            if first < last:
                rows = np.flatnonzero(kinds == kind)
                top = int(field.size[kind]) - 1
                after = tables[rows[:, None], top - field.offset[first:last]] + field.value[first:last].astype(np.int64)
                best = after.max(axis=1)
                out[rows] = np.where(best < 0, NEVER, best - tables[rows, top])

    def worth(self, field: Field, kind: int, items: Ints) -> int:
        """See ``Division``."""
        table = _empty(field, kind)
        for item in items.tolist():
            table = _insert(field, kind, table, item)
        return int(table[-1, -1])


def _empty(field: Field, kind: int) -> Ints:
    return np.zeros((int(field.size[kind]) // int(field.width[kind]), int(field.width[kind])), dtype=np.int32)


def _insert(field: Field, kind: int, table: Ints, item: int) -> Ints:
    """Return a table with one item more."""
    more = np.full_like(table, NEVER)
    first, last = field.start[item, kind], field.stop[item, kind]
    for offset, value in zip(field.offset[first:last].tolist(), field.value[first:last].tolist(), strict=True):
        row, column = divmod(offset, table.shape[1])
        here = more[row:, column:]
        np.maximum(here, table[: table.shape[0] - row, : table.shape[1] - column] + value, out=here)
    return more


def _traced(field: Field, kind: int, item: int, before: Ints, here: int, value: int) -> int:
    """Return the item's first option that leads from a table without it to ``value`` at entry ``here``."""
    width = int(field.width[kind])
    first, last = int(field.start[item, kind]), int(field.stop[item, kind])
    return next(
        option
        for option in range(first, last)
        if (offset := int(field.offset[option])) <= here
        and offset % width <= here % width
        and before[here - offset] + field.value[option] == value
    )


def _nets(field: Field, nodes: Nodes, node: int, partner: int, search: Search) -> Longs:
    """Return what each exchange between two nodes gains, moves paid for, over (mine, theirs); 0 if not possible."""
    mine, theirs = (nodes.items[at, : nodes.filled[at]] for at in (node, partner))
    here = search.tables[search.slot[node], : len(mine) + 1]
    there = search.tables[search.slot[partner], : len(theirs) + 1]
    gains_here = _replaced(field, int(nodes.kind[node]), here, theirs)
    gains_there = _replaced(field, int(nodes.kind[partner]), there, mine)
    now = int(gains_here[-1, -1]) + int(gains_there[-1, -1])
    paid, moves = _prices(field, node, partner, mine, theirs)
    more = np.append(field.gpus[theirs], 0)[None, :] - np.append(field.gpus[mine], 0)[:, None]
    possible = (gains_here >= 0) & (gains_there.T >= 0) & (moves <= search.moves)
    possible &= (more <= nodes.free[node]) & (-more <= nodes.free[partner])
    possible &= ~np.append(field.fixed[theirs], 0).astype(np.bool_)[None, :]
    possible &= ~np.append(field.fixed[mine], 0).astype(np.bool_)[:, None]
    return np.where(possible, gains_here + gains_there.T - now - paid, 0)


def _replaced(field: Field, kind: int, tables: Ints, items: Ints) -> Longs:
    """Return the best values over (table, item) with each item joining each table, and last with none."""
    top = int(field.size[kind]) - 1
    values = np.full((len(tables), len(items) + 1), NEVER, dtype=np.int64)
    for at, item in enumerate(items.tolist()):
        first, last = field.start[item, kind], field.stop[item, kind]
        if first < last:
            more = tables[:, top - field.offset[first:last]] + field.value[first:last].astype(np.int64)
            values[:, at] = more.max(axis=1)
    values[:, -1] = tables[:, top]
    return values


def _prices(field: Field, node: int, partner: int, mine: Ints, theirs: Ints) -> tuple[Longs, Longs]:
    """Return what each exchange costs and how many running jobs it moves, over (mine, theirs)."""
    out, back = _away(field, mine, node, partner), _away(field, theirs, partner, node)
    cost_out, cost_back = np.append(out * field.cost[mine], 0), np.append(back * field.cost[theirs], 0)
    moves_out, moves_back = np.append(out, 0), np.append(back, 0)
    return cost_out[:, None] + cost_back[None, :], moves_out[:, None] + moves_back[None, :]


def _away(field: Field, items: Ints, source: int, target: int) -> Longs:
    """Return 1 for an item that leaves home, -1 for one that comes back, else 0."""
    home = field.home[items]
    running = home >= 0
    steps: Longs = (running & (home != target)).astype(np.int64) - (running & (home != source)).astype(np.int64)
    return steps
