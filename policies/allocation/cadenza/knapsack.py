"""Exact division of nodes among their jobs by dynamic programming: one set of loops, compiled where numba is installed.

A table holds, for each amount of CPUs (rows) and memory (columns, next to each other), the highest total value of
some jobs within it, or a negative number where they do not fit. Values are whole numbers, so that a sum does not
depend on its order. Without numba the interpreter runs the same loops: the same plans, fast enough for small clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
NEVER = -(1 << 30)
MAX_NODE_VALUE = 1 << 29
"""Highest sum of values on one node, so that ``NEVER`` with values added stays negative."""


class Field(NamedTuple):
    """Constants of one placement: sizes of node kinds, jobs and their options on each kind."""

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
    """By (item, kind): its first option, and the one after its last; equal where the job may not run."""
    best: Ints
    """By (item, kind): the highest value of its options; ``NEVER`` without any."""
    gpus: Ints
    """By item."""
    home: Ints
    """By item: the node where it runs now, or -1."""
    cost: Longs
    """By item: the value that a move away from home must gain."""
    fixed: NDArray[np.bool_]
    """By item: True if it stays, for now or because it is part of a job on several nodes."""


class Nodes(NamedTuple):
    """The items on each node, all by node."""

    kind: Ints
    items: Ints
    """By (node, position): items in ascending order; meaningless from ``filled`` on."""
    filled: Ints
    """Number of items."""
    free: Ints
    """Free GPUs."""


class Exchange(NamedTuple):
    """Two items to change places; a position after the last is nothing, so that the other one moves."""

    net: int
    """Gain, with the cost of the moves deducted; 0: there is no exchange."""
    partner: int
    mine: int
    theirs: int


class Search(NamedTuple):
    """The nodes between which exchanges are looked for."""

    partners: Ints
    slot: Ints
    """By node: the position of its tables."""
    tables: Ints
    """By (slot, position): as ``leave_out`` writes them."""
    moves: int
    """Number of running jobs that may still be moved."""


Function = TypeVar("Function", bound=Callable[..., Any])
MAX_DEPTH = 12
"""Levels of halving; enough for 2048 items on a node."""


def _compiled(function: Function) -> Function:
    """Compile a function on its first call and cache the result on disk where possible; without numba return it."""
    try:
        jit = import_module("numba").njit
    except ImportError:
        return function
    try:
        return cast("Function", jit(cache=True)(function))
    except RuntimeError:
        return cast("Function", jit(function))


@_compiled
def _insert(field: Field, kind: int, item: int, table: Ints, more: Ints, low: int) -> int:
    """Write into ``more`` the table with one item more, and return its first row in which anything fits.

    ``low`` is that of ``table``.
    """
    width, size = field.width[kind], field.size[kind]
    more[:size] = NEVER
    first = size // width
    for option in range(field.start[item, kind], field.stop[item, kind]):
        offset, value = field.offset[option], field.value[option]
        row = offset // width
        column = offset - row * width
        first = min(first, row)
        for begin in range((low + row) * width, size, width):
            here = more[begin + column : begin + width]
            before = table[begin - row * width : begin - row * width + width - column]
            for at in range(width - column):
                here[at] = max(here[at], before[at] + value)
    below: int = low + first
    return below


@_compiled
def divide(field: Field, nodes: Nodes, which: Ints, choice: Ints, total: Longs) -> None:
    """Write each item's best option into ``choice`` and each node's value into ``total``, for the nodes ``which``.

    Of several best divisions it is one with fewest CPUs in all, then least memory. Where the items do not fit the
    total is negative and nothing is chosen.
    """
    tables = np.empty((nodes.items.shape[1] + 1, field.size.max()), np.int32)
    for node in which:
        kind, count = nodes.kind[node], nodes.filled[node]
        width, size = field.width[kind], field.size[kind]
        tables[0, :size] = 0
        low = 0
        for at in range(count):
            low = _insert(field, kind, nodes.items[node, at], tables[at], tables[at + 1], low)
        total[node] = tables[count, size - 1]
        if total[node] < 0:
            continue
        here = 0
        while tables[count, here] != total[node]:
            here += 1
        for at in range(count - 1, -1, -1):
            item = nodes.items[node, at]
            for option in range(field.start[item, kind], field.stop[item, kind]):
                offset = field.offset[option]
                fits = offset <= here and offset % width <= here % width
                if fits and tables[at, here - offset] + field.value[option] == tables[at + 1, here]:
                    choice[item] = option
                    here -= offset
                    break


@_compiled
def leave_out(field: Field, nodes: Nodes, node: int, out: Ints) -> None:
    """Write into ``out[k]`` the table of a node without its item at position k, and last the one with all.

    Nothing is written for fixed items: no exchange needs a table without them.
    """
    kind, count = nodes.kind[node], nodes.filled[node]
    size = field.size[kind]
    order = np.empty(count, np.int64)  # the fixed items first
    fixed = 0
    for at in range(count):
        if field.fixed[nodes.items[node, at]]:
            order[fixed] = at
            fixed += 1
    loose = fixed
    for at in range(count):
        if not field.fixed[nodes.items[node, at]]:
            order[loose] = at
            loose += 1
    work = np.empty((MAX_DEPTH, 2, size), np.int32)
    work[0, fixed % 2] = 0
    lows = np.zeros(MAX_DEPTH, np.int64)
    for at in range(fixed):
        item = nodes.items[node, order[at]]
        lows[0] = _insert(field, kind, item, work[0, (fixed - at) % 2], work[0, (fixed - at - 1) % 2], lows[0])
    if fixed == count:
        out[count, :size] = work[0, 0]
        return
    todo = np.zeros((2 * MAX_DEPTH, 5), np.int64)  # lacks from, to; level; put from, to
    todo[0, 0], todo[0, 1] = fixed, count
    left = 1
    while left:
        left -= 1
        first, last, level, put, end = todo[left]
        low = lows[level - 1] if level else lows[0]
        for at in range(put, end):
            item = nodes.items[node, order[at]]
            source = work[level - 1, 0] if at == put else work[level, (end - at) % 2]
            low = _insert(field, kind, item, source, work[level, (end - at - 1) % 2], low)
        lows[level] = low
        if last - first == 1:
            out[order[first], :size] = work[level, 0]
        else:
            middle = (first + last) // 2
            todo[left] = (middle, last, level + 1, first, middle)
            todo[left + 1] = (first, middle, level + 1, middle, last)
            left += 2
    _insert(field, kind, nodes.items[node, order[count - 1]], out[order[count - 1]], out[count], 0)


@_compiled
def _join(field: Field, kind: int, item: int, table: Ints) -> int:
    """Return the value of a table with one item more."""
    top = field.size[kind] - 1
    best = NEVER
    for option in range(field.start[item, kind], field.stop[item, kind]):
        best = max(best, table[top - field.offset[option]] + field.value[option])
    return best


@_compiled
def _side(field: Field, nodes: Nodes, source: int, target: int, side: Longs) -> int:
    """Write what matters of each item of ``source`` that may go to ``target``, and last of none; return how many.

    The rows are its position, its GPUs, how many more jobs are then away from home, what that costs, its best value.
    """
    kind, loose = nodes.kind[target], 0
    for at in range(nodes.filled[source]):
        item = nodes.items[source, at]
        if not field.fixed[item]:
            home = field.home[item]
            away = 0 if home < 0 else int(home != target) - int(home != source)
            side[0, loose] = at
            side[1, loose] = field.gpus[item]
            side[2, loose] = away
            side[3, loose] = away * field.cost[item]
            side[4, loose] = field.best[item, kind]
            loose += 1
    side[:, loose] = 0
    side[0, loose] = nodes.filled[source]
    return loose + 1


@_compiled
def _best_exchange(field: Field, nodes: Nodes, node: int, search: Search) -> tuple[int, int, int, int]:
    """Return the fields of the best ``Exchange``."""
    found = (0, -1, -1, -1)
    kind, count = nodes.kind[node], nodes.filled[node]
    top = field.size[kind] - 1
    mine, sides = search.tables[search.slot[node]], np.zeros((2, 5, nodes.items.shape[1] + 1), np.int64)
    places, gpus, away, cost, best = sides[0]
    places_there, gpus_there, away_there, cost_there, best_there = sides[1]
    for partner in search.partners:
        if partner == node:
            continue
        other, many = nodes.kind[partner], nodes.filled[partner]
        theirs, highest = search.tables[search.slot[partner]], field.size[other] - 1
        now = mine[count, top] + theirs[many, highest]
        ways, ways_there = _side(field, nodes, node, partner, sides[0]), _side(field, nodes, partner, node, sides[1])
        for one in range(ways):
            a = places[one]
            for two in range(ways_there):
                b = places_there[two]
                more, moves = gpus_there[two] - gpus[one], away[one] + away_there[two]
                if more > nodes.free[node] or -more > nodes.free[partner] or moves > search.moves:
                    continue
                above = now + found[0] + cost[one] + cost_there[two]
                here, there = mine[a, top], theirs[b, highest]
                if here + best_there[two] + there + best[one] <= above:
                    continue  # even with all that the nodes have for each, it is no better
                if b < many:
                    here = _join(field, kind, nodes.items[partner, b], mine[a])
                if a < count:
                    there = _join(field, other, nodes.items[node, a], theirs[b])
                if min(here, there) >= 0 and here + there > above:
                    found = (found[0] + here + there - above, partner, a, b)
    return found


def exchange(field: Field, nodes: Nodes, node: int, search: Search) -> Exchange:
    """Return the best exchange of an item of ``node`` with one of a partner, the first of several."""
    return Exchange(*_best_exchange(field, nodes, node, search))


@_compiled
def fill(field: Field, nodes: Nodes, which: Ints, out: Ints) -> None:
    """Write the tables of the nodes ``which`` with all their items into ``out``."""
    spare = np.empty(field.size.max(), np.int32)
    for row in range(len(which)):
        node = which[row]
        kind, count = nodes.kind[node], nodes.filled[node]
        size = field.size[kind]
        out[row, :size] = 0
        low = 0
        for at in range(count):
            spare[:size] = out[row, :size]
            low = _insert(field, kind, nodes.items[node, at], spare, out[row], low)


@_compiled
def worth(field: Field, kind: int, items: Ints) -> int:
    """Return the value of a node of a kind with these items; negative when they do not fit."""
    size = field.size[kind]
    tables = np.empty((2, size), np.int32)
    tables[0] = 0
    low = 0
    for at in range(len(items)):
        low = _insert(field, kind, items[at], tables[at % 2], tables[(at + 1) % 2], low)
    value: int = tables[len(items) % 2, size - 1]
    return value


@_compiled
def joins(field: Field, kinds: Ints, item: int, tables: Ints, out: Longs) -> None:
    """Write into ``out`` the value that one more item adds to each table; negative: it does not fit."""
    for row in range(len(kinds)):
        after = _join(field, kinds[row], item, tables[row])
        out[row] = NEVER if after < 0 else after - tables[row, field.size[kinds[row]] - 1]
