"""Jobs without GPUs in a simulation: Slurm starts them by itself, and a host has its CPUs and memory without theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from cadenza.policies.core.model import Node
from cadenza.policies.inputs.cluster import widest_nodes
from cadenza.policies.inputs.trace import TraceJob


class CpuLoad:
    """The load: jobs that wait, in order of submission, and those that run.

    A job starts on the fewest hosts of its partition, where lane 0 has room; one that waits keeps none behind it
    waiting. All lanes of a host lose what it takes, so that no other job is started on the same CPUs.
    """

    def __init__(self, jobs: Sequence[TraceJob], nodes: Sequence[Node], used: Mapping[str, list[int]]) -> None:
        self._used = used
        """GPUs, CPUs and MB of the jobs with GPUs, by node; the world keeps them."""
        self._widest = widest_nodes(nodes)
        self._lanes: dict[str, list[str]] = {}
        for node in sorted(nodes, key=lambda node: (node.host, node.lane)):
            self._lanes.setdefault(node.host, []).append(node.name)
        self._arrivals = sorted(jobs, key=lambda job: (job.submit_s, job.id), reverse=True)
        self._waiting: list[TraceJob] = []
        self.has_new = False
        """True if a job has been submitted since jobs were last started."""
        self._running: list[tuple[float, int, tuple[str, ...], int, int]] = []
        """The end of each job, its id, its hosts, and its CPUs and MB on each of them."""

    @property
    def next_event_s(self) -> float:
        """Return the time of the next submission or end; infinite without any."""
        end_s = self._running[0][0] if self._running else inf
        return min(self._arrivals[-1].submit_s, end_s) if self._arrivals else end_s

    def advance(self, now_s: float, nodes: Mapping[str, Node]) -> Iterator[Node]:
        """End and submit jobs; yield each node that has changed, which the caller replaces at once."""
        while self._running and self._running[0][0] <= now_s:
            _, _, hosts, cpus, memory_mb = heappop(self._running)
            yield from self._less(hosts, -cpus, -memory_mb, nodes)
        while self._arrivals and self._arrivals[-1].submit_s <= now_s:
            self._waiting.append(self._arrivals.pop())
            self.has_new = True

    def starts(self, now_s: float, nodes: Mapping[str, Node]) -> Iterator[Node]:
        """Start the jobs that fit; yield each node that has changed, which the caller replaces at once."""
        vain: set[tuple[str, int, int, int]] = set()
        self.has_new = False
        for job in self._waiting[:]:
            widest = self._widest[job.partition]
            count = job.fewest_nodes(widest)
            cpus = -(-job.cpus_on(widest) // count)
            memory_mb = -(-job.memory_mb // count)
            request = (job.partition, count, cpus, memory_mb)
            hosts = () if request in vain else self._room(*request, nodes)
            if hosts:
                self._waiting.remove(job)
                heappush(self._running, (now_s + job.work_s, job.id, hosts, cpus, memory_mb))
                yield from self._less(hosts, cpus, memory_mb, nodes)
            else:
                vain.add(request)

    def _room(
        self, partition: str, count: int, cpus: int, memory_mb: int, nodes: Mapping[str, Node]
    ) -> tuple[str, ...]:
        """Return the first hosts with room for a job, nothing if there are too few."""
        found = []
        for host, names in self._lanes.items():
            node = nodes[names[0]]
            if (
                partition in node.partitions
                and node.takes_jobs
                and self._used[node.name][1] + cpus <= node.cpus
                and sum(self._used[name][2] for name in names) + memory_mb <= node.memory_mb
            ):
                found.append(host)
                if len(found) == count:
                    return tuple(found)
        return ()

    def _less(self, hosts: Sequence[str], cpus: int, memory_mb: int, nodes: Mapping[str, Node]) -> Iterator[Node]:
        for host in hosts:
            for name in self._lanes[host]:
                yield replace(nodes[name], cpus=nodes[name].cpus - cpus, memory_mb=nodes[name].memory_mb - memory_mb)
