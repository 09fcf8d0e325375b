"""Result of a policy: the actions, a reason for each job, and the memory for the next round."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from cadenza.policies.core.actions import Action
from cadenza.policies.core.model import JobKey, Receipt, changer
from cadenza.policies.core.move import Move

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from cadenza.policies.core.model import value


class Alone(NamedTuple):
    """Measurements of a job when it last had its GPUs alone; None where they are unknown."""

    job: JobKey
    iteration_s: float
    busy: float | None = None
    """Share of time in which its GPUs computed, as their driver says, 0 to 1."""
    data_wait: float = 0.0
    """Share of time that it was blocked in its loader: its GPUs had nothing to do then."""
    cpus: float | None = None
    """CPUs that it used."""
    gpu_memory_gb: float | None = None
    """Most that it had on one GPU."""


class Lost(NamedTuple):
    """Two jobs that ran slower together than in turns."""

    job: JobKey
    other: JobKey
    at_s: float = 0.0
    """When that was found, seconds since the epoch."""
    model: str = ""
    other_model: str = ""


class Loan(NamedTuple):
    """Measurements of a job that lends CPUs of its own, or did; iteration times in seconds, 0: not known."""

    job: JobKey
    phase: Literal["lends", "checks", "keeps"] = "lends"
    """*checks*: it has its own back to be compared with; *keeps*: lending slowed it."""
    cpus: int = 0
    """CPUs that it has in the stretch that is being measured."""
    since_s: float = 0.0
    """When that stretch began, seconds since the epoch."""
    iterations: int = 0
    spent_s: float = 0.0
    window_s: float = 0.0
    """The job's pace at the mark from which it is measured: iterations, the time in them, and that of the window."""
    lent_s: float = 0.0
    own_s: float = 0.0
    """Its reference: the promise of its profile, then the measurement with its own CPUs."""
    judged_s: float = 0.0
    """When it was measured with its own CPUs, seconds since the epoch; 0: never."""


class Growth(NamedTuple):
    """A job that has grown, to be judged by its iteration times."""

    id: int
    gpus: int
    """GPUs that it had before."""
    iteration_s: float
    """Time of an iteration with these, seconds."""
    at_s: float
    """When it grew, or was found not to have gained by it, seconds since the epoch."""
    vain: str = ""
    """Measurement of a growth that did not pay; empty before that."""


class Debt(NamedTuple):
    """GPU time that a job had too much, which its later starts count; seconds."""

    id: int
    restart: int
    """The start that ``owed_s`` counts for."""
    owed_s: float = 0.0
    """Last stretch of the start before, which was longer than a slice while others waited."""
    next_s: float = 0.0
    """Seconds that the next start would owe."""


@value(frozen=True, slots=True)
class SharingMemory:
    """Memory of Gandiva's introspective functions: pairs instead of mappings, so that any store can keep it."""

    packs: tuple[tuple[JobKey, ...], ...] = ()
    """Jobs that we packed; who joined last comes first."""
    lost: tuple[Lost, ...] = ()
    """Pairs that did not pay lately, in order of keys; those of two models outlive their jobs."""
    alone: tuple[Alone, ...] = ()
    """Measurements of live jobs alone, in order of keys."""
    moved_s: tuple[tuple[int, float], ...] = ()
    """When the job with this id was last migrated or resized."""
    spare_s: tuple[tuple[str, float], ...] = ()
    """Since when a host has GPUs that no job uses or waits for."""
    asked_gpus: tuple[tuple[int, int], ...] = ()
    """GPUs that the job with this id had before it was first resized."""
    asked_nodes: tuple[tuple[int, int], ...] = ()
    """Nodes that it had then, of jobs that had several."""
    loans: tuple[Loan, ...] = ()
    """Jobs that lend CPUs, in order of keys."""
    owed_s: tuple[tuple[int, float | None], ...] = ()
    """When jobs that had starved began the turn that they are owed; None: not yet. By id, longest wait first."""
    growths: tuple[Growth, ...] = ()
    """Jobs that have grown, in order of ids: to be judged, or not to grow again for a while."""
    debts: tuple[Debt, ...] = ()
    """Live jobs that kept their GPUs too long before they started anew, or do so now; in order of ids."""


