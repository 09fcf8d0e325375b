"""Stage of preemption: running jobs make way for the first jobs of Slurm's queue that wait for resources.

Slurm alone starts jobs. So room is made only where Slurm would start the job that it is made for: the first of its
queue, or one that its backfill starts there. Before any job is asked to leave, one pass of Slurm is played with the
GPUs free, and room whose job that pass does not start is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from cadenza.policies.core.actions import MakeWay
from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.core.text import job_names
from cadenza.policies.relocation.phases import lost_s
from cadenza.policies.sharing.board.node_room import NodeRequest, NodeRoom, Victim
from cadenza.policies.sharing.preemption.join_idle import can_join, join_idle_gpus
from cadenza.policies.sharing.preemption.site_factor import behind, powerless_reason
from cadenza.policies.sharing.preemption.slurm_pass import RoundNodes, SlurmPass
from cadenza.policies.sharing.preemption.standing import COST_S, QUANTUM_COSTS, Standings, limit_s, note_checkpoints
from cadenza.policies.sharing.preemption.waiting_jobs import waiting_jobs
from cadenza.policies.sharing.preemption.waiting_reason import WaitingReasons
from cadenza.policies.sharing.state.round_state import RoundState

MAX_WAYS = 20
"""Waiting jobs that room is made for in one round."""
MAX_TRIES = 20
"""Waiting jobs that room is looked for in one round: the search takes time."""
AGAIN_S = QUANTUM_COSTS * COST_S
"""Time until room is looked for again for a job whose room would go to others, or went there."""


GOES_TO_OTHERS = "waits in Slurm's queue: Slurm would start another job on the GPUs that jobs could free for it"
"""Reason of a job whose room the proof has turned down."""


class Way(NamedTuple):
    """Room for one waiting job."""

    job: Job
    request: NodeRequest
    nodes: tuple[str, ...]
    victims: tuple[Victim, ...]


def make_way(state: RoundState) -> None:
    """Let running jobs of a worse level make way for the first jobs of Slurm's queue that wait for resources."""
    note_checkpoints(state)
    queue = waiting_jobs(state.snapshot) if state.settings.partitions else []
    if reason := powerless_reason(state.snapshot.site):
        for job in queue:
            state.outcome.say("queue", job.key, reason)
        return
    if queue:
        _walk_through(state, queue)
    tried = state.memory.made_way
    live = state.snapshot.by_id
    kept = {at: when_s for at, when_s in tried.items() if at in live and live[at].state == "PENDING"}
    if len(kept) < len(tried):
        state.memory = replace(state.memory, made_way=dict(sorted(kept.items())))


def _walk_through(state: RoundState, queue: list[Job]) -> None:
    """Find room for the jobs of the queue, in order."""
    # 1. Jobs that could leave, and nodes with what is free or becomes free as jobs leave.
    standings, tried = Standings(state), state.memory.made_way
    now_s = state.now_s
    looks = any(now_s >= tried.get(job.key.id, -inf) + AGAIN_S for job in queue)
    victims = [
        Victim(job, standings.level(job), job.amounts, lost_s(job, now_s))
        for job in (state.jobs.ours.values() if looks else ())
        if standings.quantum_left_s(job) <= 0.0 and standings.can_leave(job)
    ]
    making_way = state.where.making_way  # Slurm has their GPUs back soon, as those of jobs that end
    placed = [job for job in state.jobs.started if job.nodes]
    # A job that ends has its GPUs in Slurm's allocation until its last node has cleaned up; then they are the queue's.
    leaving = [job for job in placed if job.state == "OTHER" or job.key.id in making_way]
    staying = (job for job in placed if job.state != "OTHER" and job.key.id not in making_way)
    # 2. One walk through the queue: jobs that start, jobs that others can leave for, and jobs that stay.
    room = NodeRoom(state.snapshot, victims, leaving)
    nodes = RoundNodes(room, staying, now_s)
    walk = _Walk(room, nodes, standings, state)
    last = max((number for number, job in enumerate(queue) if walk.hopes(job)), default=-1)
    for number, job in enumerate(queue):
        if number > last or walk.over:
            walk.rest = queue[number:]
            break
        walk.step(job)
    state.outcome.waiting_reasons = walk.reasons
    # 3. The same pass with the GPUs free must start each job that room is made for: free GPUs move Slurm's
    #    reservations, and a job before it, or a short one behind, may then be the one that gets them.
    ways = _proven(walk.ways, queue, nodes)
    # 4. The orders, and what is remembered: the jobs that room was made for, or looked for in vain.
    for way in walk.ways:
        state.outcome.say("queue", way.job.key, GOES_TO_OTHERS)
    for way in ways:
        _let_leave(state, standings, way)
    if walk.ways:
        tried = dict(state.memory.made_way) | {way.job.key.id: state.now_s for way in walk.ways}
        state.memory = replace(state.memory, made_way=dict(sorted(tried.items())))


