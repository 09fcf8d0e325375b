"""Jobs that wait for GPUs, and GPUs that are idle while one waits that fits there (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job

HOLDING = ("held", "stopping")
"""States of leases whose jobs may use their GPUs."""
WAITS_FOR_GPUS = frozenset({"", "Resources", "Priority"})
"""Slurm's reasons of pending jobs that start once GPUs are free (squeue(1), JOB REASON CODES).

Dependencies, begin times, holds, limits and licenses keep a job waiting although GPUs are idle."""


class HostGpus(NamedTuple):
    """GPUs of one host, the number of those that no job holds, the host's partitions, and the type of its GPUs."""

    gpus: int
    idle: int
    partitions: Sequence[str]
    gpu_type: str = ""

    def suits(self, partition: str, gpu_type: str) -> bool:
        """Return whether jobs of a partition that ask for a type may start there; "": any type."""
        return partition in self.partitions and gpu_type in ("", self.gpu_type)


def waits_for_gpus(job: Job, *, ours: bool = False) -> bool:
    """Return whether a job would go on if GPUs were free: it is in Slurm's queue for them, or waits for its turn.

    ``ours``: its hold or its suspend is Cadenza's, which ends as soon as it gets its GPUs; any other is for good.
    """
    if not job.gpus:
        return False
    if job.state == "PENDING":
        return ours if job.held else job.state_reason in WAITS_FOR_GPUS
    lease = job.lease
    started = job.state == "RUNNING" or (job.state == "SUSPENDED" and ours)
    return started and lease is not None and lease.state not in HOLDING and not (lease.exclusive or lease.late)


def fits(hosts: Sequence[HostGpus], partition: str, gpus: int, nodes: int = 1, gpu_type: str = "") -> bool:
    """Return whether enough GPUs of one of a job's partitions are idle for it; only GPUs are considered.

    A job has an equal part of its GPUs on each of its nodes, and as many nodes as the widest host makes necessary.
    ``partition``: as Slurm has it, several by commas.

    >>> hosts = [HostGpus(4, 3, ("gpu",)), HostGpus(4, 3, ("gpu",)), HostGpus(8, 8, ("other",))]
    >>> fits(hosts, "gpu", 4), fits(hosts, "gpu", 6), fits(hosts, "gpu", 4, nodes=2), fits(hosts, "gpu,other", 4)
    (False, True, True, True)
    """
    for name in partition.split(","):
        here = [host for host in hosts if host.suits(name, gpu_type)]
        widest = max((host.gpus for host in here), default=0)
        parts = max(nodes, -(-gpus // widest) if widest else 1)
        if here and sum(host.idle * parts >= gpus for host in here) >= parts:
            return True
    return False


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
        HostGpus(
            node.gpus,
            max(node.gpus - used[node.host], 0) if node.up and not node.drained else 0,
            node.partitions,
            node.gpu_type,
        )
        for node in snapshot.nodes
        if node.lane == 0
    ]


def gpus_on(job: Job, node: str) -> int:
    """Return the GPUs that a started job has on one of its nodes."""
    placed = next((share.gpus for share in job.placement if share.node == node), 0)
    return placed or -(-job.gpus // max(len(job.nodes), 1))


def narrowest_jobs(waiting: Iterable[tuple[str, str, int]]) -> dict[tuple[str, str], int]:
    """Return the smallest number of GPUs that a waiting job needs, by partition and type; "": any type."""
    narrowest: dict[tuple[str, str], int] = {}
    for partition, gpu_type, gpus in waiting:
        narrowest[partition, gpu_type] = min(narrowest.get((partition, gpu_type), gpus), gpus)
    return narrowest


def idle_waiting_gpus(hosts: Sequence[HostGpus], narrowest: Mapping[tuple[str, str], int]) -> int:
    """Return the GPUs that no job holds in the partitions where a waiting job fits.

    ``narrowest``: see ``narrowest_jobs``.

    >>> idle_waiting_gpus([HostGpus(4, 3, ("gpu",)), HostGpus(4, 2, ("other",))], {("gpu", ""): 2, ("other", ""): 3})
    3
    """
    counted: set[int] = set()
    for (partition, gpu_type), gpus in narrowest.items():
        if fits(hosts, partition, gpus, gpu_type=gpu_type):
            counted.update(at for at, host in enumerate(hosts) if host.suits(partition, gpu_type))
    return sum(hosts[at].idle for at in counted)