@dataclass(frozen=True, slots=True)
class EndedJobs:
    """Attained service of the jobs that have ended; kept where the ordering learns from them, else empty.

    Tuples have an entry for each band of ``ordering.gittins``; service is in GPU seconds.
    """

    count: tuple[float, ...] = ()
    """Jobs that ended in the band; older ones count less."""
    service_s: tuple[float, ...] = ()
    """GPU seconds that they spent in the band, those that ended later included."""
    live: tuple[tuple[int, float], ...] = ()
    """Attained service of each live job by its id, as of the last round."""


@value(frozen=True, slots=True)
class Memory:
    """Facts that a decision may remember of earlier ones; kept by the store, never by a policy."""

    suspended: frozenset[JobKey] = frozenset()
    """Jobs that we suspended in Slurm: the suspend of an admin or owner is not ours to undo."""
    placed: frozenset[JobKey] = frozenset()
    """Held jobs that we have released: a later hold is the owner's and stays."""
    drained: frozenset[str] = frozenset()
    """Nodes that we drained."""
    last_yield_s: Mapping[JobKey, float] = field(default_factory=dict)
    """When each live job was last asked to yield."""
    sharing: SharingMemory = field(default_factory=SharingMemory)
    usage: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds that accounts (``ACCOUNT``) and their users (``ACCOUNT/USER``) have had, decayed; for fair shares."""
    usage_s: float | None = None
    """When ``usage`` was true, seconds since the epoch."""
    sized: Mapping[JobKey, tuple[int, int]] = field(default_factory=dict)
    """CPUs and MB that pending jobs asked for before we changed that; a later change is the owner's and stays."""
    moves: tuple[Move, ...] = ()
    """Jobs that are being moved or resized, and how the last move of each live job ended; in order of keys."""
    held: Mapping[JobKey, float] = field(default_factory=dict)
    """Incarnations that requeues of ours put into a hold, with the time of the requeue, seconds since the epoch."""
    resumed: Mapping[JobKey, float] = field(default_factory=dict)
    """When we last resumed each live job in Slurm: a slurmctld that forgets its last seconds calls them suspended."""
    repairs: Mapping[JobKey, int] = field(default_factory=dict)
    """Repairs that were tried on live jobs whose processes contradict Slurm's word, until they run as they should."""
    requeued: Mapping[JobKey, float] = field(default_factory=dict)
    """When we last requeued each incarnation, seconds since the epoch: a slurmctld that is killed may forget that."""
    departed: Mapping[JobKey, float] = field(default_factory=dict)
    """When incarnations that we had released were first gone: a slurmctld that is killed may show them held again."""
    ended: EndedJobs = field(default_factory=EndedJobs)
    movable_usage: float = 0.0
    """The part of ``usage`` of jobs that could leave their GPUs."""
    factors: Mapping[int, int] = field(default_factory=dict)
    """SiteFactors that we gave to jobs, by id, unless 0: what is to be undone."""
    keep_checkpoints: Mapping[str, float] = field(default_factory=dict)
    """When a job of this user and name (``USER/NAME``) was last seen with checkpoints, seconds since the epoch."""
    made_way: Mapping[int, float] = field(default_factory=dict)
    """When other jobs last began to make way for the waiting job with this id, seconds since the epoch."""
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    """The last ordered checkpoint of each live job, by id: what its later starts have to find."""
    unrestored: Mapping[int, str] = field(default_factory=dict)
    """Live jobs that must not be moved again, by id, because they trained without what they were moved with."""
    stalled: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """When a checkpoint of each user was last overdue on a file system, seconds since the epoch; those of the last
    minutes."""


remembered = changer(Memory)


class Sentences(Mapping[JobKey, str]):
    """Sentences by job that are worked out at the first read of one: a simulation reads none."""

    def __init__(self, work_out: Callable[[], Mapping[JobKey, str]]) -> None:
        self._work_out = work_out

    @cached_property
    def _found(self) -> Mapping[JobKey, str]:
        return self._work_out()

    def __getitem__(self, key: JobKey) -> str:
        return self._found[key]

    def __iter__(self) -> Iterator[JobKey]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return repr(self._found)

    def items(self) -> ItemsView[JobKey, str]:
        """Return all of them: far quicker than one after the other."""
        return self._found.items()


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions of a round, the memory after it, and one readable sentence for each managed job."""

    actions: tuple[Action, ...]
    memory: Memory
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
    quiet_until_s: float = field(default=0.0, compare=False)
    """Until then, in seconds since the epoch, the decision stays as it is if it orders nothing and nothing happens."""
