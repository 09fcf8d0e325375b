"""Stage of preemption: running jobs make way for the first jobs of Slurm's queue that wait for resources.

Slurm alone starts jobs. So room is made only where Slurm would start the job that it is made for: the first of its
queue, or one that its backfill starts there. The walk below plays one pass of Slurm over its queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from cadenza.policies.core.actions import MakeWay
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.core.text import job_names
from cadenza.policies.sharing.preemption.join_idle import join_idle_gpus
from cadenza.policies.sharing.preemption.node_room import NodeRequest, NodeRoom, Victim, affected, shares_of
from cadenza.policies.sharing.preemption.site_factor import behind, powerless_reason
from cadenza.policies.sharing.preemption.standing import COST_S, QUANTUM_COSTS, Standings, limit_s, note_checkpoints
from cadenza.policies.sharing.preemption.waiting_jobs import waiting_jobs
from cadenza.policies.sharing.preemption.waiting_reason import WaitingReasons
from cadenza.policies.sharing.state.sharing_state import SharingState

MAX_WAYS = 20
"""Waiting jobs that room is made for in one round."""
AGAIN_S = QUANTUM_COSTS * COST_S
"""Time until room is made for the same job again, if others got the first."""


@dataclass(slots=True)
class _Walk:
    """One pass over the queue, as far as it has come."""

    room: NodeRoom
    standings: Standings
    blocked: dict[NodeRequest, Job] = field(default_factory=dict)
    """Jobs before that do not fit: of those that ask alike, the first."""
    reserved_s: dict[str, float] = field(default_factory=dict)
    """By node, the earliest start that Slurm's backfill has reserved there for one of them."""
    vain: set[tuple[object, ...]] = field(default_factory=set)
    """Claims for which no room was found: nothing that asks alike has to try again."""

    def open_to(self, job: Job, request: NodeRequest) -> list[str]:
        """Return the nodes on which backfill would start a job: there it delays no reservation by its time limit."""
        names = self.room.admitting(request)
        if not self.reserved_s:
            return list(names)
        ends_s = self.standings.now_s + limit_s(job)
        return [name for name in names if ends_s <= self.reserved_s.get(name, inf)]

    def block(self, job: Job, request: NodeRequest) -> None:
        """Note a job that stays in the queue, with the nodes that Slurm's backfill keeps for it."""
        self.blocked.setdefault(request, job)
        if job.expected_start_s is not None:
            for name in job.scheduled_nodes:
                self.reserved_s[name] = min(self.reserved_s.get(name, inf), job.expected_start_s)

    def feeds_others(self, victims: tuple[Victim, ...]) -> bool:
        """Return True if a job before would fit into what these jobs free: Slurm would start that one there."""
        touched = affected(victims)
        self.room.evict(victims)
        try:
            for request in self.blocked:
                names = self.room.admitting(request)
                near = [name for name in names if name in touched]
                if near and self.room.fits(request._replace(nodes=1), near) and self.room.fits(request, names):
                    return True
            return False
        finally:
            self.room.restore(victims)


def make_way(state: SharingState) -> None:
    """Let running jobs of a worse level make way for the first jobs of Slurm's queue that wait for resources."""
    note_checkpoints(state)
    if reason := powerless_reason(state.snapshot.site):
        state.placement_reasons.update({job.key: reason for job in waiting_jobs(state.snapshot)})
        return
    standings, made = Standings(state), dict(state.memory.made_way)
    # 1. Jobs that could leave, and nodes with what is free or becomes free as jobs leave.
    victims = [
        Victim(job, standings.level(job), shares_of(job))
        for job in state.jobs.values()
        if standings.can_leave(job) and standings.quantum_left_s(job) <= 0.0
    ]
    room = NodeRoom(state.snapshot, victims, _leaving(state))
    walk, reasons, ways = _Walk(room, standings), WaitingReasons(room, standings), 0
    queue = waiting_jobs(state.snapshot) if state.settings.partitions else []
    for job in queue:
        request = room.request(job)
        names = walk.open_to(job, request)
        # 2. Slurm can start it now, or once those that leave have left.
        if spot := room.fits(request, names):
            room.take(request, spot)
            state.placement_reasons[job.key] = f"is next in Slurm's queue: {', '.join(spot)} has room for it"
            continue
        # 3. Jobs of a worse level make way, the fewest GPUs of them, if no job before it would get the room.
        leavers: tuple[Victim, ...] = ()
        if ways < MAX_WAYS and state.now_s >= made.get(job.key.id, -inf) + AGAIN_S:
            leavers, spot = _room_for(walk, job, request, names)
        if leavers:
            ways += 1
            made[job.key.id] = state.now_s
            _let_leave(state, standings, job, leavers)
            room.evict(leavers)
            room.take(request, spot)
            continue
        # 4. It stays in the queue, and Slurm's reservation for it stands.
        if state.settings.manages(job):
            state.placement_reasons[job.key] = reasons.of(job, request)
        walk.block(job, request)
    # 5. Ways of jobs that are gone or run are forgotten.
    waiting = {job.key.id for job in state.all_jobs if job.state == "PENDING"}
    kept = {number: at_s for number, at_s in made.items() if number in waiting}
    if kept != state.memory.made_way:
        state.memory = state.with_memory(made_way=kept)


def _leaving(state: SharingState) -> Iterable[Job]:
    """Return the jobs whose GPUs Slurm has back soon: they end, or make way already."""
    for job in state.all_jobs:
        if job.nodes and (job.state == "OTHER" or job.key.id in state.making_way):
            yield job


def _room_for(
    walk: _Walk, job: Job, request: NodeRequest, names: list[str]
) -> tuple[tuple[Victim, ...], tuple[str, ...]]:
    """Return the jobs that leave so that a waiting job starts, and its nodes; empty if none may."""
    standings, room = walk.standings, walk.room
    claim = standings.claim(job)
    fair = standings.site.fair_share
    alike = (request, claim, job.partition, job.qos, job.account if fair else "", job.user if fair else "")

    def may(victim: Victim) -> bool:
        return victim.level > claim and not standings.outranks(victim.job, job)

    if room.worst_level > claim and (alike, len(walk.reserved_s)) not in walk.vain:
        found = room.least_eviction(request, names, may)
        if found is not None and found[1] and not walk.feeds_others(found[1]):
            return found[1], found[0]
        walk.vain.add((alike, len(walk.reserved_s)))
    # Where no worse level makes room, jobs move together on free GPUs elsewhere.
    joined = join_idle_gpus(walk.room, standings, job, request, names)
    if joined is not None and not walk.feeds_others(joined[1]):
        return joined[1], joined[0]
    return (), ()


def _let_leave(state: SharingState, standings: Standings, job: Job, victims: tuple[Victim, ...]) -> None:
    """Order that jobs save, are requeued, and come back behind the job that they make way for."""
    keys = tuple(sorted(victim.job.key for victim in victims))
    by_key: dict[JobKey, Victim] = {victim.job.key: victim for victim in victims}
    factors = tuple(behind(standings, by_key[key].job, job) for key in keys)
    reason = f"makes way for job {job.key}, which is next in Slurm's queue"
    state.ways.append(MakeWay(keys, factors, job.key, reason))
    state.placement_reasons[job.key] = f"{job_names(keys)} make{'s' if len(keys) == 1 else ''} way for it"
