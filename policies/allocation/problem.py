"""The allocation problem and its plan: servers and ordered jobs in, a placement for each chosen job out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cadenza.policies.core.model import Job, JobKey, Placement, Share
from cadenza.policies.core.profile import MB_PER_GB, Profile


class Server(NamedTuple):
    """A usable node, whole: what is allocated on it now counts as free, since the round packs anew. Memory in MB."""

    name: str
    gpus: int
    cpus: int
    memory_mb: int
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a change to a running job, in seconds without progress, and the time in which it must pay back."""

    move_s: float = 30.0
    tune_s: float = 0.0
    horizon_s: float = 3600.0
    """A change must gain more than it costs within this time."""
    span: float = 0.1
    """The part of its speed that a job on several nodes is taken to lose to the network, which no profile measures."""
    moves_per_job_hour: float = 0.1
    """Most moves of running jobs, however much they gain."""
    round_s: float = 300.0
    """Time between rounds, in which the moves are counted."""


@dataclass(frozen=True, slots=True)
class Case:
    """One round's allocation problem."""

    now_s: float
    servers: tuple[Server, ...]
    """In order of names."""
    jobs: tuple[Job, ...]
    """The whole queue in policy order; what a running job has now is its ``placement``."""
    runnable: int
    """The first so many of ``jobs`` are to run: their GPUs together are no more than the servers'."""
    gpu_type: Mapping[JobKey, str] = field(default_factory=dict)
    """GPU types that the ordering chose (Gavel)."""
    costs: Costs = field(default_factory=Costs)
    margin: float = 0.0
    """Allowance for noise in profiles: a share must promise at least ``1 + margin`` times the proportional throughput
    or be the proportional share itself."""
    evaluations: int = 200
    """Most evaluations of a search: a count and never a time, so that a replay finds the same."""
    weighted: bool = False
    """True if a job's speed counts once for each of its GPUs; else it counts once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The jobs that run, with their placements; a job that is not in ``placements`` does not run."""

    placements: Mapping[JobKey, Placement]
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
    """Sentences that say more than the policy's general one."""


Allocate: TypeAlias = Callable[[Case], Plan]


def proportional_share(server: Server, gpus: int) -> Share:
    """Return g/G of a server's CPUs and memory, rounded down so that all shares of a full server fit.

    >>> proportional_share(Server("n1", 8, 24, 512000), 2)
    Share(node='n1', gpus=2, cpus=6, memory_mb=128000)
    """
    return Share(server.name, gpus, server.cpus * gpus // server.gpus, server.memory_mb * gpus // server.gpus)


def share_speed(profile: Profile | None, share: Share, gpu_type: str) -> float:
    """Return a job's throughput with one share, relative to its proportional share on its reference GPU and server."""
    if profile is None:
        return 1.0
    there = profile.on(gpu_type) if gpu_type else profile
    speed = there.speed(share.cpus / share.gpus, share.memory_mb / share.gpus / MB_PER_GB)
    return speed if there is profile else speed * profile.iteration_s / there.iteration_s


def placement_speed(profile: Profile | None, placement: Placement, gpu_types: Mapping[str, str]) -> float:
    """Return a job's throughput with a placement: it runs at its slowest node. ``gpu_types``: by node."""
    return min(share_speed(profile, share, gpu_types[share.node]) for share in placement)
