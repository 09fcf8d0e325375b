"""The state of one placement: which job, or part of a job, sits on which node."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from cadenza.policies.allocation.pareto import Row, kinds, offers, part
from cadenza.policies.allocation.problem import Case


class Assignment:
    """Jobs on nodes. An *item* is a job, or the part that one node has of a job on several nodes.

    Items and nodes are numbers: jobs in order of their keys, then the parts; nodes in order of their names. So the
    order in which a case lists them changes nothing.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.servers = sorted(case.servers)
        self.jobs = sorted(case.jobs[: case.runnable], key=attrgetter("key"))
        profiles = {job.profile for job in self.jobs if job.profile is not None}
        kind_of = kinds(self.servers, profiles.union(*(profile.siblings.values() for profile in profiles)))
        self.kinds = list(kind_of.values())
        numbers = {shape: number for number, shape in enumerate(kind_of)}
        self.kind_of = [numbers[server[1:]] for server in self.servers]
        self.node_of = {server.name: number for number, server in enumerate(self.servers)}
        self.free = [server.gpus for server in self.servers]
        self.members: list[list[int]] = [[] for _ in self.servers]
        """Items by node, ascending."""
        self.gpus = [job.gpus for job in self.jobs]
        self.where = [-1] * len(self.jobs)
        self.home = [-1] * len(self.jobs)
        """By item: the node where it stays without a move; -1 for a job that does not run, and for parts."""
        self.parts: dict[int, list[int]] = {}
        """The items of each job on several nodes."""
        self.rows = offers(self.jobs, self.kinds, case.margin)
        """By item: its options by kind; None where it may not sit."""
        self.types = {kind.gpu_type for kind in self.kinds}
        if case.gpu_type and len(self.types) > 1:
            self.rows = [
                [options if self.may(item, kind) else None for kind, options in enumerate(row)]
                for item, row in enumerate(self.rows)
            ]

    def may(self, item: int, kind: int) -> bool:
        """Return whether the ordering lets a job use a kind of node; a type that no node has is no restriction."""
        want = self.case.gpu_type.get(self.jobs[item].key, "") if self.case.gpu_type else ""
        return not want or want not in self.types or self.kinds[kind].gpu_type == want

    def allow(self, item: int) -> None:
        """Let a job use every kind of node: those that the ordering chose are full."""
        self.rows[item] = offers(self.jobs[item : item + 1], self.kinds, self.case.margin)[0]

    def weight(self, item: int) -> int:
        """Return how often a job's speed counts."""
        return self.jobs[item].gpus if self.case.weighted else 1

    def best(self, item: int) -> float:
        """Return the most that a job's speed can count on one node; 1 where it needs several."""
        speeds = [options.best for options in self.rows[item] if options is not None]
        return max(speeds, default=1.0) * self.weight(item)

    def price(self, item: int) -> float:
        """Return the gain in speeds that pays for moving a running job: at most its loss during the move."""
        costs = self.case.costs
        return self.best(item) * costs.move_s / costs.horizon_s

    # --- seats -----------------------------------------------------------------------------------------

    def assign(self, item: int, node: int) -> None:
        """Put an item on a node that has the GPUs."""
        insort(self.members[node], item)
        self.where[item] = node
        self.free[node] -= self.gpus[item]

    def unassign(self, item: int) -> None:
        """Take an item off its node."""
        node = self.where[item]
        self.members[node].remove(item)
        self.where[item] = -1
        self.free[node] += self.gpus[item]

    def split(self, job: int, spots: Iterable[tuple[int, int]]) -> None:
        """Put a job on several nodes, given as (node, GPUs)."""
        self.parts[job] = []
        for node, gpus in spots:
            item = len(self.gpus)
            kind = self.kind_of[node]
            row: Row = [None] * len(self.kinds)
            row[kind] = part(self.jobs[job].profile, self.kinds[kind], gpus, self.case.margin)
            self.rows.append(row)
            self.gpus.append(gpus)
            self.where.append(-1)
            self.home.append(-1)
            self.assign(item, node)
            self.parts[job].append(item)

    def join(self, job: int) -> None:
        """Take a job off its several nodes; its parts stay as items that sit nowhere."""
        for item in self.parts.pop(job):
            self.unassign(item)
