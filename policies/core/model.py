"""The values that policies see: one snapshot of the cluster, with its jobs, nodes, leases and hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.profile import Profile

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool) -> Callable[[type], type]:
        """Return the dataclass decorator for what a round makes for each job: that it is frozen is mypy's to check.

        A frozen class sets each field by a call of its own, which takes twice the time.
        """
        return dataclass(slots=slots, unsafe_hash=frozen)


T = TypeVar("T")
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, as sqlite and JSON hold it."""


class JobKey(NamedTuple):
    """One incarnation of a job: Slurm reuses the id when it requeues, so the restart count belongs to it."""

    id: Whole
    restart: Whole

    def __str__(self) -> str:
        return f"{self.id}.{self.restart}" if self.restart else str(self.id)


class Gpu(NamedTuple):
    """One physical GPU: lanes of a host share these, so a lane never appears in it."""

    host: str
    index: int  # type: ignore[assignment] # hides tuple.index, which is never called on a GPU


class Share(NamedTuple):
    """Resources that one node gives to a job. Memory in MB."""

    node: str
    gpus: int
    cpus: int
    memory_mb: int


Placement: TypeAlias = tuple[Share, ...]
"""All that a job has; one share a node, in order of node names."""


GpuCount: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
Priority: TypeAlias = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
Iterations: TypeAlias = Annotated[int, Meta(ge=1, le=2_000_000_000)]
Duration: TypeAlias = Annotated[float, Meta(ge=1, le=2_000_000_000)]
"""Seconds; the bounds of these five are those of job_submit.lua."""

JobState: TypeAlias = Literal["PENDING", "RUNNING", "SUSPENDED", "OTHER"]
LeaseState: TypeAlias = Literal["waiting", "held", "stopping", "yielded"]


@dataclass(frozen=True, slots=True)
class Options:
    """Options that the user set, from the job comment's ``cadenza`` key."""

    share: bool = True
    min_gpus: GpuCount | None = None
    max_gpus: GpuCount | None = None
    batch: Literal["global", "per-gpu"] = "global"
    """Batch size that stays the same on another number of GPUs: the whole one, or each GPU's. The script follows it."""
    model: ModelName | None = None
    priority: Priority = 0
    iterations: Iterations | None = None
    """The whole job's iterations, boundaries of all its incarnations together."""
    duration_s: Duration | None = None
    """The whole job's run time with what it asked for, seconds; ``iterations`` says more where both are there."""
    checkpoints: bool | None = None
    """True if the job keeps checkpoints, as its user says; None: not said. Its ranks say it, once they attach."""
    late: bool = False
    """The job starts without its lease and asks for it when it needs its GPUs; one of several nodes waits at the start
    all the same."""


class JobUsage(msgspec.Struct, frozen=True):
    """Recent measurements of a job, over all its hosts; None for an unknown value. Memory in MB."""

    samples_s: float | None = None
    """Training samples a second; None if the script does not pass them to ``boundary()``."""
    iteration_p99_s: float | None = None
    data_wait: float | None = None
    """Share of the iteration time that the worst host's ranks were blocked in their loaders, 0 to 1."""
    gpu_percent: float | None = None
    """Use of its GPUs by its own processes, mean over the GPUs."""
    gpu_memory_mb: float | None = None
    """GPU memory of its processes, all its GPUs together."""
    cpu_percent: float | None = None
    """100 is one core."""
    rss_mb: float | None = None
    """Resident sets; pages of files and shared memory count once."""
    read_mb_s: float | None = None
    memory_low_mb: float | None = None
    memory_peak_mb: float | None = None
    """Memory of the rank that uses most: lowest value at a boundary, and peak."""
    order_arrived_s: float | None = None
    order_done_s: float | None = None
    """Last stop: seconds from the boundary until the slowest rank was ready, and until it had offloaded its state."""


class StepRate(NamedTuple):
    """Speed of a job since the set of jobs on its GPUs last changed. Times in seconds.

    A job that does not run has the pace of the last time.
    """

    iteration_s: float
    """Mean of its slowest rank; 0 before the first iteration."""
    iterations: Whole
    window_s: float = 0.0
    error: float = 0.0
    """Standard error of the mean, relative to it."""
    data_wait: float = 0.0
    """Share of the iteration time that it was blocked in its loader, 0 to 1."""
    co_runners: tuple[JobKey, ...] = ()
    """Other jobs that ran on its GPUs in this time, in order; empty: it had them alone."""


class Receipt(NamedTuple):
    """A complete checkpoint that was ordered: the job's next start has to find it, or a later one of the same job."""

    restart: Whole
    """The first start that has to find it."""
    step: Whole
    paths: tuple[str, ...] = ()
    """One of each saver; empty if they cannot be named."""
    left_s: float = 0.0
    """Time at which it was first seen, seconds since the epoch; 0: not known, or the job went on since."""


