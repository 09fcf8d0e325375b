"""Failure files: a CSV of ``node,start_s,end_s``, when which host is down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.inputs.csv_table import number, quoted, read_table, suggest
from cadenza.policies.inputs.trace import LATEST_S


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A node is down from ``start_s`` to ``end_s``; its jobs restart from their last checkpoint."""

    node: str
    start_s: float
    end_s: float


def read_failures(text: str, source: str, nodes: Sequence[Node]) -> tuple[NodeFailure, ...]:
    """Return the failures in order of their starts, then nodes; all lanes of a host fail together.

    ``end_s`` must be after ``start_s``, and failures of one node must not overlap. Raise InputError with file and line.
    """
    table = read_table(text, source, ("node", "start_s", "end_s"))
    hosts = sorted({node.host for node in nodes})
    known = set(hosts)
    found: list[tuple[NodeFailure, int]] = []
    for line, cells in table.rows:
        node, start, end = (cells[table.columns.index(name)] for name in ("node", "start_s", "end_s"))
        if node not in known:
            raise InputError(f"{source}:{line}: node: there is no {quoted(node)}; {suggest(node, hosts)}")
        start_s = number(start, table.at(line, "start_s"), 0.0, LATEST_S)
        end_s = number(end, table.at(line, "end_s"), 0.0, LATEST_S)
        if end_s <= start_s:
            raise InputError(f"{source}:{line}: end_s: {end_s:g} is not after start_s, {start_s:g}")
        found.append((NodeFailure(node, start_s, end_s), line))
    ordered = sorted(found, key=lambda item: (item[0].node, item[0].start_s, item[1]))
    for (before, first), (after, line) in pairwise(ordered):
        if before.node == after.node and after.start_s < before.end_s:
            raise InputError(f"{source}:{line}: {after.node} is down already, until {before.end_s:g} by line {first}")
    return tuple(sorted((failure for failure, _ in found), key=lambda item: (item.start_s, item.node, item.end_s)))
