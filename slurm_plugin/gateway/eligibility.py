"""Nodes on which Slurm would not start a job: constraint, excluded nodes, and reservations (pure).

The service chooses the nodes of held jobs and of moves. A required node that Slurm refuses leaves a job pending with
priority 0 (BadConstraints), or until a reservation has ended.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, Self, TypeAlias

from cadenza.policies.core.model import Node

Raw: TypeAlias = Mapping[str, Any]
Term: TypeAlias = "str | tuple[Term, ...]"
"""A feature, or terms with the operators ``&`` and ``|`` between them, from left to right (sbatch(1), --constraint)."""

MAX_DEPTH = 3
"""Nested brackets that are read; Slurm itself has one level of parentheses within one of brackets."""
MAX_CONSTRAINT = 4096
_TOKEN = re.compile(r"[&|()\[\]]|[^&|()\[\]*!{}\s]+(?:\*\d+)?")
_COUNT = re.compile(r"\*\d+")
_LANES = re.compile(r"\[lane\d+(\|lane\d+)*\]")
"""The constraint of job_submit.lua that keeps a job in one lane, as placement does."""


@lru_cache(1024)
def parse(constraint: str, *, one_node: bool) -> Term | None:
    """Return a constraint as a tree; None if it cannot be judged for each node by itself.

    That is text which is not of Slurm's syntax, and, for a job of several nodes, counts and alternatives in brackets,
    which bind its nodes together.
    """
    text = constraint if one_node else _LANES.sub("()", constraint)
    if len(text) > MAX_CONSTRAINT or (not one_node and re.search(r"[\[*]", text)):
        return None
    text = _COUNT.sub("", text)
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        return None
    stack: list[list[Term]] = [[]]
    for token in tokens:
        if token in ("(", "["):
            stack.append([])
        elif token in (")", "]"):
            if len(stack) == 1:
                return None
            group = tuple(stack.pop())
            stack[-1].append(group)
        else:
            stack[-1].append(token)
        if len(stack) > MAX_DEPTH:
            return None
    found = tuple(stack[0])
    return found if len(stack) == 1 and _well_formed(found) else None


def _well_formed(term: Term) -> bool:
    """Return True if terms and operators alternate; an empty group is always met."""
    if isinstance(term, str):
        return term not in ("&", "|")
    parts, operators = term[::2], term[1::2]
    return (
        (not term or len(term) % 2 == 1) and all(map(_well_formed, parts)) and all(o in ("&", "|") for o in operators)
    )


def met(term: Term, features: frozenset[str]) -> bool:
    """Return True if a node with these features meets a constraint."""
    if isinstance(term, str):
        return term in features
    result = True
    for operator, part in zip(("&", *term[1::2]), term[::2], strict=False):
        result = (result and met(part, features)) if operator == "&" else (result or met(part, features))
    return result


def _constraint(raw: Raw) -> str:
    """Return a job's constraint; pyslurm splits it at commas, which Slurm reads as ``&``."""
    return "&".join(raw.get("constraints") or ())


def unreadable_reason(raw: Raw) -> str | None:
    """Return why the nodes that a job may have cannot be told from its request; None if they can."""
    constraint = _constraint(raw)
    if constraint and parse(constraint, one_node=(raw["num_nodes"] or 1) == 1) is None:
        return "its constraint binds several nodes together, or cannot be read: Slurm chooses the nodes"
    return None


class _Asked(NamedTuple):
    """The parts of a job's request that rule nodes out."""

    constraint: str
    one_node: bool
    excluded: tuple[str, ...]
    own: frozenset[str]
    """Reservations that the job is submitted to."""
    others: tuple[str, ...]
    """Reservations of others that the job could reach into."""


@dataclass(frozen=True)
class Site:
    """The nodes with their features, and the reservations, at one moment; times in seconds since the epoch."""

    now_s: float
    features: Mapping[str, frozenset[str]]
    lanes: Mapping[str, frozenset[str]]
    """By node, all nodes of its host."""
    reservations: tuple[tuple[str, float, frozenset[str]], ...]
    """Name, start and nodes."""
    _known: dict[_Asked, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Raw, nodes: Sequence[Node]) -> Self:
        """Return the site of one answer of the worker."""
        by_host: defaultdict[str, set[str]] = defaultdict(set)
        for node in nodes:
            by_host[node.host].add(node.name)
        return cls(
            float(raw["time_s"]),
            {one["name"]: frozenset(one["available_features"]) for one in raw["nodes"]},
            {node.name: frozenset(by_host[node.host]) for node in nodes},
            tuple(
                (one["name"], float(one["start_time"] or 0), frozenset(one["nodes"]))
                for one in raw.get("reservations", ())
            ),
        )

    def barred(self, job: Raw) -> frozenset[str]:
        """Return the nodes on which Slurm would not start a job now; equal requests share one set."""
        own = frozenset((job.get("reservation") or "").split(",")) - {""}
        # Slurm starts a job on nodes of a later reservation only if its time limit ends before that begins.
        ends_s = self.now_s + 60.0 * job["time_limit"] if job.get("time_limit") else inf
        asked = _Asked(
            _constraint(job),
            (job["num_nodes"] or 1) == 1,
            tuple(job.get("excluded_nodes") or ()),
            own,
            tuple(name for name, start_s, _ in self.reservations if name not in own and start_s < ends_s),
        )
        if asked not in self._known:
            self._known[asked] = self._barred(asked)
        return self._known[asked]

    def _barred(self, asked: _Asked) -> frozenset[str]:
        term = parse(asked.constraint, one_node=asked.one_node)
        barred = {name for name, features in self.features.items() if term is None or not met(term, features)}
        taken = [nodes for name, _, nodes in self.reservations if name in asked.others]
        # An excluded or reserved node stands for all lanes of its host, which have the same GPUs.
        for name in frozenset(asked.excluded).union(*taken):
            barred |= self.lanes.get(name, frozenset())
        # A job of a reservation starts on the nodes of that one alone, and not before it begins.
        if asked.own:
            active = [
                nodes for name, start_s, nodes in self.reservations if name in asked.own and start_s <= self.now_s
            ]
            barred |= self.features.keys() - frozenset().union(*active)
        return frozenset(barred)
