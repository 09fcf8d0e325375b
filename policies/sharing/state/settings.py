"""The admin's choices for sharing, as the policies of this package take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.relocation.phases import held_for_move

Turns: TypeAlias = Literal["fair", "order"]
"""Whether jobs that share GPUs have equal parts of them, or the ordering says who goes first there too."""


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """Times in seconds. Without managed partitions nothing is managed."""

    enforce: bool = False
    """False in observe-only: what would be done is still decided, and the further lanes are kept drained."""
    slice_s: float = 60.0
    min_run_s: float = 5.0
    turns: Turns = "fair"
    share_between_users: bool = False
    suspend: bool = True
    """Suspend yielded jobs in Slurm, so that their time limit stops and their CPUs are free in the books."""
    lease_wait_s: float = 600.0
    """A job on a further lane gives its place back when it waited this long behind one that cannot stop."""
    unmanaged_wait_s: float = 10.0
    """A managed job on a further lane that cannot be stopped is requeued when an unmanaged job waited this long."""
    max_priority: int = 0
    """The comment is the user's own: a priority above this counts as this."""
    admission: Literal["native", "held"] = "native"
    partitions: frozenset[str] = frozenset()
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Shares of accounts and users, for the ordering that has them (``fairshare``)."""

    floor: bool = False
    """Whether Slurm's books are a floor: a running job keeps its memory, and CPUs with which it is as fast as with
    those that it has there."""

    @property
    def places(self) -> bool:
        """Whether the service itself chooses the nodes of held jobs."""
        return self.enforce and self.admission == "held"

    def manages(self, job: Job) -> bool:
        """Whether the job opted in, in a partition that the admin enabled."""
        return job.opted_in and job.partition in self.partitions

    def priority(self, job: Job) -> int:
        """Return the priority that a job asked for, as far as the admin allows it."""
        return min(job.options.priority, self.max_priority) if job.options is not None else 0


def left_alone(job: Job, settings: SharingSettings) -> str:
    """Return why an opted-in job is left alone, or "" when it is managed."""
    if job.unmanageable:
        return f"left alone: {job.unmanageable}"
    if not job.opted_in:
        return "left alone: the job does not share (share=false)"
    if job.partition not in settings.partitions:
        return f"left alone: partition {job.partition} is not among Cadenza's partitions"
    return ""


def held_for_us(job: Job, memory: Memory) -> bool:
    """Return whether the job is held on our account: by job_submit.lua, by a move, or by Slurm after a suspend of ours.

    A hold after our release is its owner's.
    """
    by_lua = job.options is not None and job.options.held and job.key not in memory.placed
    return job.held and (by_lua or requeued_into_hold(job, memory) or held_for_move(job, memory))


def requeued_into_hold(job: Job, memory: Memory) -> bool:
    """Return whether Slurm requeued the job out of our suspend, as when its host is lost: that comes back held."""
    before = {JobKey(job.key.id, job.key.restart - back) for back in (0, 1)}
    return job.held and job.state_reason == "JobHeldAdmin" and not before.isdisjoint(memory.suspended)


@dataclass(frozen=True, slots=True)
class GandivaSettings:
    """Which of Gandiva's functions are on, and their limits. Times in seconds.

    Reactive mode is placement, slices and migration on departures; introspective mode adds the others, and
    migration that evens out hosts without a departure.
    """

    introspective: bool = True
    pack: bool = True
    migrate: bool = True
    defrag: bool = True
    elastic: bool = True
    relieve: bool = True
    max_packed: int = 2
    """Most jobs that are packed on one set of GPUs."""
    pack_margin: float = 0.05
    """A pack stays when it has more than the throughput of turns by this part."""
    measure_s: float = 20.0
    """One measuring window: jobs run this long, if their slices allow it, before their iteration times count."""
    gpu_memory_margin: float = 0.05
    """Part of a GPU's memory that packed jobs leave free."""
    pack_again_s: float = 86400.0
    """Time after which a pair that did not pay may be tried again."""
    idle_s: float = 60.0
    """A job grows when GPUs of its host have been idle this long."""
    move_s: float = 30.0
    """Time without progress that a migration or resize costs a job."""
    move_every_s: float = 600.0
    """Least time between two migrations or resizes of one job."""
    moves_per_round: int = 8
    horizon_s: float = 3600.0
    """How long a job is thought to go on at most, as far as a move has to pay back."""
    loss: float = 0.02
    """A part of a job's time that is negligible where a move helps others (defragmentation)."""
    free_share: float = 0.75
    """Defragmentation ends when every host in use has less than this part of its GPUs free (3 of 4)."""
