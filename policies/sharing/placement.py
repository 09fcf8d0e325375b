"""Held admission: where a held job starts (Gandiva, OSDI'18, Algorithm 1 on page 601).

The affinity of a host is the GPU count of its jobs (their share on it), 0 without jobs; its load is M / N,
with M the GPUs given out over all its lanes and N its real ones. A job of g GPUs a host goes to, in this
order,

1. hosts of affinity g with g free GPUs (M + g <= N), the least loaded first,
2. hosts of affinity 0,
3. any host with g free GPUs (affinity relaxed),
4. the least loaded hosts of affinity g, in the first lane with room: the jobs will take turns;

else it stays queued. Steps 1 to 3 place in lane 0. The algorithm as printed asks for ceil(M / N) < 1 in
step 1, which only an empty server meets; its text says "free GPUs", and that is what is done here.
A job of several nodes takes the best of steps 1 to 3 for each, or all its nodes by step 4 in one lane, for
two lanes of a host are the same GPUs. Step 4 needs jobs that can take turns: every job on the host must be
managed, and of the same user unless users share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cadenza.policies.model import ClusterSnapshot, Job, JobKey, Memory, Node, Place
from cadenza.policies.sharing.settings import SharingSettings, held_for_us


@dataclass(frozen=True, slots=True)
class Placed:
    """The placements of one round, and a sentence for every held job that was considered."""

    actions: tuple[Place, ...] = ()
    reasons: dict[JobKey, str] = field(default_factory=dict)


def place(snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings) -> Placed:
    """Return where the held jobs start, by priority, submission and key; each sees those before it placed.

    Nothing is placed unless the service enforces held admission. ``Job.gpus``, ``cpus`` and ``memory_mb`` are
    totals and are taken to be spread evenly over the job's nodes.
    """
    if not settings.places:
        return Placed()
    jobs = [job for job in snapshot.jobs if held_for_us(job, memory) and settings.manages(job)]
    hosts = _hosts(snapshot, settings)
    actions: list[Place] = []
    reasons: dict[JobKey, str] = {}
    for job in sorted(jobs, key=lambda job: (-settings.priority(job), job.submit_s, job.key)):
        ask = _Ask.of(job)
        nodes, reasons[job.key] = _choose(ask, hosts, settings)
        if nodes:
            actions.append(Place(job.key, tuple(node.name for _, node in nodes), reasons[job.key]))
        for host, node in nodes:
            host.add(ask, node)
    return Placed(tuple(actions), reasons)


@dataclass(frozen=True, slots=True)
class _Ask:
    """What a job needs on each of its nodes."""

    user: str
    partition: str
    nodes: int
    gpus: int
    cpus: int
    memory_mb: int

    @classmethod
    def of(cls, job: Job) -> _Ask:
        nodes = max(job.num_nodes, 1)
        each = (-(-total // nodes) for total in (job.gpus, job.cpus, job.memory_mb))
        return cls(job.user, job.partition, nodes, *each)


@dataclass(slots=True)
class _Use:
    """What is taken on one lane, planned placements included."""

    gpus: int
    cpus: int
    memory_mb: int


@dataclass(slots=True)
class _Host:
    """A host with its lanes, and what this round has planned on it."""

    name: str
    lanes: tuple[Node, ...]
    use: dict[str, _Use]
    classes: list[int] = field(default_factory=list)
    users: set[str] = field(default_factory=set)
    turns: bool = True
    """Every job here can take turns."""

    @property
    def gpus(self) -> int:
        """Return the host's real GPUs: every lane shows them all."""
        return max(node.gpus for node in self.lanes)

    @property
    def given(self) -> int:
        """Return the GPUs given out over all lanes."""
        return sum(use.gpus for use in self.use.values())

    @property
    def load(self) -> float:
        """Return GPUs given out for each real one; its ceiling is the paper's height."""
        return self.given / max(self.gpus, 1)

    @property
    def affinity(self) -> int:
        """Return the class that most of the GPUs are given to, the larger one of equals; 0 without jobs."""
        sums = {size: size * self.classes.count(size) for size in self.classes}
        return max(sums, key=lambda size: (sums[size], size), default=0)

    def fits(self, node: Node, ask: _Ask) -> bool:
        """Whether one lane has room for the job's share."""
        use = self.use[node.name]
        return (
            node.up
            and not node.drained
            and ask.partition in node.partitions
            and use.gpus + ask.gpus <= node.gpus
            and use.cpus + ask.cpus <= node.cpus
            and use.memory_mb + ask.memory_mb <= node.memory_mb
        )

    def add(self, ask: _Ask, node: Node) -> None:
        """Take the job's share of one lane."""
        use = self.use[node.name]
        use.gpus, use.cpus, use.memory_mb = (
            use.gpus + ask.gpus,
            use.cpus + ask.cpus,
            use.memory_mb + ask.memory_mb,
        )
        self.classes.append(ask.gpus)
        self.users.add(ask.user)