@dataclass(slots=True)
class _Walk:
    """One walk through the queue, as far as it has come."""

    room: NodeRoom
    nodes: RoundNodes
    standings: Standings
    state: RoundState
    ways: list[Way] = field(default_factory=list)
    tries: int = 0
    blocked: list[tuple[Job, NodeRequest]] = field(default_factory=list)
    """Jobs before that stay in the queue."""
    ahead: dict[tuple[object, ...], list[tuple[Amount, float]]] = field(default_factory=dict)
    """Requests and limits of those for one node; without those that ask for as much as another."""
    reserved: int = 0
    """Number of them that the pass has reserved nodes for."""
    free: list[Amount] | None = None
    """Free resources of the nodes as room was first looked for: from then on reservations count."""
    slurm: SlurmPass | None = None
    rest: Sequence[Job] = ()
    """Jobs for which no room is made whatever comes before: only their sentences are left."""
    vain: set[tuple[object, ...]] = field(default_factory=set)
    """Claims for which no room was found: nothing that asks alike has to try again."""

    def step(self, job: Job) -> None:
        """Take one job of the queue."""
        state, room = self.state, self.room
        request = room.request(job)
        # 1. Slurm can start it now, or once those that leave have left. Behind a job that stays in the queue only
        #    backfill starts others, on nodes that are reserved for none before them until their time limit.
        spot = room.fits(request, room.admitting(request))
        if spot and self.free is not None:  # reservations are worked out only for a job that fits
            spot = room.fits(request, self._pass().unreserved(job, request))
        if spot:
            if self.free is not None:
                self._pass().start(job, request, spot)
            room.take(request, spot)
            state.outcome.say("queue", job.key, f"is next in Slurm's queue: {', '.join(spot)} has room for it")
            return
        # 2. Jobs of a worse level make way, the fewest GPUs of them. In the pass their resources are free from now on,
        #    not from their time limits: Slurm plans by those, and would reserve other nodes for the jobs behind.
        if self.hopes(job) and (way := self._way_for(job, request)):
            self.ways.append(way)
            room.evict(way.victims)
            room.take(request, way.nodes)
            for victim in way.victims:
                self._pass().leave(victim.job.key)
            self._pass().start(job, request, way.nodes)
            return
        # 3. It stays in the queue. Slurm will reserve nodes for it as it looks at the next ones, so these see it; many
        #    of a long queue ask alike, and the first look needs one of them.
        self.blocked.append((job, request))
        if request.nodes == 1 and not self._would_get_it(job, request):
            self.ahead.setdefault(request[2:], []).append((request.each, limit_s(job)))

    def reasons(self) -> dict[JobKey, str]:
        """Return why the jobs of the service that stay in the queue wait."""
        for job in self.rest:
            self.step(job)
        reasons, manages = WaitingReasons(self.room, self.standings), self.state.settings.manages
        return {job.key: reasons.of(job, request) for job, request in self.blocked if manages(job)}

    @property
    def over(self) -> bool:
        """Return True if no more room is looked for in this round."""
        return len(self.ways) == MAX_WAYS or self.tries == MAX_TRIES

    def hopes(self, job: Job) -> bool:
        """Return True if others could make way for a job, by what the walk does not change."""
        room = self.room
        if not room.on or self.nodes.now_s < self.state.memory.made_way.get(job.key.id, -inf) + AGAIN_S:
            return False
        return 1 < job.gpus <= room.widest or room.worst_level > self.standings.claim(job)

    def _way_for(self, job: Job, request: NodeRequest) -> Way | None:
        """Return the room that others can make for a waiting job; None without, or where it would not get there."""
        standings, room = self.standings, self.room
        claim = standings.claim(job)
        movable, fair = standings.can_leave_later(job), standings.site.fair_share
        alike = (request, claim, movable, job.qos, limit_s(job), job.account if fair else "", job.user if fair else "")
        joins = 1 < job.gpus <= room.widest
        if alike in self.vain or self.over or self._would_get_it(job, request):
            return None
        self.tries += 1
        self.free = self.free or list(room.free.values())

        def may(victim: Victim) -> bool:
            return not standings.outranks(victim.job, job) and (movable or not standings.overdue(victim.job))

        # Most jobs find no room anywhere, reserved nodes included, and the pass is dear.
        everywhere = room.admitting(request)
        anywhere = room.worst_level > claim and room.least_eviction(request, everywhere, may, claim) is not None
        if not anywhere and not (joins and can_join(room, job)):
            self.vain.add(alike)
            return None
        names = self._pass().unreserved(job, request)
        found = room.least_eviction(request, names, may, claim) if anywhere else None
        if (found is None or not found[1]) and joins and can_join(room, job):
            found = join_idle_gpus(room, standings, job, request, names)
        if found is None or not found[1]:
            self.vain.add(alike)
            return None
        return Way(job, request, *found)

    def _would_get_it(self, job: Job, request: NodeRequest) -> bool:
        """Return True if a job before would get any room that is made for this one: it asks for no more, for no longer.

        Only a first look, because it is cheap: the pass in the end decides.
        """
        most_s, (gpus, cpus, memory_mb) = limit_s(job), request.each
        for each, ends_s in self.ahead.get(request[2:], ()):
            if ends_s <= most_s and each[0] <= gpus and each[1] <= cpus and each[2] <= memory_mb:
                return True
        return False

    def _pass(self) -> SlurmPass:
        """Return Slurm's pass so far, with the reservations of all jobs that stay in the queue."""
        if self.slurm is None:
            self.slurm = SlurmPass(self.nodes, self.nodes.future_with(self.free or ()))
        while self.reserved < len(self.blocked):
            self.slurm.take_turn(*self.blocked[self.reserved])
            self.reserved += 1
        return self.slurm


