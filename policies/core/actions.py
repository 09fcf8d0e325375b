"""Actions of a decision, one value for each kind, with its reason; and the outcome of an action."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from cadenza.policies.core.model import JobKey, Placement


@dataclass(frozen=True, slots=True)
class Yield:
    """Ask every rank of a job to stop at the same boundary and free its GPUs (agents)."""

    job: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Give a waiting or yielded job the lease as soon as its GPUs are free (agents)."""

    job: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Slurm's suspend of a job that has yielded: its time limit stops and Slurm frees its CPUs."""

    job: JobKey
    reason: str
    repair: bool = False
    """Its processes are frozen although Slurm calls it running: only a suspend makes Slurm accept the resume."""


@dataclass(frozen=True, slots=True)
class Unsuspend:
    """Slurm's resume; the job still waits for its lease."""

    job: JobKey
    reason: str
    repair: bool = False
    """Its processes run although Slurm calls it suspended."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Slurm's requeue; ``hold`` keeps the job pending until a Place or Release."""

    job: JobKey
    hold: bool
    reason: str
    repair: bool = False
    """It has ended by the SIGTERM of an earlier requeue of ours, which a killed slurmctld forgot."""


@dataclass(frozen=True, slots=True)
class SetFactor:
    """Set a job's SiteFactor, the addend of its priority that only an administrator can set (scontrol(1))."""

    job: JobKey
    factor: int
    reason: str


@dataclass(frozen=True, slots=True)
class MakeWay:
    """Requeue running jobs whose checkpoints are complete, all by one command, so that another job starts there.

    Each gets its SiteFactor before: it comes back behind the job that it made way for.
    """

    jobs: tuple[JobKey, ...]
    factors: tuple[int, ...]
    """SiteFactor of each job."""
    for_job: JobKey
    reason: str

    @property
    def job(self) -> JobKey:
        """Return the first of the jobs that make way."""
        return self.jobs[0]


@dataclass(frozen=True, slots=True)
class Place:
    """Pin a held pending job to nodes, with its CPUs and memory unless None, then release it."""

    job: JobKey
    nodes: tuple[str, ...]
    reason: str
    cpus_per_task: int | None = None
    memory_per_node_mb: int | None = None
    shares: Placement = ()
    """Share of each node, where an allocation says so; empty: the job's own request."""
    resize: bool = False
    """Also change the job's numbers of GPUs and nodes, and its CPUs and memory with them, to ``shares``."""
    elsewhere: bool = False
    """It ran on none of these nodes just now: it may start in the very second in which it was requeued.

    Slurm makes every requeued job wait for the next second, because a node refuses a credential that is not younger
    than the one that it has just revoked.
    """


@dataclass(frozen=True, slots=True)
class Release:
    """Release a job that we hold, as it is; ``unpin`` clears the node list that a Place of ours gave it."""

    job: JobKey
    reason: str
    unpin: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """Change what a pending job asks of Slurm; when and where it starts stays Slurm's matter. Totals, memory in MB."""

    job: JobKey
    cpus: int
    memory_mb: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tune:
    """Change a running job's CPUs and memory in place; its nodes and GPUs stay."""

    job: JobKey
    shares: Placement
    reason: str
    caches_mb: tuple[int | None, ...] = ()
    """Memory of each share that the job's caches may take, MB; None, or empty: as much as they asked for."""


@dataclass(frozen=True, slots=True)
class Migrate:
    """Continue a job on other nodes with the same number of GPUs: checkpoint, requeue, place, restore.

    The action itself orders the checkpoint; or, where ``prefetch`` names hosts, that they read the job's files first.
    """

    job: JobKey
    shares: Placement
    reason: str
    prefetch: tuple[str, ...] = ()
    goal: str = field(default="", compare=False)
    """Purpose for the job's own output: a predicate of what it does once it has saved."""
    save_s: float = field(default=0.0, compare=False)
    """Longest time that saving may take, in seconds; 0: the service's own."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Continue a job that allows it with another number of GPUs (grow-shrink); the rest as of Migrate."""

    job: JobKey
    shares: Placement
    reason: str
    prefetch: tuple[str, ...] = ()
    goal: str = field(default="", compare=False)
    """Purpose for the job's own output: a predicate of what it does once it has saved."""
    save_s: float = field(default=0.0, compare=False)
    """Longest time that saving may take, in seconds; 0: the service's own."""


@dataclass(frozen=True, slots=True)
class Save:
    """Order the checkpoint of a job that moves, once the hosts that it goes to are warm (agents)."""

    job: JobKey
    reason: str
    goal: str = field(default="", compare=False)
    save_s: float = field(default=0.0, compare=False)
    """Both as of Migrate."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Let jobs that take turns on the same GPUs run there at once."""

    jobs: tuple[JobKey, ...]
    reason: str

    @property
    def job(self) -> JobKey:
        """Return the job that joins, the first."""
        return self.jobs[0]


@dataclass(frozen=True, slots=True)
class Unpack:
    """Let a packed job take turns again."""

    job: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Take a further lane out of service; jobs on it go on."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class OpenNode:
    """Put a further lane that we drained back into service, or any node that Slurm drained at a restart of its own."""

    node: str
    reason: str
    drain: str = ""
    """Reason of Slurm's own drain; the node stays as it is if another has taken its place. Empty: the drain is ours."""


NodeAction: TypeAlias = DrainNode | OpenNode

Action: TypeAlias = (
    Yield
    | Resume
    | Suspend
    | Unsuspend
    | Requeue
    | SetFactor
    | MakeWay
    | Place
    | Release
    | Size
    | Tune
    | Migrate
    | Resize
    | Save
    | Pack
    | Unpack
    | DrainNode
    | OpenNode
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one applied action; ``error`` names the failure and who must act."""

    ok: bool
    error: str = ""
    left: bool = True
    """False: the guard or the round's deadline kept the action in as it was to leave."""
