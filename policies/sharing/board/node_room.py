"""Room on Slurm's nodes: free resources, those that jobs leave soon, and the smallest eviction for a job (pure).

Nodes are taken as Slurm has them, each lane as a node of its own: only Slurm starts jobs, so only its allocation
counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import nsmallest
from typing import NamedTuple

from cadenza.policies.core.amounts import Amount, fits, less, more
from cadenza.policies.core.idle_gpus import suits
from cadenza.policies.core.model import ClusterSnapshot, Job, Node


def lane0(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes of lane 0 that are up and not drained."""
    return [node for node in nodes if node.lane == 0 and node.up and not node.drained]


def left_beside(jobs: Iterable[Job], nodes: Iterable[Node]) -> dict[str, Amount]:
    """Return the amount of each node that these jobs leave free, whatever else runs there."""
    left = {node.name: (node.gpus, node.cpus, node.memory_mb) for node in nodes}
    for job in jobs:
        for name, amount in job.amounts.items():
            if name in left:
                left[name] = less(left[name], amount)
    return left


class NodeRequest(NamedTuple):
    """Resources that a job needs on each of so many nodes, and what rules nodes out; equal requests fit alike."""

    nodes: int
    each: Amount
    partition: str
    gpu_type: str
    barred: frozenset[str]
    required: tuple[str, ...]


class Victim(NamedTuple):
    """A running job that may make way."""

    job: Job
    level: int
    shares: Mapping[str, Amount]
    """Resources that it has, by node."""
    lost_s: float = 0.0
    """Training that it would repeat, in seconds."""


