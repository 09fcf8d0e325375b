"""What a round may still move: which jobs, where to, at what price, and how many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from cadenza.policies.core.actions import Migrate, Resize, Unpack
from cadenza.policies.core.decision import SharingMemory
from cadenza.policies.core.model import Job, JobKey, Placement, Share
from cadenza.policies.sharing.state.host import Ask, HostBook, Seat, Tenant
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings


@dataclass(slots=True)
class Moves:
    """One round's moves so far; the hosts' books follow them."""

    now_s: float
    hosts: Mapping[str, HostBook]
    jobs: Mapping[JobKey, Job]
    """Jobs that sharing manages, that agents know and that are running, or suspended by us."""
    sharing: SharingSettings
    gandiva: GandivaSettings
    memory: SharingMemory
    holders: frozenset[JobKey]
    """Who has GPUs once this round's turns are done."""
    packed: Mapping[JobKey, JobKey]
    """For packed jobs the least key of the pack."""
    fixed: set[JobKey] = field(default_factory=set)
    """Who stays where it is this round."""
    actions: list[Migrate | Resize | Unpack] = field(default_factory=list)
    left: int = 0
    """How many more may be moved."""
    by_node: dict[str, HostBook] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)
    """Lane of each node of Slurm's."""
    _moved: dict[int, float] = field(default_factory=dict)
    _asked: dict[int, int] = field(default_factory=dict)
    _asked_nodes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take the limits, and what is looked up by job and by node."""
        self.left = self.gandiva.moves_per_round
        self._moved = dict(self.memory.moved_s)
        self._asked = dict(self.memory.asked_gpus)
        self._asked_nodes = dict(self.memory.asked_nodes)
        self.by_node = {node.name: host for host in self.hosts.values() for node in host.lanes}
        self.lanes = {node.name: node.lane for host in self.hosts.values() for node in host.lanes}

    def may(self, job: Job) -> bool:
        """Whether a job may move now: one of ours that can save a checkpoint and has not moved lately."""
        lease = job.lease
        return (
            self.left > 0
            and job.key not in self.fixed
            and job.requeueable
            and lease is not None
            and lease.checkpoints
            and lease.state != "stopping"
            and (lease.ready or lease.state == "yielded")
            and self.now_s - self._moved.get(job.key.id, float("-inf")) >= self.gandiva.move_every_s
        )

    def tenants(self, host: HostBook) -> Iterator[Tenant]:
        """Return a host's tenants that may move, in order of keys; those of several hosts do not."""
        for key in sorted(host.tenants):
            tenant = host.tenants[key]
            if key in self.jobs and len(tenant.job.nodes) == 1 and tenant.gpus and self.may(tenant.job):
                yield tenant

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

    def takes(self, host: HostBook, ask: Ask) -> bool:
        """Whether a host may be shared with who is there, and its memory holds one more job."""
        known = self.sharing.share_between_users or host.users.keys() <= {ask.user}
        return known and not host.strangers and host.usable and host.remembers(ask)

    def seat(self, host: HostBook, ask: Ask) -> Seat | None:
        """Return the best seat for a job that comes to a host where it may share, None when it has no room."""
        seats = host.seats(ask) if self.takes(host, ask) else []
        return seats[0] if seats else None

    def suits(self, job: Job, source: HostBook, target: HostBook) -> bool:
        """Whether a host's GPUs serve a job as well as those of the host that it leaves, as far as is known."""
        if source.lanes[0].gpu_type == target.lanes[0].gpu_type:
            return True
        here_s, there_s = source.iteration_s(job), target.iteration_s(job)
        return 0.0 < there_s < inf and there_s <= here_s * (1 + self.gandiva.loss)

    def home(self, job: Job) -> HostBook | None:
        """Return the host of a job of one host."""
        return next((host for host in self.hosts.values() if job.key in host.tenants), None)

    def migrate(self, job: Job, target: HostBook, seat: Seat, ask: Ask, why: str) -> None:
        """Move a job to a seat, out of its pack if it is in one."""
        if job.key in self.packed:
            self.actions.append(Unpack(job.key, f"leaves for {seat.node.name}"))
        self.actions.append(Migrate(job.key, shares(seat, ask), why))
        self._settle(job, target, seat, ask)

    def resize(self, job: Job, target: HostBook, seat: Seat, ask: Ask, why: str) -> None:
        """Continue a job with another number of GPUs."""
        self.actions.append(Resize(job.key, shares(seat, ask), why))
        self._settle(job, target, seat, ask)

    def respan(self, job: Job, placement: Placement, why: str) -> None:
        """Continue a job on more or fewer hosts; the caller notes it in their books."""
        self.actions.append(Resize(job.key, placement, why))
        self._count(job)

    def _settle(self, job: Job, target: HostBook, seat: Seat, ask: Ask) -> None:
        for host in self.hosts.values():
            if job.key in host.tenants:
                host.leave(host.tenants[job.key])
        target.enter(job, ask, seat)
        self._count(job)

    def _count(self, job: Job) -> None:
        self.fixed.add(job.key)
        self.left -= 1


def shares(seat: Seat, ask: Ask) -> Placement:
    """Return what a job gets on a seat: what it asked for, until the host's CPUs are shared out anew."""
    return (share_of(seat.node.name, ask),)


def share_of(node: str, ask: Ask) -> Share:
    """Return what a job asked for, of one node."""
    return Share(node, ask.gpus, ask.cpus, ask.memory_mb)


def crowd(host: HostBook, tenant: Tenant) -> int:
    """Return how many take turns where a tenant has it worst."""
    crowds = host.crowds()
    return max((crowds[index] for index in tenant.gpus), default=1)


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
