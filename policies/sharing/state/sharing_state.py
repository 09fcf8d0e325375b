"""State of one round of sharing: stages read it, change it in order, and the decision is made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from cadenza.policies.allocation.problem import Allocate
from cadenza.policies.core.actions import (
    Action,
    MakeWay,
    Migrate,
    NodeAction,
    Pack,
    Place,
    Resize,
    Resume,
    SetFactor,
    Tune,
    Unpack,
    Yield,
)  # fmt: skip
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey, Lease, Placement, Progress, Relocating, Share
from cadenza.policies.ordering.ranking import Order, Queue
from cadenza.policies.relocation.phases import pinned_by_owner
from cadenza.policies.sharing.board.host import HostState, Resident, Seat, observe_hosts
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.state.groups import Group, group_keys, partners, standing
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings

MAX_ROOM_SEARCHES = 8
"""Pending jobs that room is searched for in one round."""


@dataclass(slots=True)
class SharingState:
    """One round so far. The hosts follow every placement and move that a stage plans; times in seconds."""

    snapshot: ClusterSnapshot
    memory: Memory
    settings: SharingSettings
    gandiva: GandivaSettings
    order: Order
    allocate: Allocate
    all_jobs: tuple[Job, ...]
    """All jobs of the snapshot, in order of keys."""
    queue: tuple[Job, ...]
    """The pending ones of them; most jobs of a site with a long queue, which few stages have to look at."""
    started: tuple[Job, ...]
    """The others."""
    leased: tuple[Job, ...]
    """Those that an agent knows."""
    jobs: dict[JobKey, Job]
    """Managed jobs with a lease that run or that we suspended, in order of keys."""
    groups: tuple[Group, ...]
    """Packed jobs once this round's packs and unpacks are done."""
    relocating: dict[int, Relocating]
    """Destinations of the jobs that are on their way to other nodes, by the job's id."""
    making_way: frozenset[int]
    """Ids of jobs that are on their way back to the queue, so that others start where they are."""
    fixed: set[JobKey]
    """Jobs that stay where they are this round."""
    moves_left: int
    """Number of migrations and resizes that this round may still begin."""

    # Turns
    yields: list[Yield] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    alone: Mapping[JobKey, Lease] = field(default_factory=dict)
    """Leases of running jobs that have their GPUs to themselves."""
    turn_reasons: dict[JobKey, str] = field(default_factory=dict)
    holders: frozenset[JobKey] = frozenset()
    """Jobs that have GPUs once this round's turns are done."""
    leaving: frozenset[JobKey] = frozenset()
    """Jobs with a part on a host that is about to be drained."""
    giving_back: dict[JobKey, str] = field(default_factory=dict)
    """Reason for the requeue of each job that cannot go on, or that gives its further lane back."""
    stopping: frozenset[JobKey] = frozenset()
    """Holders that an unpack of this round stops."""

    # Queue
    pending: list[Job] = field(default_factory=list)
    """Held jobs that the service places, and those that it places anew, in order."""
    stranded: dict[JobKey, str] = field(default_factory=dict)
    """Jobs that were placed on nodes that take no jobs any more, each with the reason."""
    queued: list[Job] = field(default_factory=list)
    """Jobs in Slurm's queue that lack free resources only."""
    make_room: Callable[[SharingState, Job], str] | None = None
    """Defragmentation for a pending job: it returns a sentence if it made room, else ""."""
    room_searches_left: int = MAX_ROOM_SEARCHES
    room_made: dict[JobKey, str] = field(default_factory=dict)
    """A sentence for each job that room is made for."""

    # Actions, by stage
    lane_actions: tuple[NodeAction, ...] = ()
    pack_actions: tuple[Pack | Unpack, ...] = ()
    slurm_actions: tuple[Action, ...] = ()
    moves: list[Migrate | Resize | Unpack] = field(default_factory=list)
    ways: list[MakeWay] = field(default_factory=list)
    """Running jobs that leave for a waiting one."""
    factors: list[SetFactor] = field(default_factory=list)
    """SiteFactors of waiting jobs."""
    tunes: tuple[Tune, ...] = ()
    placements: tuple[Place, ...] = ()

    # Reasons
    placement_reasons: dict[JobKey, str] = field(default_factory=dict)
    waiting_reasons: Callable[[], Mapping[JobKey, str]] = dict
    """Reasons of jobs that stay in Slurm's queue, which take time to work out."""
    pack_reasons: Mapping[JobKey, str] = field(default_factory=dict)
    size_reasons: dict[JobKey, str] = field(default_factory=dict)
    keeps_cpus: Mapping[JobKey, str] = field(default_factory=dict)
    """Reason why a job lends no CPUs, by job."""
    repair_reasons: dict[JobKey, str] = field(default_factory=dict)
    """Reason of each job whose processes contradict Slurm's word."""
    reasons: Mapping[JobKey, str] = field(default_factory=dict)
    quiet_until_s: float = 0.0
    """Time until which the decision can change by an event only, seconds since the epoch."""

    packed: dict[JobKey, JobKey] = field(default_factory=dict)
    """For each packed job the least key of its group."""
    further: frozenset[str] = frozenset()
    """Nodes that are further lanes of their host."""
    _units: Mapping[JobKey, JobKey] = field(default_factory=dict)
    """``packed`` as the round begins."""
    _hosts: dict[str, HostState] | None = None
    _by_node: dict[str, HostState] | None = None
    _ranks: dict[JobKey, int] | None = None
    _managed: list[tuple[Job, Lease]] | None = None
    _by_gpu: dict[Gpu, list[tuple[int, Job]]] | None = None
    _moved_s: dict[int, float] = field(default_factory=dict)
    _asked: dict[int, int] = field(default_factory=dict)
    _asked_nodes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        snapshot: ClusterSnapshot,
        memory: Memory,
        settings: SharingSettings,
        gandiva: GandivaSettings,
        order: Order,
        allocate: Allocate,
    ) -> SharingState:
        """Return the state at the beginning of a round."""
        all_jobs = tuple(sorted(snapshot.jobs, key=attrgetter("key")))
        queue = tuple([job for job in all_jobs if job.state == "PENDING"])
        started = tuple([job for job in all_jobs if job.state != "PENDING"])
        leased = tuple([job for job in all_jobs if job.lease is not None])
        jobs = {job.key: job for job in leased if _is_managed(job, memory, settings)}
        on_its_way = [(job.key, job.relocating) for job in all_jobs if job.relocating]
        going = [(key, place) for key, place in on_its_way if place.destination]
        groups = standing(memory.sharing.packs, jobs)
        pinned = {key for key, job in jobs.items() if pinned_by_owner(job, memory)}
        state = cls(
            snapshot,
            memory,
            settings,
            gandiva,
            order,
            allocate,
            all_jobs,
            queue,
            started,
            leased,
            jobs,
            groups,
            {key.id: place for key, place in going},
            frozenset(key.id for key, place in on_its_way if not place.destination),
            fixed=pinned | {key for key, _ in going},
            moves_left=gandiva.moves_per_round,
        )
        state.packed = state._units = group_keys(groups)
        state._moved_s = dict(memory.sharing.moved_s)
        state.further = frozenset(node.name for node in snapshot.nodes if node.lane > 0)
        state._asked = dict(memory.sharing.asked_gpus)
        state._asked_nodes = dict(memory.sharing.asked_nodes)
        return state

    def decision(self) -> Decision:
        """Return the decision that the stages have made; actions come in the order in which they are to be done."""
        actions = (
            *self.lane_actions,
            *self.pack_actions,
            *self.slurm_actions,
            *self.factors,
            *self.ways,
            *self.moves,
            *self.tunes,
            *self.placements,
        )
        reasons, self.reasons = self.reasons, {}
        return Decision(actions, self.memory, reasons, 0.0 if actions else self.quiet_until_s)

    @property
    def hosts(self) -> dict[str, HostState]:
        """Return the hosts with a live agent, as the round has changed them; worked out when they are asked for."""
        if self._hosts is None:
            self._hosts = observe_hosts(self.snapshot, self.settings.manages, self._units, floor=self.settings.floor)
        return self._hosts

    @property
    def by_node(self) -> Mapping[str, HostState]:
        """Return the host of each Slurm node."""
        if self._by_node is None:
            self._by_node = {node.name: host for host in self.hosts.values() for node in host.lanes}
        return self._by_node

    def lane_of(self, name: str) -> int:
        """Return the lane of a Slurm node whose host has a live agent."""
        return next(node.lane for node in self.by_node[name].lanes if node.name == name)

    @property
    def ranks(self) -> Mapping[JobKey, int]:
        """Return the place of each managed job in the ordering, 0 first; worked out when it is asked for."""
        if self._ranks is None:
            self._ranks = ranks_of(self)
        return self._ranks

    @property
    def now_s(self) -> float:
        """Return the time of the snapshot, seconds since the epoch."""
        return self.snapshot.time_s

    def managed(self, state: str) -> list[tuple[Job, Lease]]:
        """Return the managed jobs in this Slurm state that an agent knows, in order of keys."""
        if self._managed is None:
            self._managed = [(j, j.lease) for j in self.leased if j.lease is not None and self.settings.manages(j)]
        return [found for found in self._managed if found[0].state == state]

    @property
    def by_gpu(self) -> Mapping[Gpu, list[tuple[int, Job]]]:
        """Return the jobs whose leases have each GPU, with their places in the order of keys."""
        if self._by_gpu is None:
            self._by_gpu = defaultdict(list)
            for place, job in enumerate(self.leased):
                for gpu in job.leased_gpus:
                    self._by_gpu[gpu].append((place, job))
        return self._by_gpu

    def sharers_of(self, job: Job) -> list[Job]:
        """Return the jobs with which a job takes turns on its GPUs."""
        apart = partners(self.groups).get(job.key, frozenset()) | {job.key}
        near = {rival.key: rival for gpu in job.leased_gpus for _, rival in self.by_gpu[gpu]}
        return [rival for key, rival in near.items() if key not in apart]

    def stays_frozen(self, job: Job) -> bool:
        """Return True if Slurm must not let a job's processes run, because other jobs have its GPUs in this round.

        Awake it could compute on these GPUs together with them. Only its word keeps it from that, which is enough
        where the admin has switched suspends off, and among jobs of one user: see ``is_trusted``. On a host whose
        agent does not know it, its GPUs may be those of any job that runs there.
        """
        settings = self.settings
        if not (settings.enforce and settings.suspend and job.partition in settings.partitions):
            return False
        if self._runs_blind(job):
            return True
        coming = frozenset() if holds(job) or job.key in self.holders else self.holders
        gpus = job.leased_gpus
        others = [one for one in self.sharers_of(job) if holds_any(one, gpus) or one.key in coming]
        return not self.is_trusted(job, others)

    def _runs_blind(self, job: Job) -> bool:
        """Return True if others run where no agent knows the job; of such jobs on a host one is resumed at a time.

        A job that waits for its first lease has processes on none of its hosts that could use a GPU. Its script may
        have been stopped before its step began there, and that step would never come.
        """
        if job.lease is not None and job.lease.state == "waiting" and not job.lease.step:
            return False
        host_of = self.snapshot.host_of
        known = {gpu.host for gpu in job.leased_gpus}
        blind = {host_of.get(name, name) for name in job.nodes} - known
        return bool(blind) and any(
            other.state == "RUNNING"
            or (other.key < job.key and other.lease is None and other.key in self.memory.suspended)
            for other in self.all_jobs
            if other.gpus and other.key != job.key and any(host_of.get(name, name) in blind for name in other.nodes)
        )

    @staticmethod
    def is_trusted(job: Job, others: Iterable[Job]) -> bool:
        """Return True if a job without a lease may be awake while ``others`` have its GPUs.

        Only a job of the same user that has given its lease back before, and whose ranks all obey, is trusted to wait.
        """
        obeys = job.lease is not None and job.lease.state == "yielded" and job.lease.ready
        return all(obeys and other.user == job.user for other in others)

    def remember(self, **changes: object) -> None:
        """Change what sharing remembers; packs and moves are added by the ledger, once they have left."""
        self.memory = replace(self.memory, sharing=replace(self.memory.sharing, **changes))  # type: ignore[arg-type]

    def with_memory(self, **changes: object) -> Memory:
        """Return the memory with some of its parts replaced."""
        return replace(self.memory, **changes)  # type: ignore[arg-type]

    def may(self, job: Job) -> bool:
        """Return True if a job may move now: it is ours, can save a checkpoint and has not moved recently."""
        lease = job.lease
        return (
            self.moves_left > 0
            and job.key not in self.fixed
            and job.requeueable
            and lease is not None
            and lease.checkpoints
            and lease.state != "stopping"
            and (lease.ready or lease.state == "yielded")
            and self.may_wake(job)
            and self.now_s - self._moved_s.get(job.key.id, float("-inf")) >= self.gandiva.move_every_s
        )

    def may_wake(self, job: Job) -> bool:
        """Return True if a job runs, or may be resumed for its move whoever gets its GPUs before it has left."""
        return job.state != "SUSPENDED" or self.is_trusted(job, self.sharers_of(job))

    def residents(self, host: HostState) -> Iterator[Resident]:
        """Return a host's tenants that may move, in order of keys; those of several hosts do not."""
        for key in sorted(host.residents):
            resident = host.residents[key]
            if key in self.jobs and len(resident.job.nodes) == 1 and resident.gpus and self.may(resident.job):
                yield resident

    def left_s(self, job: Job) -> float:
        """Return the work that a job still has, as far as it is looked ahead."""
        left = job.progress.remaining(self.now_s) if job.progress is not None else None
        return self.gandiva.horizon_s if left is None else min(left, self.gandiva.horizon_s)

    def sizes(self, job: Job) -> tuple[int, ...]:
        """Return the numbers of GPUs that a job can run with, ascending."""
        return sizes(job, self._asked.get(job.key.id, job.gpus))

    def asked_nodes(self, job: Job) -> int:
        """Return how many nodes a job had before it was ever resized."""
        return self._asked_nodes.get(job.key.id, job.num_nodes)

    def admits(self, host: HostState, request: ResourceRequest) -> bool:
        """Return True if a job may come to a host, as far as others there and the host's memory go."""
        return host.usable and host.may_share(request, between_users=self.settings.share_between_users)

    def seat(self, host: HostState, request: ResourceRequest) -> Seat | None:
        """Return the best seat for a job that comes to a host where it may share, None when it has no room."""
        seats = host.seats(request) if self.admits(host, request) else []
        return seats[0] if seats else None

    def suits(self, job: Job, source: HostState, target: HostState) -> bool:
        """Return True if a host's GPUs serve a job as well as those of the host that it leaves, as far as is known."""
        if source.lanes[0].gpu_type == target.lanes[0].gpu_type:
            return True
        here_s, there_s = source.iteration_s(job), target.iteration_s(job)
        return 0.0 < there_s < inf and there_s <= here_s * (1 + self.gandiva.loss)

    def home(self, job: Job) -> HostState | None:
        """Return the host of a job of one host."""
        return next((host for host in self.hosts.values() if job.key in host.residents), None)

    def migrate(self, job: Job, target: HostState, seat: Seat, request: ResourceRequest, reason: str) -> None:
        """Move a job to a seat, out of its pack if it is in one."""
        if job.key in self.packed:
            self.moves.append(Unpack(job.key, f"leaves for {seat.node.name}"))
        self.moves.append(Migrate(job.key, (share_of(seat.node.name, request),), reason))
        self._settle(job, target, seat, request)

    def resize(self, job: Job, target: HostState, seat: Seat, request: ResourceRequest, reason: str) -> None:
        """Continue a job with another number of GPUs."""
        self.moves.append(Resize(job.key, (share_of(seat.node.name, request),), reason))
        self._settle(job, target, seat, request)

    def resize_nodes(self, job: Job, placement: Placement, reason: str) -> None:
        """Continue a job on more or fewer hosts; the caller changes the hosts."""
        self.moves.append(Resize(job.key, placement, reason))
        self._count(job)

    def _settle(self, job: Job, target: HostState, seat: Seat, request: ResourceRequest) -> None:
        for host in self.hosts.values():
            if job.key in host.residents:
                host.leave(host.residents[job.key])
        target.enter(job, request, seat)
        self._count(job)

    def _count(self, job: Job) -> None:
        self.fixed.add(job.key)
        self.moves_left -= 1


