"""The hosts as sharing sees them: lanes, tenants and their GPUs, load and memory, planned moves included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.core.profile import MB_PER_GB, Profile
from cadenza.policies.sharing.state.settings import SharingSettings


class Ask(NamedTuple):
    """What a job needs on each of its nodes; memory in MB."""

    user: str
    partition: str
    nodes: int
    gpus: int
    cpus: int
    memory_mb: int
    state_mb: int = 0
    """GPU state that a yield moves to the host's memory."""
    gpu_type: str = ""
    """Type of GPU that it asked for; empty: any."""

    @classmethod
    def of(cls, job: Job) -> Ask:
        """Return a job's needs; its totals are taken to be spread evenly over its nodes."""
        nodes = max(job.num_nodes, 1)
        gpus, cpus, memory_mb = (-(-total // nodes) for total in (job.gpus, job.cpus, job.memory_mb))
        state_mb = ceil(gpus * _state_mb(job))
        return cls(job.user, job.partition, nodes, gpus, cpus, memory_mb, state_mb, job.gpu_type)

    @classmethod
    def lean(cls, job: Job) -> Ask:
        """Return a job's needs with no more memory than its profile can use: that stays taken while it waits."""
        ask = cls.of(job)
        return ask._replace(memory_mb=min(ask.memory_mb, _useful_mb(job.profile, ask))) if job.profile else ask

    @classmethod
    def under(cls, job: Job, settings: SharingSettings) -> Ask:
        """Return a job's lean needs, or all that it asked for where Slurm's books are a floor."""
        return cls.of(job) if settings.floor else cls.lean(job)


class Asks:
    """Lean needs of jobs that ask alike are found once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Ask] = {}

    def lean(self, job: Job) -> Ask:
        """Return ``Ask.lean``."""
        asked = (job.gpus, job.cpus, job.memory_mb, job.num_nodes, job.user, job.partition, job.gpu_type)
        kind = (id(job.profile), *asked)
        ask = self._known.get(kind)
        if ask is None:
            ask = self._known[kind] = Ask.lean(job)
        return ask


def _useful_mb(profile: Profile, ask: Ask) -> int:
    """Return the least memory of the profile's grid that is as good as what the job asked for, MB."""
    cpus, asked_gb = ask.cpus / max(ask.gpus, 1), ask.memory_mb / max(ask.gpus, 1) / MB_PER_GB
    speed = profile.speed(cpus, asked_gb)
    for memory_gb in profile.memory_gb_per_gpu:
        if profile.speed(cpus, memory_gb) >= speed:
            return ceil(memory_gb * MB_PER_GB * ask.gpus)
    return ask.memory_mb


def _state_mb(job: Job) -> float:
    """Return the GPU state of a job at a boundary, MB a GPU; 0 when nobody measured it."""
    low_gb = job.profile.gpu_memory_low_gb if job.profile is not None else None
    return MB_PER_GB * (low_gb or 0.0)


@dataclass(slots=True)
class Use:
    """What is taken on one lane, planned placements included."""

    gpus: int
    cpus: int
    memory_mb: int


class Tenant(NamedTuple):
    """A job on one of its hosts."""

    job: Job
    ask: Ask
    lane: str
    gpus: frozenset[int]
    """Indices of its GPUs here, as its lease says; empty when no agent said so."""


class Seat(NamedTuple):
    """Where a job could go on a host, the best first: how many take turns there already, then the lane."""

    crowd: int
    lane: int
    node: Node
    gpus: frozenset[int]


@dataclass(slots=True)
class HostBook:
    """A host with its lanes, who is there, and what this round has planned on it."""

    name: str
    lanes: tuple[Node, ...]
    use: dict[str, Use]
    sizes: Counter[int] = field(default_factory=Counter)
    """Jobs by their number of GPUs here."""
    users: Counter[str] = field(default_factory=Counter)
    strangers: int = 0
    """Jobs here that cannot take turns."""
    tenants: dict[JobKey, Tenant] = field(default_factory=dict)
    committed_mb: int = 0
    """Memory of all jobs of all lanes, the GPU state that they may have to keep there included."""
    units: Mapping[JobKey, JobKey] = field(default_factory=dict)
    """For a packed job the least key of those it is packed with: they are one as far as turns go."""
    _crowds: list[int] | None = None

    @property
    def gpus(self) -> int:
        """Return the host's real GPUs: every lane shows them all."""
        return max(node.gpus for node in self.lanes)

    @property
    def memory_mb(self) -> int:
        """Return the host's real memory: every lane shows it all, or the part that it may use."""
        return max(node.memory_mb for node in self.lanes)

    @property
    def usable(self) -> bool:
        """Whether lane 0 takes jobs."""
        return self.lanes[0].lane == 0 and self.lanes[0].up and not self.lanes[0].drained

    @property
    def given(self) -> int:
        """Return the GPUs given out over all lanes."""
        return sum(use.gpus for use in self.use.values())

    @property
    def wanted(self) -> int:
        """Return the GPUs of all jobs here; Slurm's books may leave out those of jobs that it has suspended."""
        return sum(len(tenant.gpus) for tenant in self.tenants.values())

    @property
    def load(self) -> float:
        """Return GPUs given out for each real one."""
        return self.given / max(self.gpus, 1)

    @property
    def height(self) -> int:
        """Return the load rounded up: above 1 jobs take turns (Gandiva, OSDI'18, page 600)."""
        return ceil(self.load)

    @property
    def affinity(self) -> int:
        """Return the class that most of the GPUs are given to, the larger one of equals; 0 without jobs."""
        return max(self.sizes, key=lambda size: (size * self.sizes[size], size), default=0)

    def iteration_s(self, job: Job) -> float:
        """Return a job's time for an iteration on the host's GPUs, seconds, by its profiles of several GPU types.

        Infinite on a type that they leave out; 0 on all where there are not several.
        """
        profile, here = job.profile, self.lanes[0].gpu_type
        if profile is None or len(profile.siblings) < 2:  # noqa: PLR2004 - one type says nothing of others
            return 0.0
        return profile.on(here).iteration_s if here in profile.siblings else inf

    def fits(self, node: Node, ask: Ask) -> bool:
        """Whether one lane has room for the job's share."""
        use = self.use[node.name]
        return (
            node.up
            and not node.drained
            and ask.partition in node.partitions
            and ask.gpu_type in ("", node.gpu_type)
            and use.gpus + ask.gpus <= node.gpus
            and use.cpus + ask.cpus <= node.cpus
            and use.memory_mb + ask.memory_mb <= node.memory_mb
        )

    def remembers(self, ask: Ask) -> bool:
        """Whether the host's memory holds the job beside all jobs of all lanes, their GPU state included.

        An empty host takes what fits in its lane: a job that is alone never yields.
        """
        return not self.sizes or self.committed_mb + ask.memory_mb + ask.state_mb <= self.memory_mb

    def add(self, ask: Ask, node: Node) -> None:
        """Take a job's share of one lane."""
        self._book(node.name, ask, 1)

    def settle(self, tenant: Tenant, *, stranger: bool) -> None:
        """Note a job that is here already: the lane's books have its share."""
        self._count(tenant.ask, 1)
        self.strangers += stranger
        self.tenants[tenant.job.key] = tenant

    def leave(self, tenant: Tenant) -> None:
        """Give back what a tenant has."""
        self._book(tenant.lane, tenant.ask, -1)
        del self.tenants[tenant.job.key]

    def enter(self, job: Job, ask: Ask, seat: Seat) -> None:
        """Take a seat for a job that comes from elsewhere."""
        self.stay(Tenant(job, ask, seat.node.name, seat.gpus))

    def stay(self, tenant: Tenant) -> None:
        """Take what a tenant has, as before it left."""
        self._book(tenant.lane, tenant.ask, 1)
        self.tenants[tenant.job.key] = tenant

    def _book(self, lane: str, ask: Ask, sign: int) -> None:
        use = self.use[lane]
        use.gpus, use.cpus = use.gpus + sign * ask.gpus, use.cpus + sign * ask.cpus
        use.memory_mb += sign * ask.memory_mb
        self._count(ask, sign)

    def _count(self, ask: Ask, sign: int) -> None:
        self.sizes[ask.gpus] += sign
        self.users[ask.user] += sign
        self.committed_mb += sign * (ask.memory_mb + ask.state_mb)
        self._crowds = None
        if sign < 0:
            self.sizes, self.users = +self.sizes, +self.users

    # --- GPUs ---------------------------------------------------------------------------------------

    def crowds(self) -> list[int]:
        """Return for each GPU how many take turns on it; packed jobs count once."""
        if self._crowds is None:
            there: list[set[JobKey]] = [set() for _ in range(self.gpus)]
            for key, tenant in self.tenants.items():
                for index in tenant.gpus:
                    there[index].add(self.units.get(key, key))
            self._crowds = [len(units) for units in there]
        return self._crowds

    @property
    def pressure(self) -> float:
        """Return the mean number of jobs that take turns on a GPU, packed ones as one."""
        return sum(self.crowds()) / max(self.gpus, 1)

    def idle(self) -> int:
        """Return the number of GPUs that no job has or waits for."""
        return self.crowds().count(0)

    def seats(self, ask: Ask) -> list[Seat]:
        """Return the lanes with room for a job, the best first, with the GPUs that it would get there.

        Slurm gives the lowest free GPUs of a lane; where it does otherwise, the next round sees that.
        """
        crowds = self.crowds()
        taken: dict[str, set[int]] = {node.name: set() for node in self.lanes}
        for tenant in self.tenants.values():
            taken[tenant.lane] |= tenant.gpus
        found = []
        for node in self.lanes:
            free = [index for index in range(node.gpus) if index not in taken[node.name]][: ask.gpus]
            if len(free) == ask.gpus and self.fits(node, ask):
                found.append(Seat(max((crowds[i] for i in free), default=0), node.lane, node, frozenset(free)))
        return sorted(found, key=lambda seat: seat[:2])


def books(
    snapshot: ClusterSnapshot, settings: SharingSettings, units: Mapping[JobKey, JobKey] | None = None
) -> dict[str, HostBook]:
    """Return the hosts whose agent is alive, in order of names, with the jobs that are there.

    With ``units`` (for packed jobs the least key of the pack) a managed job counts in its lane's books with what
    it needs, because what it has is shared out anew at every turn.
    """
    alive = {host.name for host in snapshot.hosts if host.agent_alive}
    lanes: dict[str, list[Node]] = {}
    for node in sorted(snapshot.nodes, key=lambda node: (node.host, node.lane, node.name)):
        lanes.setdefault(node.host, []).append(node)
    hosts = {name: _book(name, nodes, units or {}) for name, nodes in lanes.items() if name in alive}
    by_node = {node.name: hosts[node.host] for node in snapshot.nodes if node.host in hosts}
    asks = Asks()
    for job in sorted(snapshot.jobs, key=_key):
        for name in job.nodes if job.gpus else ():
            if name in by_node:
                managed = settings.manages(job)
                ask = Ask.of(job) if units is None or not managed or settings.floor else asks.lean(job)
                tenant = _tenant(job, ask, name, by_node[name].name)
                by_node[name].settle(tenant, stranger=not managed)
                if units is not None and managed and not settings.floor:  # Slurm's books are what was asked for
                    _count_as_asked(by_node[name].use[name], tenant)
    return hosts


def _key(job: Job) -> JobKey:
    return job.key


def _book(name: str, nodes: Iterable[Node], units: Mapping[JobKey, JobKey]) -> HostBook:
    lanes = tuple(nodes)
    use = {node.name: Use(node.gpus_used, node.cpus_used, node.memory_used_mb) for node in lanes}
    return HostBook(name, lanes, use, units=units)


def _tenant(job: Job, ask: Ask, lane: str, host: str) -> Tenant:
    """Return a job as a tenant; where its lease shows another number of GPUs than an even spread, that counts."""
    gpus = frozenset([gpu.index for gpu in job.lease.gpus if gpu.host == host]) if job.lease is not None else _NONE
    return Tenant(job, ask if len(gpus) in (0, ask.gpus) else ask._replace(gpus=len(gpus)), lane, gpus)


_NONE: frozenset[int] = frozenset()


def _count_as_asked(use: Use, tenant: Tenant) -> None:
    for share in tenant.job.placement:
        if share.node == tenant.lane:
            use.cpus += tenant.ask.cpus - share.cpus
            use.memory_mb += tenant.ask.memory_mb - share.memory_mb
