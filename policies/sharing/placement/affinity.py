"""Placement: where a pending job starts (Gandiva, OSDI'18, Algorithm 1 on page 601).

The affinity of a host is the GPU count of its jobs (their share on it), 0 without jobs; its load is M / N,
with M the GPUs given out over all its lanes and N its real ones. A job of g GPUs a host goes to, in this
order,

1. hosts of affinity g with g free GPUs (M + g <= N), the least loaded first,
2. hosts of affinity 0,
3. any host with g free GPUs (affinity relaxed),
4. the least loaded hosts of affinity g, in the first lane with room: the jobs will take turns;

else it stays queued. Where a job has profiles of several GPU types, hosts of the type on which it is fastest come
before others in steps 1 to 3. Steps 1 to 3 place in lane 0.
A job of several nodes takes the best of steps 1 to 3 for each, or all its nodes by step 4 in one lane, for
two lanes of a host are the same GPUs. Step 4 needs jobs that can take turns: every job on the host must be
managed, and of the same user unless users share.
"""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.policies.core.actions import Place
from cadenza.policies.core.model import Job, Node
from cadenza.policies.sharing.board.host import HostState, lacks
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.state.pending import awaits_place, queued
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.state.site_limits import Limits


def list_pending(state: RoundState) -> None:
    """List the jobs that the service places, by priority, rank and submission, and the others of Slurm's queue.

    It places managed jobs that lack free resources only, and those whose nodes take no jobs any more.
    """
    settings, last = state.settings, len(state.ranks)
    limits = Limits(job for job in state.jobs.all if job.state == "PENDING")
    waiting = []
    for job in state.jobs.all if settings.places else ():
        if settings.manages(job) and (job.key in state.slurm.stranded or awaits_place(job)):
            # Slurm would not start a job that meets a limit of its account, user or QOS.
            if limit := limits.reason(job):
                reason = f"waits in Slurm: a job before it has met a limit ({limit})"
                state.outcome.say("queue", job.key, reason)
            elif job.key.id not in state.where.relocating:
                waiting.append(job)
    waiting.sort(key=lambda job: (-settings.priority(job), state.ranks.get(job.key, last), job.submit_s, job.key))
    state.slurm.to_place = waiting
    others = state.where.relocating.keys() | {job.key.id for job in waiting}
    queue = queued(state.snapshot, settings)
    state.slurm.queued = [job for job in queue if job.key.id not in others and not limits.reason(job)]


def place_pending(state: RoundState) -> None:
    """Place the pending jobs, in order; each sees those before it placed, and takes its share of the hosts.

    A job goes to the lane of its host where it meets the fewest others on the GPUs that it will get, and only to a
    host whose memory holds it with the jobs of all lanes. For a job that stays queued, room is made before any job
    after it is placed. ``Job.gpus``, ``cpus`` and ``memory_mb`` are totals, spread evenly over the job's nodes.
    """
    actions: list[Place] = []
    say = state.outcome.say
    unplaceable: dict[ResourceRequest, str] = {}
    choose = _Choice(tuple(state.where.hosts.values()), state.settings)
    for job in state.slurm.to_place:
        request = ResourceRequest.under(job, floor=state.settings.floor)
        if request in unplaceable:  # nothing has changed since the last one that asked for this
            say("queue", job.key, unplaceable[request])
            continue
        nodes, reason = choose(request, job)
        if not nodes:
            made = state.slurm.make_room(state, job) if state.slurm.make_room is not None else ""
            unplaceable = {} if made else {**unplaceable, request: reason}
            say("queue", job.key, made or reason)
            continue
        unplaceable.clear()
        say("queue", job.key, reason)
        actions.append(Place(job.key, tuple(node.name for _, node in nodes), reason))
        for host, node in nodes:
            seats = [seat for seat in host.seats(request) if seat.node == node]
            if seats:
                host.enter(job, request, seats[0])
            else:
                host.add(request, node)
    state.outcome.placements = tuple(actions)


