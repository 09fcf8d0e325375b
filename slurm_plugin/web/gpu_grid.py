"""The GPUs of each host as small squares, and the figures of each partition (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.idle_gpus import HOLDING, awaited_hosts, free_gpus
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.slurm_plugin.service.accounting.usage import narrowest_waiting
from cadenza.slurm_plugin.views.cluster_view import GpuRow


class Square(NamedTuple):
    """One GPU: *held*, *free*, *awaited* (free while a job waits that fits) or *closed*, and jobs that wait for it."""

    state: str
    holder: int | None
    waiting: int


class HostSquares(NamedTuple):
    """One host with its GPUs, and the same in words."""

    name: str
    squares: tuple[Square, ...]
    text: str


@dataclass(slots=True)
class PartitionRow:
    """Hosts, GPUs and jobs of one partition; a host may be in several."""

    name: str
    hosts: int = 0
    gpus: int = 0
    held: int = 0
    free: int = 0
    closed: int = 0
    running: int = 0
    waiting: int = 0
    """Jobs that wait for their turn."""
    queued: int = 0


def squares(snapshot: ClusterSnapshot, memory: Memory, rows: Sequence[GpuRow]) -> tuple[HostSquares, ...]:
    """Return the hosts in order."""
    free_hosts = free_gpus(snapshot)
    awaited = awaited_hosts(free_hosts, narrowest_waiting(snapshot, memory))
    nodes = {node.name: node for node in snapshot.nodes}
    by_host: defaultdict[str, list[GpuRow]] = defaultdict(list)
    for row in rows:
        by_host[row.host].append(row)
    found = []
    for at, host in enumerate(free_hosts):
        node = nodes[host.name]
        here = by_host[node.host]
        held = host.gpus - host.idle if node.takes_jobs else node.gpus_used
        left = held - sum(row.holder is not None for row in here)
        free = "closed" if not node.takes_jobs else "awaited" if at in awaited else "free"
        marks = []
        for row in here:
            # Jobs without an agent hold GPUs of which Slurm's lists say the number only.
            state = "held" if row.holder is not None or left > 0 else free
            left -= row.holder is None
            marks.append(Square(state, row.holder, len(row.waiting)))
        found.append(HostSquares(node.host, tuple(marks), _words(marks)))
    return tuple(sorted(found))


def partition_rows(snapshot: ClusterSnapshot, hosts: Sequence[HostSquares]) -> tuple[PartitionRow, ...]:
    """Return the partitions with GPUs, by name."""
    found: dict[str, PartitionRow] = {}
    states = {host.name: Counter(mark.state for mark in host.squares) for host in hosts}
    for node in snapshot.nodes:
        for name in node.partitions if node.lane == 0 and node.gpus else ():
            row, here = found.setdefault(name, PartitionRow(name)), states[node.host]
            row.hosts, row.gpus, row.held = row.hosts + 1, row.gpus + node.gpus, row.held + here["held"]
            row.free, row.closed = row.free + here["free"] + here["awaited"], row.closed + here["closed"]
    for job in snapshot.jobs:
        for name in job.partition.split(",") if job.gpus and job.state != "OTHER" else ():
            if (place := found.get(name)) is None:
                continue
            if job.state == "PENDING":
                place.queued += 1
            elif job.lease is None or job.lease.state in HOLDING:
                place.running += 1
            else:
                place.waiting += 1
    return tuple(found[name] for name in sorted(found))


def _words(marks: Sequence[Square]) -> str:
    counts = Counter(mark.state for mark in marks)
    names = {"held": "held", "free": "free", "awaited": "free although a job waits that fits", "closed": "closed"}
    parts = [f"{counts[state]} {name}" for state, name in names.items() if counts[state]]
    waited = sum(mark.waiting > 0 for mark in marks)
    return f"{len(marks)} GPUs: {', '.join(parts)}" + (f"; jobs wait for a turn on {waited}" if waited else "")
