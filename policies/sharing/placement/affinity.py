"""Held admission: where a held job starts (Gandiva, OSDI'18, Algorithm 1 on page 601).

The affinity of a host is the GPU count of its jobs (their share on it), 0 without jobs; its load is M / N,
with M the GPUs given out over all its lanes and N its real ones. A job of g GPUs a host goes to, in this
order,

1. hosts of affinity g with g free GPUs (M + g <= N), the least loaded first,
2. hosts of affinity 0,
3. any host with g free GPUs (affinity relaxed),
4. the least loaded hosts of affinity g, in the first lane with room: the jobs will take turns;

else it stays queued. Where a job has profiles of several GPU types, hosts of the type on which it is fastest come
before others in steps 1 to 3. Steps 1 to 3 place in lane 0. The algorithm as printed asks for ceil(M / N) < 1 in
step 1, which only an empty server meets; its text says "free GPUs", and that is what is done here.
A job of several nodes takes the best of steps 1 to 3 for each, or all its nodes by step 4 in one lane, for
two lanes of a host are the same GPUs. Step 4 needs jobs that can take turns: every job on the host must be
managed, and of the same user unless users share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cadenza.policies.core.actions import Place
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.sharing.state.host import Ask, HostBook, books
from cadenza.policies.sharing.state.settings import SharingSettings, held_for_us


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
    jobs = held_jobs(snapshot, memory, settings)
    return place_on(books(snapshot, settings), jobs, settings) if jobs else Placed()


def held_jobs(
    snapshot: ClusterSnapshot,
    memory: Memory,
    settings: SharingSettings,
    ranks: Mapping[JobKey, int] | None = None,
) -> list[Job]:
    """Return the jobs that are ours to place, by priority, rank (where an ordering gave one), submission and key."""
    if not settings.places:
        return []
    jobs = [job for job in snapshot.jobs if job.held and held_for_us(job, memory) and settings.manages(job)]
    known = ranks or {}
    last = len(known)
    return sorted(jobs, key=lambda job: (-settings.priority(job), known.get(job.key, last), job.submit_s, job.key))


def place_on(
    hosts: Mapping[str, HostBook],
    jobs: Sequence[Job],
    settings: SharingSettings,
    *,
    by_gpu: bool = False,
    otherwise: Callable[[Job], str] | None = None,
) -> Placed:
    """Return where these jobs start, in this order, and note them in the books of ``hosts``.

    With ``by_gpu`` a job goes to the lane of its host where it meets the fewest others on the GPUs that it will
    get, and only to a host whose memory holds it beside the jobs of all lanes. ``otherwise`` is called for a job that
    stays queued before any job after it: it may make room, and returns a sentence if it does.
    """
    actions: list[Place] = []
    reasons: dict[JobKey, str] = {}
    vain: dict[Ask, str] = {}
    choose = _Choice(tuple(hosts.values()), settings, by_gpu)
    for job in jobs:
        ask = Ask.under(job, settings) if by_gpu else Ask.of(job)
        if ask in vain:  # nothing has changed since the last one that asked for this
            reasons[job.key] = vain[ask]
            continue
        nodes, reasons[job.key] = choose(ask, job)
        if not nodes:
            made = otherwise(job) if otherwise is not None else ""
            vain = {} if made else {**vain, ask: reasons[job.key]}
            reasons[job.key] = made or reasons[job.key]
            continue
        vain.clear()
        actions.append(Place(job.key, tuple(node.name for _, node in nodes), reasons[job.key]))
        for host, node in nodes:
            choose.take(host, node, job, ask)
    return Placed(tuple(actions), reasons)


Chosen = list[tuple[HostBook, Node]]
_STEPS = {1: "hosts of its class", 2: "a host without a class", 3: "affinity relaxed"}


@dataclass(frozen=True, slots=True)
class _Choice:
    """Algorithm 1 over the hosts' books."""

    hosts: tuple[HostBook, ...]
    settings: SharingSettings
    by_gpu: bool

    def __call__(self, ask: Ask, job: Job) -> tuple[Chosen, str]:
        """Return the nodes for one job, none when it stays queued, and a sentence for its user."""
        found = [
            ((host.iteration_s(job), _step(host, ask), host.load, host.name), host)
            for host in self.hosts
            if self._has_free(host, ask)
        ]
        free = sorted(found, key=lambda row: row[0])[: ask.nodes]
        if len(free) == ask.nodes:
            chosen = [(host, self._lane(host, ask)) for _, host in free]
            steps = max(step for (_, step, *_), _ in free)
            return chosen, f"placed on {_names(chosen)}: {ask.gpus} free GPUs each, {_STEPS[steps]}"
        shared = self._oversubscribe(ask)
        if shared:
            return shared, (
                f"placed on {_names(shared)}: no {ask.gpus} free GPUs, the least loaded of its class, takes turns"
            )
        return [], (
            f"stays queued: {len(found)} of {ask.nodes} hosts have {ask.gpus} free GPUs, and too few hosts "
            f"of the {ask.gpus}-GPU class have a further lane with room where it may share"
        )

    def take(self, host: HostBook, node: Node, job: Job, ask: Ask) -> None:
        """Note a placement in the host's books."""
        seats = [seat for seat in host.seats(ask) if seat.node == node] if self.by_gpu else []
        if seats:
            host.enter(job, ask, seats[0])
        else:
            host.add(ask, node)

    def _has_free(self, host: HostBook, ask: Ask) -> bool:
        if host.given + ask.gpus > host.gpus or not host.usable:
            return False
        lanes = host.lanes if self._any_lane(ask) else host.lanes[:1]
        return (not self.by_gpu or host.remembers(ask)) and any(host.fits(node, ask) for node in lanes)

    def _any_lane(self, ask: Ask) -> bool:
        """Whether the lane matters to nobody: a job of several nodes has them all in one lane."""
        return self.by_gpu and ask.nodes == 1

    def _lane(self, host: HostBook, ask: Ask) -> Node:
        seats = host.seats(ask) if self._any_lane(ask) else []
        return seats[0].node if seats else host.lanes[0]

    def _oversubscribe(self, ask: Ask) -> Chosen:
        """Return the least loaded hosts of the job's class in the first (or emptiest) lane that has room on enough."""
        willing = [host for host in self.hosts if host.affinity == ask.gpus and self._shares(host, ask)]
        if self._any_lane(ask):
            return self._emptiest(ask, willing)
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

    def _emptiest(self, ask: Ask, willing: list[HostBook]) -> Chosen:
        for host in sorted(willing, key=lambda host: (host.pressure, host.load, host.name)):
            seats = host.seats(ask)
            if seats:
                return [(host, seats[0].node)]
        return []

    def _shares(self, host: HostBook, ask: Ask) -> bool:
        known = self.settings.share_between_users or host.users.keys() <= {ask.user}
        return known and not host.strangers and (not self.by_gpu or host.remembers(ask))


def _step(host: HostBook, ask: Ask) -> int:
    affinity = host.affinity
    return 1 if affinity == ask.gpus else 2 if affinity == 0 else 3


def _names(chosen: Chosen) -> str:
    return ", ".join(node.name for _, node in chosen)
