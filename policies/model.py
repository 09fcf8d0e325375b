"""The values that policies see and produce: a snapshot of the cluster in, a decision out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from cadenza.policies.profile import Profile


class JobKey(NamedTuple):
    """One incarnation of a job: Slurm reuses the id when it requeues, so the restart count belongs to it."""

    id: int
    restart: int

    def __str__(self) -> str:
        return f"{self.id}.{self.restart}" if self.restart else str(self.id)


class Gpu(NamedTuple):
    """One physical GPU: lanes of a host share these, so a lane never appears in it."""

    host: str
    index: int  # type: ignore[assignment] # hides tuple.index, which nobody calls on a GPU


class Share(NamedTuple):
    """What one node gives to a job. Memory in MB."""

    node: str
    gpus: int
    cpus: int
    memory_mb: int


Placement: TypeAlias = tuple[Share, ...]
"""All that a job has; one share a node, in order of node names."""


JobState: TypeAlias = Literal["PENDING", "RUNNING", "SUSPENDED", "OTHER"]
LeaseState: TypeAlias = Literal["waiting", "held", "stopping", "yielded"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, from the job comment's ``cadenza`` key."""

    share: bool = True
    min_gpus: int | None = None
    max_gpus: int | None = None
    model: str | None = None
    priority: int = 0
    held: bool = False
    """Set by job_submit.lua when it held the job for us (held admission)."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the agents say of one job's right to its GPUs; times in seconds.

    ``state``: *waiting* never ran, *held* may use the GPUs, *stopping* is asked to yield and has not yet,
    *yielded* has moved its state to host memory. ``vtime_s`` is held time over weight, the current
    stretch included: the key of the weighted round robin (see ``sharing.turns`` for its start).
    """

    state: LeaseState
    gpus: tuple[Gpu, ...]
    vtime_s: float = 0.0
    held_s: float = 0.0
    """Time since the lease was last given; 0 unless held or stopping."""
    waited_s: float = 0.0
    """Time since the job began to wait for the lease; 0 while held or stopping."""
    ready: bool = False
    """Every rank has attached and can stop at a boundary."""
    why_not_ready: str = ""
    iteration_s: float | None = None
    exclusive: bool = False
    """An unmanaged job: it is never asked to yield and every overlapping managed job makes way."""
    weight: float = 1.0
    """Share of the turns relative to the other jobs of its group."""
    step: int = 0
    """Boundaries that the slowest rank has completed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, as of ``at_s``; what changes evenly is given as a rate, so that a record stays true for long.

    *Work* is counted in seconds at the proportional share of the job's profile.
    """

    at_s: float
    """Seconds since the epoch."""
    total_s: float | None = None
    """The job's whole work; None when nobody knows."""
    done_s: float = 0.0
    attained_s: float = 0.0
    """Time that it has had its GPUs; times its GPUs this is the attained service of LAS."""
    ran_s: float | None = None
    """When it last had GPUs, seconds since the epoch; None: never. Without meaning while it runs."""
    running: bool = False
    rate: float = 0.0
    """Work a second now, costs and interference included; 0 unless running."""
    speed: float = 1.0
    """Throughput of what it holds by its profile, 1 at the proportional share; as of its last run."""
    gpu_type: str = ""
    """Type of the GPUs that it has now or had last; empty where nodes name none."""
    attained_on: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The part of ``attained_s`` on GPU types that it had before the present one, by type; to be kept only where a
    cluster has several types: what is missing here was on ``gpu_type``."""

    def done(self, now_s: float) -> float:
        """Return the work done by ``now_s``."""
        return self.done_s + self.rate * max(now_s - self.at_s, 0.0)

    def attained(self, now_s: float) -> float:
        """Return the seconds that the job has had its GPUs by ``now_s``."""
        return self.attained_s + (max(now_s - self.at_s, 0.0) if self.running else 0.0)

    def attained_by_type(self, gpu_type: str, now_s: float) -> float:
        """Return the seconds that the job has had GPUs of one type; time on an unnamed type counts on every type."""
        before = self.attained_on.get(gpu_type, 0.0)
        if self.gpu_type not in ("", gpu_type):
            return before
        return before + max(self.attained(now_s) - sum(self.attained_on.values()), 0.0)

    def remaining(self, now_s: float) -> float | None:
        """Return the work that is left, or None when its total is not known."""
        return None if self.total_s is None else max(self.total_s - self.done(now_s), 0.0)


@dataclass(frozen=True, slots=True)
class Job:
    """One job as Slurm and the agents report it. Memory in MB, times in seconds since the epoch."""

    key: JobKey
    user: str
    account: str
    partition: str
    qos: str
    state: JobState
    gpus: int
    cpus: int
    memory_mb: int
    num_nodes: int
    submit_s: float
    name: str = ""
    state_reason: str = ""
    start_s: float | None = None
    slurm_priority: int = 0
    nodes: tuple[str, ...] = ()
    """Slurm node names (lanes) of a running or suspended job."""
    required_nodes: tuple[str, ...] = ()
    options: Options | None = None
    """None: the job did not opt in."""
    unmanageable: str = ""
    """Why an opted-in job is left alone all the same (hetjob, cron, several partitions …); else empty."""
    requeueable: bool = True
    lease: Lease | None = None
    """None: no agent knows the job."""
    profile: Profile | None = None
    """None: nobody measured its model, so it gets its proportional share."""
    placement: Placement = ()
    """What a running job has now; empty when the books show no more than ``nodes``."""
    progress: Progress | None = None

    @property
    def opted_in(self) -> bool:
        """Whether the user asked for sharing and the job can be managed."""
        return self.options is not None and self.options.share and not self.unmanageable

    @property
    def held(self) -> bool:
        """Whether the job is pending because somebody holds it."""
        return self.state == "PENDING" and self.slurm_priority == 0


@dataclass(frozen=True, slots=True)
class Node:
    """One Slurm node, that is one lane of a host. Memory in MB."""

    name: str
    host: str
    lane: int
    cpus: int
    memory_mb: int
    gpus: int
    gpu_type: str = ""
    partitions: tuple[str, ...] = ()
    up: bool = True
    drained: bool = False
    drain_reason: str = ""
    cpus_used: int = 0
    memory_used_mb: int = 0
    gpus_used: int = 0
    gpu_memory_gb: float | None = None
    """Memory of each GPU, GB; None: not known."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine as its agent reports it; without a live agent ``agent_alive`` is False."""

    name: str
    agent_alive: bool
    agent_version: str = ""
    memory_mb: int = 0
    memory_free_mb: int = 0


