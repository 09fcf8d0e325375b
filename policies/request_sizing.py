"""Requests of pending jobs by their profiles: enough to be fast wherever they start, and no more.

Slurm starts a job where its whole request is free, so asking for the best case of a profile would let GPUs idle for
want of CPUs (Synergy, OSDI'22, §3, on GREEDY). A job therefore asks for the fewest CPUs with which it is as fast as
with its proportional share, or as with its user's request if that is faster; free CPUs come by tuning once it runs.
Memory is only raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from cadenza.policies.core.actions import Size
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.core.profile import MB_PER_GB, TOLERANCE, Profile, least_cpus
from cadenza.policies.sharing.state.settings import SharingSettings

LIMITED = re.compile(r"(QOS|Assoc)\w*(Cpu|Mem)")
"""Slurm's reasons of a job whose CPUs or memory exceed a limit of its account or QOS (squeue(1))."""


class Request(NamedTuple):
    """CPUs and MB, totals or of one node."""

    cpus: int
    memory_mb: int


def requests(snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings) -> dict[JobKey, Size]:
    """Return how the requests of pending managed jobs should change, in order of keys.

    A job is sized once; it gets its own request back when it then exceeds a limit of its account or QOS.
    """
    sizes: dict[JobKey, Size] = {}
    for job in sorted(snapshot.jobs, key=lambda job: job.key):
        # Slurm changes the CPUs and memory of a pending job only.
        if job.state != "PENDING" or job.held or job.gpus <= 0 or not settings.manages(job):
            continue
        size = _restored(job, memory) if job.key in memory.sized else _sized(job, snapshot.nodes)
        if size is not None:
            sizes[job.key] = size
    return sizes


def as_sized(snapshot: ClusterSnapshot, sizes: dict[JobKey, Size]) -> ClusterSnapshot:
    """Return the snapshot as it will look with these requests."""
    if not sizes:
        return snapshot
    jobs = (
        replace(job, cpus=sizes[job.key].cpus, memory_mb=sizes[job.key].memory_mb) if job.key in sizes else job
        for job in snapshot.jobs
    )
    return replace(snapshot, jobs=tuple(jobs))


def _restored(job: Job, memory: Memory) -> Size | None:
    asked = Request(*memory.sized[job.key])
    if not LIMITED.match(job.state_reason) or asked == (job.cpus, job.memory_mb):
        return None
    return Size(job.key, *asked, f"asks for what it did at first: Slurm says {job.state_reason}")


def _sized(job: Job, nodes: Sequence[Node]) -> Size | None:
    profile = job.profile
    node = min(_possible(job, nodes), key=lambda node: (node.cpus / node.gpus, node.name), default=None)
    if profile is None or node is None or not (job.cpus and job.memory_mb):
        return None
    profile, parts = profile.on(node.gpu_type), max(job.num_nodes, 1)
    gpus = -(-job.gpus // parts)
    asked = Request(-(-job.cpus // parts), -(-job.memory_mb // parts))
    enough = _sufficient(
        profile, gpus, asked, Request(node.cpus * gpus // node.gpus, node.memory_mb * gpus // node.gpus)
    )
    # Slurm gives each task as many CPUs as the others, so the CPUs of a job are a multiple of its tasks.
    total = Request(
        -(-enough.cpus * parts // job.tasks) * job.tasks,
        enough.memory_mb * parts if enough.memory_mb > asked.memory_mb else job.memory_mb,
    )
    if total == (job.cpus, job.memory_mb):
        return None
    return Size(job.key, *total, _reason(profile, gpus, asked, Request(-(-total.cpus // parts), enough.memory_mb)))


def _possible(job: Job, nodes: Sequence[Node]) -> Iterator[Node]:
    """Return the nodes where the job may start: of its partition, up, wide enough, and named if it names some."""
    gpus = -(-job.gpus // max(job.num_nodes, 1))
    for node in nodes:
        named = node.name not in job.barred and (not job.required_nodes or node.name in job.required_nodes)
        if named and node.up and not node.drained and node.gpus >= gpus and job.partition in node.partitions:
            yield node


def _sufficient(profile: Profile, gpus: int, asked: Request, fair: Request) -> Request:
    """Return the least memory, then the fewest CPUs, that are as fast as the faster of two requests."""
    wanted = max(_speed(profile, gpus, asked), _speed(profile, gpus, fair)) - TOLERANCE
    cpus = max(asked.cpus, fair.cpus, 1)
    most_mb = max(asked.memory_mb, fair.memory_mb)
    # A process that needs more memory than its job's limit is killed, so no request goes below what was asked for.
    grid = (ceil(gb * gpus * MB_PER_GB) for gb in profile.memory_gb_per_gpu)
    sizes = (asked.memory_mb, *(mb for mb in grid if asked.memory_mb < mb < most_mb), most_mb)
    memory_mb = next((mb for mb in sizes if _speed(profile, gpus, Request(cpus, mb)) >= wanted), most_mb)
    return Request(least_cpus(profile, gpus, cpus, memory_mb), memory_mb)


def _speed(profile: Profile, gpus: int, request: Request) -> float:
    return profile.speed(request.cpus / gpus, request.memory_mb / gpus / MB_PER_GB)


def _reason(profile: Profile, gpus: int, asked: Request, now: Request) -> str:
    """Return a sentence for the job's user; both requests are of one node."""
    faster = _speed(profile, gpus, now) / _speed(profile, gpus, asked)
    effect = f"{faster:.2f} times as fast as" if faster > 1 + TOLERANCE else "as fast as"
    return (
        f"by the profile of {profile.model} it is {effect} with {asked.cpus} CPUs and {asked.memory_mb} MB: "
        f"it asks for {now.cpus} and {now.memory_mb} a node"
    )
