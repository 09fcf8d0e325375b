"""The admin's choices for sharing, as the policies of this package take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Job, JobKey

Turns: TypeAlias = Literal["fair", "order"]
"""Turns of jobs that share GPUs: equal parts, or the first in the ordering goes first."""


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """The admin's options for turns. Times in seconds."""

    slice_s: Annotated[float, Meta(description="One turn of a job with weight 1", gt=0)] = 60.0
    turns: Annotated[
        Turns,
        Meta(
            description="fair: jobs that share GPUs have equal parts of them; order: after its first turn a job waits "
            "for those that [policy] order puts before it, and has a turn now and then"
        ),
    ] = "fair"
    share_between_users: Annotated[bool, Meta(description="Let jobs of different users share a GPU")] = False
    suspend: Annotated[
        bool, Meta(description="Suspend jobs in Slurm while they wait for their turn: their time limit stops")
    ] = True
    max_priority: Annotated[
        int, Meta(description="Highest priority that a user's own options may ask for; more counts as this")
    ] = 0


@dataclass(frozen=True, slots=True)
class SharingSettings(SharingOptions):
    """Times in seconds. Without managed partitions nothing is managed."""

    enforce: bool = False
    """False in observe-only: what would be done is still decided, and the further lanes are kept drained."""
    min_run_s: float = 5.0
    lease_wait_s: float = 600.0
    """A job on a further lane gives its place back when it waited this long behind one that cannot stop."""
    unmanaged_wait_s: float = 10.0
    """A managed job on a further lane that cannot be stopped is requeued when an unmanaged job waited this long."""
    place: bool = False
    """True if the service chooses the nodes of pending jobs: it pins them where they are, in Slurm's queue."""
    partitions: frozenset[str] = frozenset()
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Shares of accounts and users, for the ordering that has them (``fairshare``)."""

    level_points: float = 0.44
    """Priority that the last level of attained GPU time costs, as a part of the sum of the site's weights."""
    floor: bool = False
    """True if Slurm's allocation is a floor: a running job keeps its memory, and enough CPUs to be as fast as with
    those that Slurm gave it."""

    @property
    def places(self) -> bool:
        """Return True if the service itself chooses the nodes of pending jobs."""
        return self.enforce and self.place

    def manages(self, job: Job) -> bool:
        """Return True if the job opted in, in a partition that the admin enabled."""
        options = job.options  # as ``opted_in`` has it, without the call: each round asks for each job several times
        return options is not None and options.share and not job.unmanageable and job.partition in self.partitions

    def priority(self, job: Job) -> int:
        """Return the priority that a job asked for, as far as the admin allows it."""
        return min(job.options.priority, self.max_priority) if job.options is not None else 0


def exclusion_reason(job: Job, settings: SharingSettings) -> str | None:
    """Return why an opted-in job is left alone, None if it is managed."""
    if job.unmanageable:
        return f"left alone: {job.unmanageable}"
    if not job.opted_in:
        return "left alone: the job does not share (share=false)"
    if job.partition not in settings.partitions:
        return f"left alone: partition {job.partition} is not among Cadenza's partitions"
    return None


REQUEUE_HOLD = "job requeued in held state"
"""Slurm's reason of a job that was requeued into a hold; any later hold has another."""


def held_for_us(job: Job, memory: Memory) -> bool:
    """Return whether the job is held on our account: by a requeue of ours, or after a suspend of ours.

    Only Slurm's facts and our own record say so, never the job's comment.
    """
    if not job.held:
        return False
    # A hold after our release is its owner's, unless it is the hold that we released: a slurmctld that is killed
    # forgets its last seconds.
    if job.key in memory.placed:
        return release_forgotten(job, memory)
    # Slurm never releases what it held by itself when slurmctld restarted.
    return job.key in memory.held or requeued_into_hold(job, memory) or job.held_at_restart


def release_forgotten(job: Job, memory: Memory) -> bool:
    """Return whether a killed slurmctld forgot our release of a hold that a requeue brought."""
    # An incarnation that has run does not become pending again: only its successor does.
    ran = job.key in memory.last_yield_s or job.key in memory.suspended or job.key in memory.resumed
    # ``Memory.held`` has the jobs whose release was seen to be forgotten, until they are released again.
    seen = job.key in memory.held and job.key.restart > 0
    # The hold of a requeue comes once in an incarnation, before our release.
    at_restart = job.held_at_restart or job.state_reason == REQUEUE_HOLD
    return job.held and (at_restart or ((ran or seen) and job.state_reason == "JobHeldAdmin"))


def requeued_into_hold(job: Job, memory: Memory) -> bool:
    """Return whether Slurm requeued the job out of our suspend, as when its host is lost: that comes back held."""
    # A suspend sets the priority to 0. A requeue keeps that, and Slurm then calls the job held by an admin.
    before = {JobKey(job.key.id, job.key.restart - back) for back in (0, 1)}
    return job.held and job.state_reason == "JobHeldAdmin" and not before.isdisjoint(memory.suspended)


@dataclass(frozen=True, slots=True)
class GandivaSettings:
    """Gandiva's functions that are on, and their limits. Times in seconds.

    Reactive mode is placement, slices and migration on departures; introspective mode adds the others, and
    migration that evens out hosts without a departure.
    """

    pack: bool = True
    """Run two jobs on the same GPUs at once, as long as that pays."""
    pack_margin: float = 0.05
    """Packed jobs stay together when they do this much more than in turns, as a part: what a measurement may be off."""
    measure_s: float = 20.0
    """A measuring window: a pack that does not pay is undone within three of them."""
    migrate: bool = True
    """Move jobs to idle GPUs and away from crowded ones."""
    defrag: bool = True
    """Move jobs together so that hosts become free for large ones."""
    elastic: bool = True
    """Grow and shrink jobs that set min_gpus or max_gpus."""
    relieve: bool = True
    """With an allocation: move jobs that their host's CPUs or memory hold back to a host where they are faster."""
    idle_s: float = 60.0
    """GPUs must be idle this long before a job grows."""
    move_every_s: float = 600.0
    """Least time between two moves or resizes of a job."""
    moves_per_round: int = 8
    """Most moves and resizes in one round: all of them save at once, into the same file systems."""
    introspective: bool = True
    max_packed: int = 2
    """Most jobs that are packed on one set of GPUs."""
    gpu_memory_margin: float = 0.05
    """Part of a GPU's memory that packed jobs leave free."""
    pack_again_s: float = 86400.0
    """Time after which a pair that did not pay may be tried again."""
    move_s: float = 30.0
    """Time without progress that a migration or resize costs a job."""
    horizon_s: float = 3600.0
    """Time within which a move must pay back."""
    loss: float = 0.02
    """A part of a job's time that is negligible where a move helps others (defragmentation)."""
    free_share: float = 0.75
    """Defragmentation ends when every host in use has less than this part of its GPUs free (3 of 4)."""