def _proven(ways: list[Way], queue: list[Job], nodes: RoundNodes) -> list[Way]:
    """Return the ways whose job Slurm's own pass starts once all of their jobs have left."""
    while ways:
        slurm = SlurmPass(nodes, nodes.future_without({victim.job.key for way in ways for victim in way.victims}))
        wanted, started = {way.job.key for way in ways}, set()
        for job in queue:
            if slurm.take_turn(job, nodes.room.request(job)):
                started.add(job.key)
            wanted.discard(job.key)
            if not wanted:
                break
        good = [way for way in ways if way.job.key in started]
        if len(good) == len(ways):
            return good
        ways = good
    return []


def _let_leave(state: RoundState, standings: Standings, way: Way) -> None:
    """Order that jobs save, are requeued, and come back behind the job that they make way for."""
    # They leave as one action: a backfill cycle between the first and the last requeue would give the first one's GPUs
    # to a short job. Each has its factor before its requeue, or Slurm would start it again before the job that waits.
    job = way.job
    leaving = sorted((victim.job for victim in way.victims), key=lambda one: one.key)
    keys = tuple(one.key for one in leaving)
    factors = tuple(behind(standings, one, job) for one in leaving)
    reason = f"makes way for job {job.key}, which is next in Slurm's queue"
    state.outcome.ways.append(MakeWay(keys, factors, job.key, reason))
    state.outcome.say("queue", job.key, f"{job_names(keys)} make{'s' if len(keys) == 1 else ''} way for it")
