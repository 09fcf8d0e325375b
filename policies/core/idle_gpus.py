"""GPUs that are idle while a job waits that fits there (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job

HOLDING = ("held", "stopping")
"""States of leases whose jobs may use their GPUs."""


class HostGpus(NamedTuple):
    """GPUs of one host, the number of those that no job holds, and the host's partitions."""

    gpus: int
    idle: int
    partitions: Sequence[str]


def free_gpus(snapshot: ClusterSnapshot) -> list[HostGpus]:
    """Return the hosts with the GPUs that no lease is on, and no job that no agent knows."""
    hosts = snapshot.host_of
    used: Counter[str] = Counter()
    leased: set[Gpu] = set()
    for job in snapshot.jobs:
        if job.lease is None and job.state in ("RUNNING", "OTHER"):
            for name in job.nodes:
                used[hosts.get(name, name)] += gpus_on(job, name)
        elif job.lease is not None and (job.lease.exclusive or job.lease.state in HOLDING):
            leased.update(job.lease.gpus)
    used.update(gpu.host for gpu in leased)
    return [
        HostGpus(node.gpus, max(node.gpus - used[node.host], 0) if node.up and not node.drained else 0, node.partitions)
        for node in snapshot.nodes
        if node.lane == 0
    ]


def gpus_on(job: Job, node: str) -> int:
    """Return the GPUs that a started job has on one of its nodes."""
    placed = next((share.gpus for share in job.placement if share.node == node), 0)
    return placed or -(-job.gpus // max(len(job.nodes), 1))


def narrowest_jobs(waiting: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the smallest number of GPUs that a waiting job needs, by partition."""
    narrowest: dict[str, int] = {}
    for partition, gpus in waiting:
        narrowest[partition] = min(narrowest.get(partition, gpus), gpus)
    return narrowest


def idle_waiting_gpus(hosts: Sequence[HostGpus], narrowest: Mapping[str, int]) -> int:
    """Return the GPUs that no job holds in the partitions where a waiting job fits; only GPUs are considered.

    A job fits on a host with enough idle GPUs. One with more GPUs than the widest host of its partition fits when
    enough of these hosts are wholly idle. ``narrowest``: see ``narrowest_jobs``.

    >>> idle_waiting_gpus([HostGpus(4, 3, ("gpu",)), HostGpus(4, 2, ("other",))], {"gpu": 2, "other": 3})
    3
    """
    counted: set[int] = set()
    for partition, gpus in narrowest.items():
        here = [at for at, host in enumerate(hosts) if partition in host.partitions]
        widest = max((hosts[at].gpus for at in here), default=0)
        room = max((hosts[at].idle for at in here), default=0)
        if gpus > widest:
            room = sum(widest for at in here if hosts[at].idle == widest)
        if gpus <= room:
            counted.update(here)
    return sum(hosts[at].idle for at in counted)
