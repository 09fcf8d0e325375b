"""Resources that a job needs on each of its nodes."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from cadenza.policies.core.model import Job
from cadenza.policies.core.profile import MB_PER_GB, Profile


class ResourceRequest(NamedTuple):
    """Resources that a job needs on each of its nodes; memory in MB."""

    user: str
    partition: str
    nodes: int
    gpus: int
    cpus: int
    memory_mb: int
    state_mb: int = 0
    """GPU state that a yield moves to the host's memory."""
    gpu_type: str = ""
    """Type of GPU that it asked for; empty: any."""
    barred: frozenset[str] = frozenset()
    """Nodes on which Slurm would not start it."""

    @classmethod
    def of(cls, job: Job) -> ResourceRequest:
        """Return a job's needs; its totals are taken to be spread evenly over its nodes."""
        nodes = max(job.num_nodes, 1)
        gpus, cpus, memory_mb = job.part(nodes)
        low_gb = job.profile.gpu_memory_low_gb if job.profile is not None else None  # at a boundary, a GPU
        state_mb = ceil(gpus * MB_PER_GB * low_gb) if low_gb else 0
        return cls(job.user, job.partition, nodes, gpus, cpus, memory_mb, state_mb, job.gpu_type, job.barred)

    @classmethod
    def trimmed(cls, job: Job) -> ResourceRequest:
        """Return a job's needs with no more memory than its profile can use: that stays taken while it waits."""
        request = cls.of(job)
        useful_mb = _useful_mb(job.profile, request) if job.profile else request.memory_mb
        return request._replace(memory_mb=min(request.memory_mb, useful_mb))

    @classmethod
    def under(cls, job: Job, *, floor: bool) -> ResourceRequest:
        """Return a job's trimmed needs, or all that it asked for where Slurm's allocation is a floor."""
        return cls.of(job) if floor else cls.trimmed(job)


def _useful_mb(profile: Profile, request: ResourceRequest) -> int:
    """Return the least memory of the profile's grid that is as good as what the job asked for, MB."""
    cpus, asked_gb = request.cpus / max(request.gpus, 1), request.memory_mb / max(request.gpus, 1) / MB_PER_GB
    speed = profile.speed(cpus, asked_gb)
    for memory_gb in profile.memory_gb_per_gpu:
        if profile.speed(cpus, memory_gb) >= speed:
            return ceil(memory_gb * MB_PER_GB * request.gpus)
    return request.memory_mb


def sized(request: ResourceRequest, gpus: int) -> ResourceRequest:
    """Return a job's needs on one node with another number of GPUs there: as much more as it has more of those."""
    had = max(request.gpus, 1)
    return request._replace(
        gpus=gpus,
        cpus=max(request.cpus * gpus // had, 1),
        memory_mb=request.memory_mb * gpus // had,
        state_mb=request.state_mb * gpus // had,
    )
