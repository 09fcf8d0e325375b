"""Jobs that wait for GPUs, and GPUs that are idle while one waits that fits there (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cadenza.policies.core.model import WAITING_REASONS, ClusterSnapshot, Gpu, Job, JobState, Node

HOLDING = ("held", "stopping")
"""States of leases whose jobs may use their GPUs."""
NOWHERE: frozenset[str] = frozenset()


class HostGpus(NamedTuple):
    """GPUs of one host, the number of those that no job holds, its partitions, the type of its GPUs, and its name."""

    gpus: int
    idle: int
    partitions: Sequence[str]
    gpu_type: str = ""
    name: str = ""


class Wanted(NamedTuple):
    """A job's partition, the type of GPU that it asks for, "" for any, and the nodes that it may not have."""

    partition: str
    gpu_type: str = ""
    barred: frozenset[str] = NOWHERE


def suits(node: Node | HostGpus, partition: str, gpu_type: str, barred: Collection[str]) -> bool:
    """Return whether a job may start on a node by its partition, several by commas, type of GPU and barred nodes.

    Slurm takes a type in small and capital letters alike.
    """
    if partition not in node.partitions and not ("," in partition and set(partition.split(",")) & {*node.partitions}):
        return False
    of_type = gpu_type in ("", node.gpu_type) or gpu_type.casefold() == node.gpu_type.casefold()
    return of_type and node.name not in barred


def queues_for_gpus(state: JobState | None, gpus: int, priority: int, reason: str) -> bool:
    """Return whether Slurm would start a job on free GPUs: it is in the queue, not held, and lacks resources only."""
    return state == "PENDING" and gpus > 0 and priority > 0 and reason in WAITING_REASONS


def waits_for_gpus(job: Job, *, ours: bool = False) -> bool:
    """Return whether a job would go on if GPUs were free: it is in Slurm's queue for them, or waits for its turn.

    Dependencies, begin times, other holds, limits and licenses keep a job waiting although GPUs are idle.
    ``ours``: its hold or its suspend is Cadenza's, which ends as soon as it gets its GPUs; any other is for good.
    """
    if job.state == "PENDING":
        held = ours and job.held and job.gpus > 0
        return held or queues_for_gpus(job.state, job.gpus, job.slurm_priority, job.state_reason)
    lease = job.lease
    started = job.gpus > 0 and (job.state == "RUNNING" or (job.state == "SUSPENDED" and ours))
    return started and lease is not None and lease.state not in HOLDING and not (lease.exclusive or lease.late)


def fits(hosts: Sequence[HostGpus], wanted: Wanted, gpus: int, nodes: int = 1) -> bool:
    """Return whether enough GPUs of one of a job's partitions are idle for it; only GPUs are considered.

    A job has an equal part of its GPUs on each of its nodes, and as many nodes as the widest host makes necessary.
    Its partition is as Slurm has it, several by commas.

    >>> hosts = [HostGpus(4, 3, ("gpu",)), HostGpus(4, 3, ("gpu",)), HostGpus(8, 8, ("other",))]
    >>> gpu = Wanted("gpu")
    >>> fits(hosts, gpu, 4), fits(hosts, gpu, 6), fits(hosts, gpu, 4, nodes=2), fits(hosts, Wanted("gpu,other"), 4)
    (False, True, True, True)
    """
    for name in wanted.partition.split(","):
        one = wanted._replace(partition=name)
        here = [host for host in hosts if suits(host, *one)]
        widest = max((host.gpus for host in here), default=0)
        parts = max(nodes, -(-gpus // widest) if widest else 1)
        if here and sum(host.idle * parts >= gpus for host in here) >= parts:
            return True
    return False


def free_gpus(snapshot: ClusterSnapshot) -> list[HostGpus]:
    """Return the hosts with the GPUs that no lease is on, and no job that no agent knows."""
    hosts = snapshot.host_of
    used: Counter[str] = Counter()
    for job in snapshot.jobs:
        # A job that ends has its GPUs until the last of its nodes has cleaned up.
        if job.lease is None and job.state in ("RUNNING", "OTHER"):
            for name, (gpus, *_) in job.amounts.items():
                used[hosts.get(name, name)] += gpus
    used.update(gpu.host for gpu in held_gpus(snapshot.jobs))
    return [
        HostGpus(
            node.gpus,
            max(node.gpus - used[node.host], 0) if node.up and not node.drained else 0,
            node.partitions,
            node.gpu_type,
            node.name,
        )
        for node in snapshot.nodes
        if node.lane == 0
    ]


def held_gpus(jobs: Iterable[Job]) -> set[Gpu]:
    """Return the GPUs that jobs may use now by their leases."""
    leases = (job.lease for job in jobs)
    return {gpu for lease in leases if lease and (lease.exclusive or lease.state in HOLDING) for gpu in lease.gpus}


def narrowest_jobs(waiting: Iterable[tuple[Wanted, int]]) -> dict[Wanted, int]:
    """Return the smallest number of GPUs that a waiting job needs, for each of its partitions by itself."""
    narrowest: dict[Wanted, int] = {}
    for wanted, gpus in waiting:
        for name in wanted.partition.split(","):
            one = wanted._replace(partition=name)
            narrowest[one] = min(narrowest.get(one, gpus), gpus)
    return narrowest


def idle_waiting_gpus(hosts: Sequence[HostGpus], narrowest: Mapping[Wanted, int]) -> int:
    """Return the GPUs that no job holds in the partitions where a waiting job fits.

    ``narrowest``: see ``narrowest_jobs``.

    >>> hosts = [HostGpus(4, 3, ("gpu",)), HostGpus(4, 2, ("other",))]
    >>> idle_waiting_gpus(hosts, {Wanted("gpu"): 2, Wanted("other"): 3})
    3
    """
    return sum(hosts[at].idle for at in awaited_hosts(hosts, narrowest))


def awaited_hosts(hosts: Sequence[HostGpus], narrowest: Mapping[Wanted, int]) -> frozenset[int]:
    """Return the positions of the hosts in the partitions where a waiting job fits."""
    counted: set[int] = set()
    for wanted, gpus in narrowest.items():
        if fits(hosts, wanted, gpus):
            counted.update(at for at, host in enumerate(hosts) if suits(host, *wanted))
    return frozenset(counted)
