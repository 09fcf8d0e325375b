"""A job on its way to other nodes or another size, and the phases that it goes through: one small value each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from cadenza.policies.core.model import JobKey, Placement


class _Phase(msgspec.Struct, frozen=True, tag=str.lower):
    since_s: float
    """Begin of the phase, seconds since the epoch."""


class Wanted(_Phase, frozen=True, tag=str.lower):
    """The job holds its GPUs and can be stopped, or an admin's move waits until it does."""


class Prefetching(_Phase, frozen=True, tag=str.lower):
    """The job trains on while the hosts that it goes to read its files."""


class Ordered(_Phase, frozen=True, tag=str.lower):
    """The job's ranks save a checkpoint at one boundary and stand."""

    former: tuple[str, ...] = ()
    """Nodes that it runs on, once its checkpoint is complete."""


class Requeued(_Phase, frozen=True, tag=str.lower):
    """The job leaves its nodes, until Slurm shows its next incarnation held."""

    began_s: float
    """Time at which the checkpoint was ordered, seconds since the epoch."""
    former: tuple[str, ...] = ()
    """Nodes that it ran on."""


class Placed(_Phase, frozen=True, tag=str.lower):
    """The next incarnation is released on its new nodes, and Slurm is to start it."""

    began_s: float
    former: tuple[str, ...] = ()
    attempts: int = 1
    """Number of times that it was placed."""
    saved_s: float = 0.0
    """Time from the order to save until the job was requeued, seconds."""


class Leaving(_Phase, frozen=True, tag=str.lower):
    """Something failed after the requeue: the job is released as it is."""


class Over(_Phase, frozen=True, tag=str.lower):
    """The move has ended; the outcome is kept while the job lives."""

    outcome: str
    """One sentence on how it ended."""
    saved_s: float = 0.0
    """Time from the order to save until the job was requeued, seconds; 0: it was not."""


Phase: TypeAlias = Wanted | Prefetching | Ordered | Requeued | Placed | Leaving | Over


@dataclass(frozen=True, slots=True)
class Move:
    """A job that goes to other nodes or another size by checkpoint and requeue; see ``relocation.phases``."""

    job: JobKey
    """The incarnation that is checkpointed and requeued; the one that is placed has the next restart count."""
    shares: Placement
    reason: str
    phase: Phase
    resize: bool = False
    former_gpus: int = 0
    """GPUs that a resized job had: its size again when others have taken its new place."""
    by_hand: bool = False
    """True if an admin asked for it: it waits until the job can be stopped."""
    pinned: tuple[str, ...] = ()
    """Nodes that the job required before."""
    for_job: JobKey | None = None
    """The waiting job that this one makes way for, with all others that do: they leave together."""
    factor: int = 0
    """SiteFactor with which a job that makes way comes back."""
    base: int | None = None
    """Priority with which the job first started, without its age and without a SiteFactor; None: not known."""
    displaced_s: float = 0.0
    """Time that the job waited in the queue after earlier moves of this kind, in seconds."""
    cost_s: float = 0.0
    """Cost of the job's last whole move: from the order to save until its GPUs were free, and from its next start until
    all ranks stood at a boundary, seconds; 0: not known yet."""
    lost_s: float = 0.0
    """Training that the job's last move had it repeat, seconds."""

    @property
    def successor(self) -> JobKey:
        """Return the incarnation that the requeue makes."""
        return JobKey(self.job.id, self.job.restart + 1)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that the job goes to."""
        return tuple(share.node for share in self.shares)

    @property
    def over(self) -> bool:
        """Return True once the move has ended."""
        return isinstance(self.phase, Over)

    @property
    def outcome(self) -> str:
        """Return the sentence on how the move ended, "" before that."""
        return self.phase.outcome if isinstance(self.phase, Over) else ""