def _hosts(snapshot: ClusterSnapshot, settings: SharingSettings) -> list[_Host]:
    """Return the hosts whose agent is alive, in order of names."""
    alive = {host.name for host in snapshot.hosts if host.agent_alive}
    lanes: dict[str, list[Node]] = {}
    for node in sorted(snapshot.nodes, key=lambda node: (node.host, node.lane, node.name)):
        lanes.setdefault(node.host, []).append(node)
    hosts = {name: _host(name, nodes) for name, nodes in lanes.items() if name in alive}
    by_node = {node.name: hosts[node.host] for node in snapshot.nodes if node.host in hosts}
    for job in sorted(snapshot.jobs, key=lambda job: job.key):
        for name in job.nodes if job.gpus else ():
            if name in by_node:
                _settle(by_node[name], job, settings)
    return list(hosts.values())


def _host(name: str, nodes: Iterable[Node]) -> _Host:
    lanes = tuple(nodes)
    return _Host(name, lanes, {n.name: _Use(n.gpus_used, n.cpus_used, n.memory_used_mb) for n in lanes})


def _settle(host: _Host, job: Job, settings: SharingSettings) -> None:
    host.classes.append(_Ask.of(job).gpus)
    host.users.add(job.user)
    host.turns = host.turns and settings.manages(job)


Chosen = list[tuple[_Host, Node]]


def _choose(ask: _Ask, hosts: list[_Host], settings: SharingSettings) -> tuple[Chosen, str]:
    free = sorted((_step(host, ask), host.load, host.name, host) for host in hosts if _has_free(host, ask))
    if len(free) >= ask.nodes:
        chosen = [(host, host.lanes[0]) for _, _, _, host in free[: ask.nodes]]
        steps = max(step for step, _, _, _ in free[: ask.nodes])
        return chosen, f"placed on {_names(chosen)}: {ask.gpus} free GPUs each, {_STEPS[steps]}"
    shared = _oversubscribe(ask, hosts, settings)
    if shared:
        return shared, (
            f"placed on {_names(shared)}: no {ask.gpus} free GPUs, the least loaded of its class, takes turns"
        )
    return [], (
        f"stays queued: {len(free)} of {ask.nodes} hosts have {ask.gpus} free GPUs, and too few hosts "
        f"of the {ask.gpus}-GPU class have a further lane with room where it may share"
    )


_STEPS = {1: "hosts of its class", 2: "a host without a class", 3: "affinity relaxed"}


def _names(chosen: Chosen) -> str:
    return ", ".join(node.name for _, node in chosen)


def _step(host: _Host, ask: _Ask) -> int:
    return 1 if host.affinity == ask.gpus else 2 if host.affinity == 0 else 3


def _has_free(host: _Host, ask: _Ask) -> bool:
    first = host.lanes[0]
    return host.given + ask.gpus <= host.gpus and first.lane == 0 and host.fits(first, ask)


def _oversubscribe(ask: _Ask, hosts: list[_Host], settings: SharingSettings) -> Chosen:
    """Return the least loaded hosts of the job's class in the first lane that has room on enough of them."""
    willing = [
        host
        for host in hosts
        if host.affinity == ask.gpus and host.turns and (settings.share_between_users or host.users <= {ask.user})
    ]
    for lane in sorted({node.lane for host in willing for node in host.lanes}):
        found = [
            (host.load, host.name, host, node)
            for host in willing
            for node in host.lanes
            if node.lane == lane and host.fits(node, ask)
        ]
        if len(found) >= ask.nodes:
            return [(host, node) for _, _, host, node in sorted(found, key=lambda row: row[:2])[: ask.nodes]]
    return []