MAX_REFUSALS = 3
"""Stops in a row that failed after which a job counts as one that cannot be stopped."""


@value(frozen=True, slots=True)
class Lease:
    """A job's right to its GPUs, as the agents report it; times in seconds.

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
    use: JobUsage | None = None
    """None: nothing was measured yet."""
    requeue_owner: str = ""
    """Framework that requeues the job by a signal handler, such as *lightning*: it is not ours to requeue."""
    checkpoints: bool = False
    """True if every rank can save a checkpoint on order, and no framework requeues the job."""
    saves_away: bool = False
    """True if every rank can also save it while its state is in host memory, that is after a yield."""
    saving: bool = False
    """Its ranks save one at this time although it has yielded, or have saved it and wait for the requeue; or they move
    their state from host memory to a disk."""
    lost: str = ""
    """Why the job cannot go on with what it has, if so: only a requeue helps."""
    saved: bool = False
    """Every rank stands at the same boundary with a complete checkpoint, ready to be requeued."""
    receipt: Receipt | None = None
    """The receipt of this checkpoint."""
    lost_s: float = 0.0
    """Training that the start after a move would repeat, with the checkpoint that it has now, as its ranks say."""
    unrestored: str = ""
    """Why it must not be moved again, a sentence: it trained without what it was moved with; empty if it may."""
    unready: str = ""
    """Why its ranks, which have savers, can save no checkpoint, a sentence; empty if they can or have none."""
    file_system: str = ""
    """File system that its last ordered checkpoint is on; empty if it is not known."""
    stalls: bool = False
    """A checkpoint that was ordered is overdue, or was given up a moment ago because it was."""
    pace: StepRate | None = None
    """None: it has not run yet, or was not measured."""
    refusals: int = 0
    """Stops in a row that its ranks refused, slept through or only claimed to follow."""
    unyielding: str = ""
    """Why it is not ready to yield although its ranks can stop at a boundary, for a checkpoint; empty otherwise."""
    shown: str = ""
    """State of its processes as its hosts show it: running, frozen (on one host at least) or gone; "" not known."""
    amiss: str = ""
    """Difference between the processes and Slurm's word that has lasted, as an agent saw it; empty if there is none."""
    cpus_per_gpu: float | None = None
    """CPUs for each GPU that the agents have set, on the host with the fewest; 0: they could not. None: not tuned."""
    waiting_on: tuple[str, ...] = ()
    """Hosts where it has never had its GPUs, while it has them on others."""
    late: bool = False
    """The job has started without its lease and has not asked for it yet: it takes no turns and uses no GPU."""
    early: str = ""
    """The process that was seen on a GPU before the job had asked for its lease; empty if there was none."""
    no_room: str = ""
    """Why the agents give it no lease now: others keep the GPU or host memory that it needs, or its GPU fails."""

    @property
    def stoppable(self) -> bool:
        """True if its ranks stand, or can stop at a boundary, if only for a checkpoint."""
        return self.ready or self.state == "yielded" or bool(self.unyielding)

    @property
    def stuck(self) -> bool:
        """True for a holder whose stops have failed so often that it counts as one that cannot be stopped."""
        return self.state in ("held", "stopping") and self.refusals >= MAX_REFUSALS


@value(frozen=True, slots=True)
class Progress:
    """Progress of a job at ``at_s``; even changes are rates, so that a record stays true for long.

    *Work* is counted in seconds at the proportional share of the job's profile.
    """

    at_s: float
    """Seconds since the epoch."""
    total_s: float | None = None
    """The job's whole work; None when it is unknown."""
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
    submitted_s: float | None = None
    """Its first submission, seconds since the epoch, where a requeue has submitted it anew."""

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


class SlurmState(NamedTuple):
    """Facts that only Slurm changes while a job is on its way: one short query returns them."""

    state: JobState
    held: bool
    eligible: bool
    """True if Slurm may start it now, unless it is held."""


class Relocating(NamedTuple):
    """A job on its way to other nodes or another size; only decisions see this, recorded snapshots do not."""

    destination: Placement
    """Empty: it makes way, and is left to the policy once it is requeued."""
    arriving: bool = False
    """True once it is placed there and only Slurm has to start it."""