def share_of(node: str, request: ResourceRequest) -> Share:
    """Return the share of a job on its new host: its request, until the host is divided again."""
    return Share(node, request.gpus, request.cpus, request.memory_mb)


def sharers(host: HostState, resident: Resident) -> int:
    """Return how many take turns where a tenant has it worst."""
    sharers_by_gpu = host.sharers_by_gpu()
    return max((sharers_by_gpu[index] for index in resident.gpus), default=1)


def sizes(job: Job, asked: int) -> tuple[int, ...]:
    """Return the numbers of GPUs that a job can run with, ascending: its limits and the powers of two between.

    ``asked``: what it had before it was ever resized; without ``min_gpus`` it never has less.
    """
    options = job.options
    if options is None or (options.min_gpus is None and options.max_gpus is None):
        return (job.gpus,)
    low, high = min(options.min_gpus or asked, job.gpus), max(options.max_gpus or asked, job.gpus)
    powers = (1 << bit for bit in range(high.bit_length()))
    return tuple(sorted({low, high, asked, job.gpus, *(size for size in powers if low < size < high)}))


def holds(job: Job) -> bool:
    """Return True while a job has its GPUs, on one of its hosts at least."""
    return job.lease is not None and job.lease.state in ("held", "stopping")


def holds_any(job: Job, gpus: Collection[Gpu]) -> bool:
    """Return True while a job has one of these GPUs; on a host where it still waits for its lease it has none."""
    lease = job.lease
    return holds(job) and lease is not None and any(g in gpus and g.host not in lease.waiting_on for g in lease.gpus)


