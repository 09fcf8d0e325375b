"""The hosts as sharing sees them: lanes, tenants and their GPUs, load and memory, planned moves included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from cadenza.policies.core.idle_gpus import suits
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.sharing.board.resource_request import ResourceRequest

_KIND = attrgetter("gpus", "cpus", "memory_mb", "num_nodes", "user", "partition", "gpu_type", "barred")


@dataclass(slots=True)
class LaneUse:
    """Resources in use on one lane, planned placements included."""

    gpus: int
    cpus: int
    memory_mb: int


class Resident(NamedTuple):
    """A job on one of its hosts."""

    job: Job
    request: ResourceRequest
    lane: str
    gpus: frozenset[int]
    """Indices of its GPUs here, as its lease says; empty when no agent said so."""


class Seat(NamedTuple):
    """GPUs for a job on a host; ordered by the jobs that take turns there already, then by lane."""

    sharers: int
    lane: int
    node: Node
    gpus: frozenset[int]


@dataclass(slots=True)
class HostState:
    """A host with its lanes, who is there, and what this round has planned on it."""

    name: str
    lanes: tuple[Node, ...]
    use: dict[str, LaneUse]
    sizes: Counter[int] = field(default_factory=Counter)
    """Jobs by their number of GPUs here."""
    users: Counter[str] = field(default_factory=Counter)
    unmanaged: int = 0
    """Jobs here that cannot take turns."""
    residents: dict[JobKey, Resident] = field(default_factory=dict)
    committed_mb: int = 0
    """Memory of all jobs of all lanes, the GPU state that they may have to keep there included."""
    group_keys: Mapping[JobKey, JobKey] = field(default_factory=dict)
    """For a packed job the least key of those it is packed with: they are one as far as turns go."""
    gpus: int = field(init=False)
    """The host's real GPUs: every lane shows them all."""
    memory_mb: int = field(init=False)
    """The host's real memory: every lane shows it all, or the part that it may use."""
    gpus_allocated: int = field(init=False)
    """GPUs given out over all lanes."""
    _sharers_by_gpu: list[int] | None = None
    _affinity: int | None = None

    def __post_init__(self) -> None:
        """Sum up the lanes."""
        self.gpus = max(node.gpus for node in self.lanes)
        self.memory_mb = max(node.memory_mb for node in self.lanes)
        self.gpus_allocated = sum(use.gpus for use in self.use.values())

    @property
    def usable(self) -> bool:
        """Return True if lane 0 takes jobs."""
        return self.lanes[0].lane == 0 and self.lanes[0].up and not self.lanes[0].drained

    @property
    def gpus_wanted(self) -> int:
        """Return the GPUs of all jobs here; Slurm's allocation may leave out those of jobs that it has suspended."""
        return sum(len(resident.gpus) for resident in self.residents.values())

    @property
    def load(self) -> float:
        """Return GPUs given out for each real one."""
        return self.gpus_allocated / max(self.gpus, 1)

    @property
    def overcommit(self) -> int:
        """Return the load rounded up: above 1 jobs take turns (Gandiva, OSDI'18, page 600)."""
        return ceil(self.load)

    @property
    def affinity(self) -> int:
        """Return the class that most of the GPUs are given to, the larger one of equals; 0 without jobs."""
        if self._affinity is None:
            self._affinity = max(self.sizes, key=lambda size: (size * self.sizes[size], size), default=0)
        return self._affinity

    def iteration_s(self, job: Job) -> float:
        """Return a job's time for an iteration on the host's GPUs, seconds, by its profiles of several GPU types.

        Infinite on a type that they leave out; 0 on all where there are not several.
        """
        profile, here = job.profile, self.lanes[0].gpu_type
        if profile is None or len(profile.siblings) < 2:  # noqa: PLR2004 - one type says nothing of others
            return 0.0
        return profile.on(here).iteration_s if here in profile.siblings else inf

    def fits(self, node: Node, request: ResourceRequest) -> bool:
        """Return True if one lane has room for the job's share."""
        use = self.use[node.name]
        return (
            node.takes_jobs
            and suits(node, request.partition, request.gpu_type, request.barred)
            and use.gpus + request.gpus <= node.gpus
            and use.cpus + request.cpus <= node.cpus
            and use.memory_mb + request.memory_mb <= node.memory_mb
        )

    def has_host_memory_for(self, request: ResourceRequest) -> bool:
        """Return True if the host's memory holds the job with all jobs of all lanes, their GPU state included.

        An empty host takes what fits in its lane: a job that is alone never yields.
        """
        # Slurm counts memory by node, and so by lane: nothing in Slurm adds up the lanes of a host.
        return not self.sizes or self.committed_mb + request.memory_mb + request.state_mb <= self.memory_mb

    def may_share(self, request: ResourceRequest, *, between_users: bool) -> bool:
        """Return True if a job may share the host with its residents, and the host's memory holds one more job."""
        among = between_users or self.users.keys() <= {request.user}
        return among and not self.unmanaged and self.has_host_memory_for(request)

    def lack(self, request: ResourceRequest) -> str:
        """Return the lack besides GPUs that keeps a job from the lanes that are open to it, as a phrase."""
        least = request._replace(cpus=0, memory_mb=0)
        if not any(self.fits(node, least._replace(gpus=0)) for node in self.lanes):
            return ""
        if not self.has_host_memory_for(request):
            return "too little host memory"
        steps = (
            ("no free lane", least),
            ("too few free CPUs", least._replace(cpus=request.cpus)),
            ("too little free memory in its lanes", least._replace(memory_mb=request.memory_mb)),
            ("no lane with enough CPUs and memory", request),
        )
        return next((lack for lack, part in steps if not any(self.fits(node, part) for node in self.lanes)), "")

    def add(self, request: ResourceRequest, node: Node) -> None:
        """Take a job's share of one lane."""
        self._take(node.name, request, 1)

    def add_resident(self, resident: Resident, *, unmanaged: bool) -> None:
        """Note a job that is here already: the lane's state have its share."""
        self._count(resident.request, 1)
        self.unmanaged += unmanaged
        self.residents[resident.job.key] = resident

    def leave(self, resident: Resident) -> None:
        """Give back what a tenant has."""
        self._take(resident.lane, resident.request, -1)
        del self.residents[resident.job.key]

    def enter(self, job: Job, request: ResourceRequest, seat: Seat) -> None:
        """Take a seat for a job that comes from elsewhere."""
        self.stay(Resident(job, request, seat.node.name, seat.gpus))

    def stay(self, resident: Resident) -> None:
        """Take what a tenant has, as before it left."""
        self._take(resident.lane, resident.request, 1)
        self.residents[resident.job.key] = resident

    def _take(self, lane: str, request: ResourceRequest, sign: int) -> None:
        use = self.use[lane]
        use.gpus, use.cpus = use.gpus + sign * request.gpus, use.cpus + sign * request.cpus
        use.memory_mb += sign * request.memory_mb
        self.gpus_allocated += sign * request.gpus
        self._count(request, sign)

    def _count(self, request: ResourceRequest, sign: int) -> None:
        self.sizes[request.gpus] += sign
        self.users[request.user] += sign
        self.committed_mb += sign * (request.memory_mb + request.state_mb)
        self._sharers_by_gpu = self._affinity = None
        if self.sizes[request.gpus] <= 0:
            del self.sizes[request.gpus]
        if self.users[request.user] <= 0:
            del self.users[request.user]

    # --- GPUs ---------------------------------------------------------------------------------------

    def sharers_by_gpu(self) -> list[int]:
        """Return for each GPU how many take turns on it; packed jobs count once."""
        if self._sharers_by_gpu is None:
            there: list[set[JobKey]] = [set() for _ in range(self.gpus)]
            for key, resident in self.residents.items():
                for index in resident.gpus:
                    there[index].add(self.group_keys.get(key, key))
            self._sharers_by_gpu = [len(group_keys) for group_keys in there]
        return self._sharers_by_gpu

    @property
    def pressure(self) -> float:
        """Return the mean number of jobs that take turns on a GPU, packed ones as one."""
        return sum(self.sharers_by_gpu()) / max(self.gpus, 1)

    def idle(self) -> int:
        """Return the number of GPUs that no job has or waits for."""
        return self.sharers_by_gpu().count(0)

    def expected_gpus(self, key: JobKey) -> list[int]:
        """Return the GPUs of a tenant that no agent has named yet."""
        resident = self.residents[key]
        return self.next_gpus(resident.request.gpus, self.taken(resident.lane))

    def taken(self, lane: str) -> set[int]:
        """Return the GPUs that the tenants of a lane have."""
        return {index for resident in self.residents.values() if resident.lane == lane for index in resident.gpus}

    def next_gpus(self, count: int, taken: Collection[int]) -> list[int]:
        """Return the GPUs that Slurm gives next on a lane: the lowest free ones; fewer where not so many are free."""
        return [index for index in range(self.gpus) if index not in taken][:count]

    @property
    def stuck_gpus(self) -> set[int]:
        """Return the GPUs of jobs that cannot be stopped: no other job is placed there."""
        return {i for one in self.residents.values() if one.job.lease and one.job.lease.stuck for i in one.gpus}

    def seats(self, request: ResourceRequest) -> list[Seat]:
        """Return the lanes with room for a job, the best first, with the GPUs that it would get there.

        Where Slurm gives others, the next round sees that.
        """
        sharers_by_gpu = self.sharers_by_gpu()
        stuck, seats = self.stuck_gpus, []
        # A placement can name a node only: which GPUs a job has there is Slurm's choice, made in each lane as if that
        # were a host of its own. So a lane has one seat for a job, and another lane may have the same GPUs.
        for node in self.lanes:
            free = self.next_gpus(request.gpus, self.taken(node.name))
            if len(free) == request.gpus and self.fits(node, request) and stuck.isdisjoint(free):
                seats.append(Seat(max((sharers_by_gpu[i] for i in free), default=0), node.lane, node, frozenset(free)))
        return sorted(seats, key=lambda seat: seat[:2])