@value(frozen=True, slots=True)
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
    run_s: float | None = None
    """Time that this incarnation has run, suspends excluded, as Slurm counts it; None: not started, or not known."""
    suspended_s: float | None = None
    """Begin of its suspend in Slurm; None: not suspended, or not known."""
    time_limit_s: float | None = None
    """None: no limit, or the partition's."""
    command: str = ""
    """Command of a batch job: the path of its script and the script's arguments."""
    tasks: int = 1
    slurm_priority: int = 0
    eligible_s: float | None = None
    """Earliest start of a pending job, as after a requeue; None: at once, or not known."""
    nodes: tuple[str, ...] = ()
    """Slurm node names (lanes) of a running or suspended job."""
    required_nodes: tuple[str, ...] = ()
    barred: frozenset[str] = frozenset()
    """Nodes on which Slurm would not start it now: by its constraint, nodes that it excludes, and reservations."""
    held_at_restart: bool = False
    """Slurm itself holds it as slurmctld restarted: it has started it for the second time, or forgotten its start."""
    gpu_type: str = ""
    """Type of GPU that it asked for; empty: any."""
    options: Options | None = None
    """None: the job did not opt in."""
    unmanageable: str = ""
    """Why an opted-in job is left alone all the same (hetjob, cron, several partitions …); else empty."""
    requeueable: bool = True
    lease: Lease | None = None
    """None: no agent knows the job."""
    starting: bool = False
    """Slurm has given it its nodes and waits until they are up (squeue(1), CONFIGURING, POWER_UP_NODE)."""
    absent: bool = False
    """Slurm has it on its nodes, and the agents of all its hosts have not seen a step of it for some time."""
    prolog_lost: bool = False
    """Slurm waits for the end of its prolog from a slurmd that has been started anew since."""
    terminated_s: float | None = None
    """When Slurm called it failed, by SIGTERM, shortly after a start of slurmctld; None: it did not end so."""
    profile: Profile | None = None
    """None: its model was not measured, so it gets its proportional share."""
    profile_note: str = ""
    """Source of the profile, or the reason why the job has none."""
    placement: Placement = ()
    """Shares of a running job; empty when Slurm shows no more than ``nodes``."""
    progress: Progress | None = None
    relocating: Relocating | None = None

    @property
    def opted_in(self) -> bool:
        """Return True if the user asked for sharing and the job can be managed."""
        return self.options is not None and self.options.share and not self.unmanageable

    @property
    def leased_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs of the job's lease; none where no agent knows the job."""
        return self.lease.gpus if self.lease is not None else ()

    @property
    def amounts(self) -> dict[str, Amount]:
        """Return the amount of a started job on each node; an even part of its totals where Slurm shows no more."""
        nodes, placement = self.nodes, self.placement
        if len(nodes) == 1 == len(placement) and nodes[0] == placement[0].node:  # nearly always
            return {nodes[0]: placement[0][1:]}
        placed = {share.node: share[1:] for share in placement}
        even = self.part(max(len(nodes), 1))
        return {name: placed.get(name, even) for name in nodes}

    def part(self, nodes: int) -> Amount:
        """Return an even part of what the job asks for, for each of so many nodes."""
        return -(-self.gpus // nodes), -(-self.cpus // nodes), -(-self.memory_mb // nodes)

    @property
    def starts_unleased(self) -> bool:
        """Return True if the job uses no GPU yet: its lease begins once it asks for it."""
        if self.lease is not None:
            return self.lease.late
        return self.opted_in and self.options is not None and self.options.late and self.num_nodes == 1

    @property
    def held(self) -> bool:
        """Return True if the job is pending because its owner, an admin or Cadenza holds it."""
        return self.state == "PENDING" and self.slurm_priority == 0

    def slurm_state(self, now_s: float) -> SlurmState:
        """Return how the job stands with Slurm."""
        return SlurmState(self.state, self.held, (self.eligible_s or 0.0) <= now_s)


def changer(kind: type[T]) -> Callable[..., T]:
    """Return ``dataclasses.replace`` for one class of values, which takes a third of its time."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    values, places = attrgetter(*names), {name: at for at, name in enumerate(names)}

    def changed(one: T, **new: object) -> T:
        found = list(values(one))
        for name, value in new.items():
            found[places[name]] = value
        return kind(*found)

    return changed


changed = changer(Job)


LACKS_RESOURCES = frozenset({"Resources", "Priority"})
"""Slurm's reasons of a pending job that only lacks free resources (squeue(1), JOB REASON CODES)."""
WAITING_REASONS = LACKS_RESOURCES | {"", "None"}
"""The same, and of one that Slurm has not looked at yet."""

LONG_END_S = 10.0
"""Time after which a job that is ending counts as stuck: its node gets no other job."""


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
    asleep: bool = False
    """Not up because Slurm has powered it down or powers it up: it wakes it by itself for a job that needs it."""
    drained: bool = False
    drain_reason: str = ""
    drained_at_restart: bool = False
    """Slurm drained it by itself while slurmctld or its slurmd restarted: jobs were started twice, or not stopped."""
    weight: int = 1
    """Slurm fills nodes of less weight first."""
    cpus_used: int = 0
    memory_used_mb: int = 0
    gpus_used: int = 0
    gpu_memory_gb: float | None = None
    """Memory of each GPU, GB; None: not known."""
    ending_s: float = 0.0
    """Time for which a job has been ending there without an end, the longest of several, in seconds."""
    empty_from_s: float | None = None
    """When an admin wants it without jobs (`cadenza host`), seconds since the epoch, 0: now; None: not at all."""

    @property
    def takes_jobs(self) -> bool:
        """Return True if Slurm starts jobs there, and no job has been ending there for long."""
        return self.up and not self.drained and self.ending_s < LONG_END_S

    @property
    def closed_reason(self) -> str:
        """Return why the node takes no jobs, after its name; empty if it does."""
        if not self.up:
            return "is powered down" if self.asleep else "is down"
        if self.drained:
            return f"is drained: {self.drain_reason}"
        return "" if self.takes_jobs else f"has a job that has been ending for {self.ending_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Host:
    """One machine as its agent reports it; without a live agent ``agent_alive`` is False."""

    name: str
    agent_alive: bool
    agent_version: str = ""
    memory_mb: int = 0
    memory_free_mb: int = 0
    lacks: tuple[str, ...] = ()
    """Functions that its agent's settings ask for and the machine lacks."""
    prefetched: tuple[JobKey, ...] = ()
    """Jobs on their way to it whose files it has read, as far as it could."""
    taken: tuple[str, ...] = ()
    """Processes there that use GPUs without a lease, each as a sentence."""
    faults: tuple[str, ...] = ()
    """Faults of the machine that its agent goes on with, each as a sentence."""
    refused: str = ""
    """Reason for which the service does not listen to its agent, as a predicate; empty if it does, or hears none."""


@dataclass(frozen=True, slots=True)
class SiteRules:
    """Rules of the site that decide who goes first, as its Slurm has them in force; they change rarely."""

    multifactor: bool = True
    """False under ``PriorityType=priority/basic``, which knows no SiteFactor."""
    weights: Mapping[str, int] = field(default_factory=dict, hash=False)
    """PriorityWeights that are not 0, by Slurm's names in lower case: age, assoc, fairshare, jobsize, partition, qos,
    tres (the sum of its parts)."""
    max_age_s: float = 7 * 86400.0
    """PriorityMaxAge: the age from which on a job has the whole weight for age."""
    tiers: Mapping[str, int] = field(default_factory=dict, hash=False)
    """PriorityTier of each partition; jobs of a higher tier go first, whatever their priority."""
    qos_priority: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Priority of each QOS."""
    unread: tuple[str, ...] = ()
    """Parts that could not be read yet, by name: nothing is known of these."""
    fair_share: Mapping[str, float] = field(default_factory=dict, hash=False)
    """LevelFS of accounts (``ACCOUNT``) and of their users (``ACCOUNT/USER``): their share over their usage, so below 1
    they have had more than their share (sshare(1)). Empty where the site has no fair share."""

    def tier(self, partition: str) -> int:
        """Return the PriorityTier of a partition, 1 where none is set; of several (``a,b``) the highest."""
        if "," not in partition:
            return self.tiers.get(partition, 1)
        return max(self.tiers.get(name, 1) for name in partition.split(","))

    @property
    def points(self) -> int:
        """Return the sum of the weights: the highest priority that factors of the site can give a job."""
        return sum(self.weights.values())


@dataclass(frozen=True)
class ClusterSnapshot:
    """Everything a decision may depend on, read at one moment; the order of the tuples means nothing."""

    time_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    hosts: tuple[Host, ...] = ()
    site: SiteRules = field(default_factory=SiteRules)

    def job(self, key: JobKey) -> Job | None:
        """Return the job with this key, or None when it is gone."""
        return self.by_key.get(key)

    def at(self, time_s: float) -> ClusterSnapshot:
        """Return the same cluster at another time; what has been worked out of its jobs is kept."""
        later = replace(self, time_s=time_s)
        later.__dict__.update(by_key=self.by_key, by_id=self.by_id, host_of=self.host_of)
        return later

    @cached_property
    def by_key(self) -> Mapping[JobKey, Job]:
        """Return the jobs by key; worked out once, since every part of a round asks for it."""
        return {job.key: job for job in self.jobs}

    @cached_property
    def host_of(self) -> Mapping[str, str]:
        """Return the host of each node."""
        return {node.name: node.host for node in self.nodes}

    @cached_property
    def on_host(self) -> Mapping[str, Sequence[Node]]:
        """Return the nodes of each host, in order of names."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.host, []).append(node)
        return found

    @cached_property
    def taken(self) -> Mapping[str, str]:
        """Return the first process without a lease of each host that has some."""
        return {host.name: host.taken[0] for host in self.hosts if host.taken}

    @cached_property
    def by_id(self) -> Mapping[int, Job]:
        """Return the jobs by id, of several incarnations the first."""
        return {job.key.id: job for job in reversed(self.jobs)}
