"""State of one round of sharing: stages read it, change it in order, and the decision is made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from operator import attrgetter

from cadenza.policies.allocation.problem import Allocate
from cadenza.policies.core.actions import Migrate, Resize, Resume, Unpack, Yield
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.idle_gpus import HOLDING
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey, Lease, Placement, Progress, Share
from cadenza.policies.core.move import Move
from cadenza.policies.ordering.ranking import Order, Queue
from cadenza.policies.relocation.phases import pinned_by_owner
from cadenza.policies.sharing.board.board import Board
from cadenza.policies.sharing.board.host import HostState, Resident, Seat, observe_hosts
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.state.groups import Group, group_keys, partners, standing
from cadenza.policies.sharing.state.outcome import Outcome
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings

MAX_ROOM_SEARCHES = 8
"""Pending jobs that room is searched for in one round."""


@dataclass
class RoundJobs:
    """The jobs of the snapshot, in order of keys. Most of a site with a long queue wait; few stages look at those."""

    all: tuple[Job, ...]
    queue: tuple[Job, ...]
    """The pending ones."""
    started: tuple[Job, ...]
    """The others."""
    leased: tuple[Job, ...]
    """Those that an agent knows."""
    ours: dict[JobKey, Job]
    """Managed jobs with a lease that run or that we suspended."""
    order: Order
    """Ranks them."""

    @cached_property
    def by_gpu(self) -> Mapping[Gpu, list[tuple[int, Job]]]:
        """Return the jobs whose leases have each GPU, with their places in the order of keys."""
        found = defaultdict(list)
        for place, job in enumerate(self.leased):
            for gpu in job.leased_gpus:
                found[gpu].append((place, job))
        return found


@dataclass
class Turns:
    """Jobs that have GPUs, stop, or leave once the round is done."""

    groups: tuple[Group, ...]
    """Packed jobs once this round's packs and unpacks are done."""
    packed: dict[JobKey, JobKey]
    """For each packed job the least key of its group."""
    stopping: frozenset[JobKey] = frozenset()
    """Holders that an unpack of this round stops."""
    alone: Mapping[JobKey, Lease] = field(default_factory=dict)
    """Leases of running jobs that have their GPUs to themselves."""
    holders: frozenset[JobKey] = frozenset()
    """Jobs that have GPUs once this round's turns are done."""
    yields: list[Yield] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    leaving: frozenset[JobKey] = frozenset()
    """Jobs with a part on a host that is about to be drained."""
    giving_back: frozenset[JobKey] = frozenset()
    """Jobs that are requeued because they cannot go on, or give their further lane back."""


@dataclass
class Sizes:
    """CPUs, memory and numbers of GPUs of jobs."""

    allocate: Allocate
    """Divides each host among the jobs that hold its GPUs."""
    asked_gpus: Mapping[int, int]
    """GPUs that the job with this id had before it was first resized."""
    asked_nodes: Mapping[int, int]
    """Nodes that it had then, of jobs that had several."""
    keeps_cpus: frozenset[JobKey] = frozenset()
    """Jobs that lend no CPUs."""


@dataclass
class WaitingJobs:
    """Jobs that wait in Slurm, and the room that is made for them."""

    to_place: list[Job] = field(default_factory=list)
    """Jobs that the service places, and those that it places anew, in order."""
    stranded: frozenset[JobKey] = frozenset()
    """Jobs that were placed on nodes that take no jobs any more."""
    queued: list[Job] = field(default_factory=list)
    """Jobs in Slurm's queue that lack free resources only."""
    make_room: Callable[[RoundState, Job], str] | None = None
    """Defragmentation for a job to be placed: it returns a sentence if it made room, else ""."""
    room_searches_left: int = MAX_ROOM_SEARCHES
    room_made: bool = False