class NodeRoom:
    """Free resources by node, as the walk through the queue gives them out, and the jobs that may make way there."""

    def __init__(self, snapshot: ClusterSnapshot, victims: Iterable[Victim], leaving: Iterable[Job]) -> None:
        usable = (node for node in snapshot.nodes if node.gpus > 0 and (node.takes_jobs or node.asleep))
        self.nodes = {node.name: node for node in sorted(usable, key=lambda one: (one.lane, one.weight, one.name))}
        """Nodes on which Slurm starts jobs, in its order; those that it has powered down it wakes for them."""
        self.widest = max((node.gpus for node in self.nodes.values()), default=0)
        self.free: dict[str, Amount] = {
            node.name: (node.gpus - node.gpus_used, node.cpus - node.cpus_used, node.memory_mb - node.memory_used_mb)
            for node in self.nodes.values()
        }
        self._idle = {name for name, free in self.free.items() if free[0] > 0}
        """Nodes with free GPUs: a few of many, where jobs wait."""
        for job in leaving:
            self._give_back(job.amounts)
        self.on: defaultdict[str, list[Victim]] = defaultdict(list)
        """By node, jobs of the worst level first, of equals those that repeat least, then the one that started last."""
        for victim in sorted(victims, key=lambda one: (-one.level, one.lost_s, -(one.job.start_s or 0.0), one.job.key)):
            for name in victim.shares:
                if name in self.nodes:
                    self.on[name].append(victim)
        self.worst_level = max((one.level for found in self.on.values() for one in found), default=-1)
        self._admitting: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._widest_of: dict[str, int] = {}
        self._in_partition: defaultdict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for name in node.partitions:
                self._in_partition[name].append(node)

    def request(self, job: Job) -> NodeRequest:
        """Return a job's needs on each node; more GPUs than the widest node has are spread over whole nodes."""
        widest = self._widest_of.get(job.partition)
        if widest is None:
            widest = max((node.gpus for node in self._nodes_of(job.partition)), default=1)
            self._widest_of[job.partition] = widest
        count = max(job.num_nodes, -(-job.gpus // widest), 1)
        return NodeRequest(count, job.part(count), job.partition, job.gpu_type, job.barred, job.required_nodes)

    def _nodes_of(self, partition: str) -> Iterable[Node]:
        """Return the nodes of a partition, or of all that a waiting job names (``a,b``), each once."""
        if "," not in partition:
            return self._in_partition.get(partition, ())
        found = {node.name: node for name in partition.split(",") for node in self._in_partition.get(name, ())}
        return found.values()

    def admitting(self, request: NodeRequest) -> tuple[str, ...]:
        """Return the nodes on which Slurm may start such a job, in the order of their weights."""
        rules = request[2:]
        if rules not in self._admitting:
            self._admitting[rules] = tuple(
                node.name
                for node in self._nodes_of(request.partition)
                if suits(node, *request[2:5]) and (not request.required or node.name in request.required)
            )
        return self._admitting[rules]

    def fits(self, request: NodeRequest, names: Iterable[str]) -> tuple[str, ...]:
        """Return nodes that are free for a job now or soon; empty if there are too few."""
        if not self._idle:
            return ()
        gpus, cpus, memory_mb = request.each
        if sum(1 for name in self._idle if fits(request.each, self.free[name])) < request.nodes:
            return ()
        found: list[str] = []
        for name in names:
            free = self.free[name]
            if gpus <= free[0] and cpus <= free[1] and memory_mb <= free[2]:
                found.append(name)
                if len(found) == request.nodes:
                    return tuple(found)
        return ()

    def least_eviction(
        self, request: NodeRequest, names: Iterable[str], may: Callable[[Victim], bool], above: int = -1
    ) -> tuple[tuple[str, ...], tuple[Victim, ...]] | None:
        """Return the nodes on which the fewest GPUs of jobs must be given up for a request, and these jobs.

        Of equal nodes those whose jobs repeat the least GPU time. None if no nodes can be freed. ``may``: whether a job
        would make way; only jobs of a level above ``above`` are asked.
        """
        options: list[tuple[int, float, int, str, tuple[Victim, ...]]] = []
        for at, name in enumerate(names):
            victims = self._enough(name, request.each, may, above)
            if victims is not None:
                lost_s = sum(one.job.gpus * one.lost_s for one in victims)
                options.append((sum(one.job.gpus for one in victims), lost_s, at, name, victims))
        if len(options) < request.nodes:
            return None
        chosen = nsmallest(request.nodes, options, key=lambda option: option[:3])
        unique = {one.job.key: one for option in chosen for one in option[4]}
        return tuple(option[3] for option in chosen), tuple(unique.values())

    def _enough(self, name: str, need: Amount, may: Callable[[Victim], bool], above: int) -> tuple[Victim, ...] | None:
        """Return jobs of a node without which a request fits there: none if it fits now, None if too few may leave."""
        free = self.free[name]
        if fits(need, free):
            return ()
        chosen: list[Victim] = []
        for victim in self.on.get(name, ()):
            if victim.level <= above:
                return None
            if may(victim):
                chosen.append(victim)
                free = more(free, victim.shares[name])
                if fits(need, free):
                    break
        else:
            return None
        # The last ones may have made the first ones unnecessary.
        for victim in chosen[:-1]:
            fewer = less(free, victim.shares[name])
            if fits(need, fewer):
                chosen.remove(victim)
                free = fewer
        return tuple(chosen)

    def take(self, request: NodeRequest, names: Iterable[str]) -> None:
        """Give the resources of nodes to a job that Slurm starts there."""
        for name in names:
            self._set(name, less(self.free[name], request.each))

    def give_back(self, request: NodeRequest, names: Iterable[str]) -> None:
        """Take back what ``take`` gave."""
        for name in names:
            self._set(name, more(self.free[name], request.each))

    def evict(self, victims: Iterable[Victim]) -> None:
        """Free what jobs have that make way."""
        for victim in victims:
            self._give_back(victim.shares)
            for name in victim.shares:
                self.on[name] = [one for one in self.on[name] if one.job.key != victim.job.key]

    def _give_back(self, shares: Mapping[str, Amount]) -> None:
        for name, amount in shares.items():
            if name in self.free:
                self._set(name, more(self.free[name], amount))

    def _set(self, name: str, free: Amount) -> None:
        self.free[name] = free
        if free[0] > 0:
            self._idle.add(name)
        else:
            self._idle.discard(name)
