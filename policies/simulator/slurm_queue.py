"""Slurm's queue in a simulation: released pending jobs start in order of submission, each where its request is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cadenza.policies.core.model import Node, Placement, Share
from cadenza.policies.simulator.job import SimJob


class Request(NamedTuple):
    """Resources and nodes that a job asks Slurm for; jobs that ask alike start or wait alike."""

    partition: str
    required_nodes: tuple[str, ...]
    promised: Placement
    num_nodes: int
    gpus: int
    cpus: int
    memory_mb: int


class SlurmQueue:
    """Schedules as Slurm does on the lanes of this project, as a backfill without reservations.

    A job starts on lane 0 while GPUs are free there and on a further lane when not (node weights). A job of several
    nodes has all of them in one lane. A job that does not fit blocks no smaller one behind it.
    """

    def __init__(self, nodes: Iterable[Node], used: Mapping[str, list[int]]) -> None:
        self._used = used
        """GPUs, CPUs and MB in Slurm's books, by node; the world keeps them."""
        self._on_host: dict[str, list[str]] = {}
        for node in nodes:
            self._on_host.setdefault(node.host, []).append(node.name)
        self._jobs: set[SimJob] = set()
        self.changed = False
        """True if a job may start now that could not at the last look."""

    def add(self, job: SimJob) -> None:
        """Queue a job that Slurm may start."""
        self._jobs.add(job)
        self.changed = True

    def discard(self, job: SimJob) -> None:
        """Take a job out of the queue, or do nothing if it is not there."""
        self._jobs.discard(job)

    def starts(self, nodes: Mapping[str, Node]) -> Iterator[tuple[SimJob, Placement]]:
        """Yield the jobs that start now with what they get; the caller books each before it takes the next one."""
        self.changed = False
        vain: set[Request] = set()
        lanes: dict[int, list[Node]] = {}
        for node in sorted(nodes.values(), key=lambda node: node.name) if self._jobs else ():
            if node.up and not node.drained:
                lanes.setdefault(node.lane, []).append(node)
        for job in sorted(self._jobs, key=lambda job: (job.trace.submit_s, job.key)):
            request = Request(
                job.trace.partition,
                job.required_nodes,
                job.promised,
                max(job.num_nodes, 1),
                job.gpus,
                job.cpus,
                job.memory_mb,
            )
            placement = () if request in vain else self._place(request, lanes)
            if placement:
                self._jobs.discard(job)
                yield job, placement
            else:
                vain.add(request)
                job.state_reason = "Resources"
                job.stale.append(job)

    def _place(self, request: Request, lanes: Mapping[int, list[Node]]) -> Placement:
        """Return the shares that a request gets now, or none."""
        promised = tuple(share for share in request.promised if share.gpus)
        if promised and tuple(share.node for share in promised) == request.required_nodes:
            nodes = {node.name: node for lane in lanes.values() for node in lane}
            fits = all(share.node in nodes and self._fits(nodes[share.node], share) for share in promised)
            return promised if fits else ()
        for lane in sorted(lanes):
            chosen: list[Share] = []
            for node in lanes[lane]:
                if len(chosen) == request.num_nodes:
                    break
                share = even_share(request, len(chosen), node.name)
                if request.partition not in node.partitions:
                    continue
                if request.required_nodes and node.name not in request.required_nodes:
                    continue
                if self._fits(node, share):
                    chosen.append(share)
            if len(chosen) == request.num_nodes:
                return tuple(chosen)
        return ()

    def _fits(self, node: Node, share: Share) -> bool:
        """Return True if a lane has the GPUs and CPUs free, and its host the memory, which all lanes share."""
        gpus, cpus, _ = self._used[node.name]
        if gpus + share.gpus > node.gpus or cpus + share.cpus > node.cpus:
            return False
        return sum(self._used[name][2] for name in self._on_host[node.host]) + share.memory_mb <= node.memory_mb


def even_share(request: SimJob | Request, index: int, node: str) -> Share:
    """Return one node's part of an even spread of a request."""
    count = max(request.num_nodes, 1)
    gpus = request.gpus * (index + 1) // count - request.gpus * index // count
    total = max(request.gpus, 1)
    return Share(node, gpus, request.cpus * gpus // total, request.memory_mb * gpus // total)