Chosen = list[tuple[HostState, Node]]
_STEPS = {1: "hosts of its class", 2: "a host without a class", 3: "affinity relaxed"}


@dataclass(frozen=True, slots=True)
class _Choice:
    """Algorithm 1 over the hosts."""

    hosts: tuple[HostState, ...]
    settings: SharingSettings

    def __call__(self, request: ResourceRequest, job: Job) -> tuple[Chosen, str]:
        """Return the nodes for one job, none when it stays queued, and a sentence for its user."""
        step = {request.gpus: 1, 0: 2}
        free_hosts = [
            ((host.iteration_s(job), step.get(host.affinity, 3), host.load, host.name), host)
            for host in self.hosts
            if self._has_free(host, request)
        ]
        free = sorted(free_hosts, key=lambda row: row[0])[: request.nodes]
        if len(free) == request.nodes:
            seats = {host.name: host.seats(request) if request.nodes == 1 else [] for _, host in free}
            chosen = [(host, seats[host.name][0].node if seats[host.name] else host.lanes[0]) for _, host in free]
            steps = max(number for (_, number, *_), _ in free)
            return chosen, f"placed on {_names(chosen)}: {request.gpus} free GPUs each, {_STEPS[steps]}"
        # Gandiva oversubscribes before it queues a job, so that each job soon shows its first results (page 600).
        shared = self._oversubscribe(request)
        if shared:
            return shared, (
                f"placed on {_names(shared)}: no {request.gpus} free GPUs, the least loaded of its class, takes turns"
            )
        idle = [host for host in self.hosts if self._has_free_gpus(host, request)]
        lacking = lacks(idle, request)
        room = f" and room for it ({lacking})" if lacking else ""
        return [], (
            f"stays queued: {len(free_hosts)} of {request.nodes} hosts have {request.gpus} free GPUs{room}, and too "
            f"few hosts of the {request.gpus}-GPU class have a further lane with room where it may share"
        )

    @staticmethod
    def _has_free_gpus(host: HostState, request: ResourceRequest) -> bool:
        # The algorithm as printed asks for ceil(M / N) < 1 in its first step, which only an empty server meets. Its
        # text says "free GPUs", which counts here.
        return host.gpus_allocated + request.gpus <= host.gpus and host.usable

    def _has_free(self, host: HostState, request: ResourceRequest) -> bool:
        if not self._has_free_gpus(host, request):
            return False
        lanes = host.lanes if request.nodes == 1 else host.lanes[:1]  # a job of several nodes has them all in one lane
        return host.has_host_memory_for(request) and any(host.fits(node, request) for node in lanes)

    def _oversubscribe(self, request: ResourceRequest) -> Chosen:
        """Return the least loaded hosts of the job's class in the first (or emptiest) lane that has room on enough."""
        willing = [host for host in self.hosts if host.affinity == request.gpus and self._shares(host, request)]
        if request.nodes == 1:
            emptiest = sorted(willing, key=lambda host: (host.pressure, host.load, host.name))
            return next(([(host, seats[0].node)] for host in emptiest if (seats := host.seats(request))), [])
        # All its nodes in one lane: Slurm takes two lanes of a host for two hosts, and the job would have GPUs twice.
        for lane in sorted({node.lane for host in willing for node in host.lanes}):
            candidates = [
                (host.load, host.name, host, node)
                for host in willing
                for node in host.lanes
                if node.lane == lane and host.fits(node, request)
            ]
            if len(candidates) >= request.nodes:
                return [
                    (host, node) for _, _, host, node in sorted(candidates, key=lambda row: row[:2])[: request.nodes]
                ]
        return []

    def _shares(self, host: HostState, request: ResourceRequest) -> bool:
        stuck = request.nodes > 1 and host.stuck_gpus  # the seats of one node are on the other GPUs
        return not stuck and host.may_share(request, between_users=self.settings.share_between_users)


def _names(chosen: Chosen) -> str:
    return ", ".join(node.name for _, node in chosen)