@dataclass
class RoundState:
    """One round so far; times in seconds. The first four are given, and of those only the memory changes."""

    snapshot: ClusterSnapshot
    settings: SharingSettings
    gandiva: GandivaSettings
    memory: Memory
    jobs: RoundJobs
    who: Turns
    where: Board
    how_big: Sizes
    slurm: WaitingJobs = field(default_factory=WaitingJobs)
    outcome: Outcome = field(default_factory=Outcome)

    @classmethod
    def of(
        cls,
        snapshot: ClusterSnapshot,
        memory: Memory,
        settings: SharingSettings,
        gandiva: GandivaSettings,
        order: Order,
        allocate: Allocate,
    ) -> RoundState:
        """Return the state at the beginning of a round."""
        # 1. The jobs by what stages look for, and the packs that still stand.
        every = tuple(sorted(snapshot.jobs, key=attrgetter("key")))
        queue = tuple([job for job in every if job.state == "PENDING"])
        started = tuple([job for job in every if job.state != "PENDING"])
        leased = tuple([job for job in every if job.lease is not None])
        manages = settings.manages
        ours = {
            job.key: job
            for job in leased
            if (job.state == "RUNNING" or (job.state == "SUSPENDED" and job.key in memory.suspended))
            and job.lease is not None
            and not job.lease.exclusive
            and manages(job)
        }
        groups = standing(memory.sharing.packs, ours)
        packed = group_keys(groups)
        # 2. Jobs on their way stay on it, and so do those whose owner pinned them.
        on_its_way = [(job.key, job.relocating) for job in every if job.relocating]
        going = [(key, place) for key, place in on_its_way if place.destination]
        pinned = {key for key, job in ours.items() if job.required_nodes and pinned_by_owner(job, memory)}
        board = Board(
            partial(observe_hosts, snapshot, settings.manages, packed, floor=settings.floor),
            further=frozenset(node.name for node in snapshot.nodes if node.lane > 0),
            relocating={key.id: place for key, place in going},
            making_way=frozenset(key.id for key, place in on_its_way if not place.destination),
            moved_s=dict(memory.sharing.moved_s),
            fixed=pinned | {key for key, _ in going},
            moves_left=gandiva.moves_per_round,
        )
        sizes = Sizes(allocate, dict(memory.sharing.asked_gpus), dict(memory.sharing.asked_nodes))
        jobs = RoundJobs(every, queue, started, leased, ours, order)
        return cls(snapshot, settings, gandiva, memory, jobs, Turns(groups, packed), board, sizes)

    @cached_property
    def ranks(self) -> Mapping[JobKey, int]:
        """Return each managed job's place in the ordering, 0 first; without a record of progress it has made none."""
        snapshot, memory, settings = self.snapshot, self.memory, self.settings
        jobs = [
            job if job.progress is not None else replace(job, progress=Progress(snapshot.time_s))
            for job in self.jobs.all
            if job.state in ("PENDING", "RUNNING", "SUSPENDED") and settings.manages(job)
        ]
        gpus: dict[str, int] = {}
        for node in sorted(snapshot.nodes, key=lambda node: node.name):
            # A further lane shows the GPUs of lane 0 once more.
            if node.lane == 0 and node.up and not node.drained:
                gpus[node.gpu_type] = gpus.get(node.gpu_type, 0) + node.gpus
        queue = Queue(
            snapshot.time_s, tuple(jobs), gpus, usage=memory.usage, shares=settings.shares, ended=memory.ended
        )
        return {job.key: rank for rank, job in enumerate(self.jobs.order(queue).jobs)}

    @cached_property
    def last_moves(self) -> Mapping[int, Move]:
        """Return the last move of each job that had one, by job id."""
        return {move.job.id: move for move in self.memory.moves}

    @cached_property
    def managed(self) -> list[tuple[Job, Lease]]:
        """Return the managed jobs that an agent knows, in order of keys."""
        manages = self.settings.manages
        return [(j, j.lease) for j in self.jobs.leased if j.lease is not None and manages(j)]

    @property
    def now_s(self) -> float:
        """Return the time of the snapshot, seconds since the epoch."""
        return self.snapshot.time_s

    def sharers_of(self, job: Job) -> list[Job]:
        """Return the jobs with which a job takes turns on its GPUs."""
        apart = partners(self.who.groups).get(job.key, frozenset()) | {job.key}
        near = {rival.key: rival for gpu in job.leased_gpus for _, rival in self.jobs.by_gpu[gpu]}
        return [rival for key, rival in near.items() if key not in apart]

    def stays_frozen(self, job: Job) -> bool:
        """Return True if Slurm must not let a job's processes run, because other jobs have its GPUs in this round.

        Awake it could compute on these GPUs together with them. Only its word keeps it from that, which is enough
        where the admin has switched suspends off, and among jobs of one user: see ``is_trusted``.
        """
        settings = self.settings
        if not (settings.enforce and settings.suspend and job.partition in settings.partitions):
            return False
        # On a host whose agent does not know the job, its GPUs may be those of any job that runs there.
        if self._runs_blind(job):
            return True
        coming = frozenset() if holds(job) or job.key in self.who.holders else self.who.holders
        gpus = job.leased_gpus
        others = [one for one in self.sharers_of(job) if holds_any(one, gpus) or one.key in coming]
        return not self.is_trusted(job, others)

    def _runs_blind(self, job: Job) -> bool:
        """Return True if others run where no agent knows the job; of such jobs on a host one is resumed at a time."""
        # A job that waits for its first lease has processes on none of its hosts that could use a GPU. Its script may
        # have been stopped before its step began there, and that step would never come.
        if job.lease is not None and job.lease.state == "waiting" and not job.lease.step:
            return False
        host_of = self.snapshot.host_of
        known = {gpu.host for gpu in job.leased_gpus}
        blind = {host_of.get(name, name) for name in job.nodes} - known
        return bool(blind) and any(
            other.state == "RUNNING"
            or (other.key < job.key and other.lease is None and other.key in self.memory.suspended)
            for other in self.jobs.all
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

    def may(self, job: Job) -> bool:
        """Return True if a job may move now: it is ours, can save a checkpoint and has not moved recently."""
        lease = job.lease
        return (
            self.where.moves_left > 0
            and job.key not in self.where.fixed
            and job.requeueable
            and lease is not None
            and lease.checkpoints
            and lease.state != "stopping"
            and (lease.ready or lease.state == "yielded")
            and self.may_wake(job)
            and self.now_s - self.where.moved_s.get(job.key.id, -inf) >= self.gandiva.move_every_s
        )

    def may_wake(self, job: Job) -> bool:
        """Return True if a job runs, or may be resumed for its move whoever gets its GPUs before it has left."""
        return job.state != "SUSPENDED" or self.is_trusted(job, self.sharers_of(job))

    def residents(self, host: HostState) -> Iterator[Resident]:
        """Return a host's tenants that may move, in order of keys; those of several hosts do not."""
        for key in sorted(host.residents):
            resident = host.residents[key]
            if key in self.jobs.ours and len(resident.job.nodes) == 1 and resident.gpus and self.may(resident.job):
                yield resident

    def left_s(self, job: Job) -> float:
        """Return the work that a job still has, as far as it is looked ahead."""
        left = job.progress.remaining(self.now_s) if job.progress is not None else None
        return self.gandiva.horizon_s if left is None else min(left, self.gandiva.horizon_s)

    def sizes(self, job: Job) -> tuple[int, ...]:
        """Return the numbers of GPUs that a job can run with, ascending."""
        return sizes(job, self.how_big.asked_gpus.get(job.key.id, job.gpus))

    def asked_nodes(self, job: Job) -> int:
        """Return how many nodes a job had before it was ever resized."""
        return self.how_big.asked_nodes.get(job.key.id, job.num_nodes)

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

    def migrate(self, job: Job, target: HostState, seat: Seat, request: ResourceRequest, reason: str) -> None:
        """Move a job to a seat, out of its pack if it is in one."""
        if job.key in self.who.packed:
            self.outcome.moves.append(Unpack(job.key, f"leaves for {seat.node.name}"))
        self.outcome.moves.append(Migrate(job.key, (share_of(seat.node.name, request),), reason))
        self.where.settle(job, target, seat, request)

    def resize(self, job: Job, target: HostState, seat: Seat, request: ResourceRequest, reason: str) -> None:
        """Continue a job with another number of GPUs."""
        self.outcome.moves.append(Resize(job.key, (share_of(seat.node.name, request),), reason))
        self.where.settle(job, target, seat, request)

    def resize_nodes(self, job: Job, placement: Placement, reason: str) -> None:
        """Continue a job on more or fewer hosts; the caller changes the hosts."""
        self.outcome.moves.append(Resize(job.key, placement, reason))
        self.where.count(job)


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
    return job.lease is not None and job.lease.state in HOLDING


def meet(job: Job, other: Job) -> bool:
    """Return True for two jobs whose leases have a GPU in common."""
    return job.key != other.key and not set(job.leased_gpus).isdisjoint(other.leased_gpus)


def holds_any(job: Job, gpus: Collection[Gpu]) -> bool:
    """Return True while a job has one of these GPUs; on a host where it still waits for its lease it has none."""
    lease = job.lease
    return holds(job) and lease is not None and any(g in gpus and g.host not in lease.waiting_on for g in lease.gpus)