def _is_managed(job: Job, memory: Memory, settings: SharingSettings) -> bool:
    """Return True for a job with a lease that is ours to move, pack and tune."""
    ours = job.state == "RUNNING" or (job.state == "SUSPENDED" and job.key in memory.suspended)
    return ours and job.lease is not None and settings.manages(job) and not job.lease.exclusive


def ranks_of(state: SharingState) -> dict[JobKey, int]:
    """Return each managed job's place in the ordering; those without a record of progress have made none."""
    snapshot, settings = state.snapshot, state.settings
    jobs = [
        job if job.progress is not None else replace(job, progress=Progress(snapshot.time_s))
        for job in state.all_jobs
        if job.state in ("PENDING", "RUNNING", "SUSPENDED") and settings.manages(job)
    ]
    gpus: dict[str, int] = {}
    for node in sorted(snapshot.nodes, key=lambda node: node.name):
        if node.lane == 0 and node.up and not node.drained:
            gpus[node.gpu_type] = gpus.get(node.gpu_type, 0) + node.gpus
    memory, shares = state.memory, settings.shares
    queue = Queue(snapshot.time_s, tuple(jobs), gpus, usage=memory.usage, shares=shares, ended=memory.ended)
    ranking = state.order(queue)
    return {job.key: rank for rank, job in enumerate(ranking.jobs)}