def lacks(hosts: Iterable[HostState], request: ResourceRequest) -> str:
    """Return a clause on hosts with GPUs for a job that it cannot use; empty if no host lacks anything else."""
    found = [lack for host in hosts if (lack := host.lack(request))]
    subject = "a host has" if len(found) == 1 else f"{len(found)} hosts have"
    return f"{subject} GPUs for it, but {' or '.join(sorted(set(found)))}" if found else ""


def observe_hosts(
    snapshot: ClusterSnapshot,
    manages: Callable[[Job], bool],
    group_keys: Mapping[JobKey, JobKey] | None = None,
    *,
    floor: bool,
) -> dict[str, HostState]:
    """Return the hosts whose agent is alive, in order of names, with the jobs that are there.

    With ``group_keys`` (for packed jobs the least key of the pack) a managed job counts in its lane's use with what it
    needs, because what it has is shared out anew at every turn. ``floor``: Slurm's allocation is what it needs.
    """
    alive = {host.name for host in snapshot.hosts if host.agent_alive}
    lanes: dict[str, list[Node]] = {}
    for node in sorted(snapshot.nodes, key=lambda node: (node.host, node.lane, node.name)):
        lanes.setdefault(node.host, []).append(node)
    hosts = {
        name: HostState(
            name,
            tuple(nodes),
            {node.name: LaneUse(node.gpus_used, node.cpus_used, node.memory_used_mb) for node in nodes},
            group_keys=group_keys or {},
        )
        for name, nodes in lanes.items()
        if name in alive
    }
    by_node = {node.name: hosts[node.host] for node in snapshot.nodes if node.host in hosts}
    trimmed: dict[tuple[object, ...], ResourceRequest] = {}
    """Trimmed needs of jobs with equal requests and profiles."""
    for job in sorted((job for job in snapshot.jobs if job.nodes and job.gpus), key=lambda job: job.key):
        managed = manages(job)
        for name in [name for name in job.nodes if name in by_node]:
            host = by_node[name]
            if group_keys is None or not managed or floor:
                host.add_resident(_resident(job, ResourceRequest.of(job), name, host.name), unmanaged=not managed)
                continue
            kind = (id(job.profile), *_KIND(job))
            if kind not in trimmed:
                trimmed[kind] = ResourceRequest.trimmed(job)
            resident = _resident(job, trimmed[kind], name, host.name)
            host.add_resident(resident, unmanaged=False)
            for share in [share for share in job.placement if share.node == name]:  # Slurm shows the requests
                host.use[name].cpus += resident.request.cpus - share.cpus
                host.use[name].memory_mb += resident.request.memory_mb - share.memory_mb
    return hosts


def _resident(job: Job, request: ResourceRequest, lane: str, host: str) -> Resident:
    """Return a job as a resident; where its lease shows another number of GPUs than an even spread, that counts."""
    gpus = frozenset([gpu.index for gpu in job.leased_gpus if gpu.host == host])
    return Resident(job, request if len(gpus) in (0, request.gpus) else request._replace(gpus=len(gpus)), lane, gpus)