@dataclass(frozen=True)
class ClusterSnapshot:
    """Everything a decision may depend on, read at one moment; the order of the tuples means nothing."""

    time_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    hosts: tuple[Host, ...] = ()

    def job(self, key: JobKey) -> Job | None:
        """Return the job with this key, or None when it is gone."""
        return self.by_key.get(key)

    def at(self, time_s: float) -> ClusterSnapshot:
        """Return the same cluster at another time; what has been worked out of its jobs is kept."""
        later = replace(self, time_s=time_s)
        later.__dict__["by_key"] = self.by_key
        return later

    @cached_property
    def by_key(self) -> Mapping[JobKey, Job]:
        """Return the jobs by key; worked out once, since every part of a round asks for it."""
        return {job.key: job for job in self.jobs}


# --- Actions -------------------------------------------------------------------------------------------


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
    """Slurm's suspend of a job that has yielded: its time limit stops and its CPUs are free in the books."""

    job: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class Unsuspend:
    """Slurm's resume; the job still waits for its lease."""

    job: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Slurm's requeue; ``hold`` keeps the job pending until a Place or Release."""

    job: JobKey
    hold: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """Pin a held pending job to nodes, with its CPUs and memory unless None, then release it."""

    job: JobKey
    nodes: tuple[str, ...]
    reason: str
    cpus_per_task: int | None = None
    memory_per_node_mb: int | None = None
    shares: Placement = ()
    """What each node gives, where an allocation says so; empty: what the job asked for."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release a job that we hold, as it is; ``unpin`` clears the node list that a Place of ours gave it."""

    job: JobKey
    reason: str
    unpin: bool = False


@dataclass(frozen=True, slots=True)
class Tune:
    """Change a running job's CPUs and memory in place; its nodes and GPUs stay."""

    job: JobKey
    shares: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """Continue a job on other nodes with the same number of GPUs: checkpoint, requeue, place, restore."""

    job: JobKey
    shares: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Continue a job that allows it with another number of GPUs (grow-shrink)."""

    job: JobKey
    shares: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Pack:
    """Let jobs that take turns on the same GPUs run there at once."""

    jobs: tuple[JobKey, ...]
    reason: str

    @property
    def job(self) -> JobKey:
        """Return the job that joins, the first: the guard asks about this one."""
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
    """Put a further lane that we drained back into service."""

    node: str
    reason: str


Action: TypeAlias = (
    Yield
    | Resume
    | Suspend
    | Unsuspend
    | Requeue
    | Place
    | Release
    | Tune
    | Migrate
    | Resize
    | Pack
    | Unpack
    | DrainNode
    | OpenNode
)


# --- Results -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one applied action; ``error`` says what and who must act when it failed."""

    ok: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class SharingMemory:
    """What Gandiva's introspective functions remember: pairs instead of mappings, so that any store can keep it."""

    packs: tuple[tuple[JobKey, ...], ...] = ()
    """Jobs that we packed; who joined last comes first."""
    lost: tuple[tuple[JobKey, JobKey], ...] = ()
    """Jobs that were slower together than in turns, the lower key first."""
    alone_s: tuple[tuple[JobKey, float], ...] = ()
    """A job's time for an iteration when it last had its GPUs alone, seconds."""
    moved_s: tuple[tuple[int, float], ...] = ()
    """When the job with this id was last migrated or resized."""
    spare_s: tuple[tuple[str, float], ...] = ()
    """Since when a host has GPUs that no job uses or waits for."""
    asked_gpus: tuple[tuple[int, int], ...] = ()
    """GPUs that the job with this id had before it was first resized."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision may remember of earlier ones; kept by the store, never by a policy."""

    suspended: frozenset[JobKey] = frozenset()
    """Jobs that we suspended in Slurm: somebody else's suspend is not ours to undo."""
    placed: frozenset[JobKey] = frozenset()
    """Held jobs that we have released: a later hold is the owner's and stays."""
    drained: frozenset[str] = frozenset()
    """Nodes that we drained."""
    last_yield_s: Mapping[JobKey, float] = field(default_factory=dict)
    """When each live job was last asked to yield (cool-down)."""
    sharing: SharingMemory = field(default_factory=SharingMemory)
    usage: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds that accounts (``ACCOUNT``) and their users (``ACCOUNT/USER``) have had, decayed; for fair shares."""
    usage_s: float | None = None
    """When ``usage`` was true, seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, what to remember, and one readable sentence for each managed job."""

    actions: tuple[Action, ...]
    memory: Memory
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
