"""Idle GPUs of several hosts joined: jobs leave for GPUs that are idle elsewhere, so that a wider job gets theirs.

Slurm starts the jobs that leave on these idle GPUs: in its queue they stand right behind the job that they make way
for, and no other job fits there, or it would run already.
"""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.policies.core.model import Job
from cadenza.policies.sharing.board.node_room import NodeRequest, NodeRoom, Victim
from cadenza.policies.sharing.preemption.standing import Standings

JOIN_AFTER_S = 3600.0
"""Time that a job runs at least before it leaves for idle GPUs: once an hour at most, in seconds."""


def can_join(room: NodeRoom, job: Job) -> bool:
    """Return True if what leaves and what waits both fit into the GPUs that are idle in all."""
    return sum(free[0] for free in room.free.values()) >= job.gpus


def join_idle_gpus(
    room: NodeRoom, standings: Standings, job: Job, request: NodeRequest, names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[Victim, ...]] | None:
    """Return the nodes that a waiting job gets, and the jobs that leave them for idle GPUs of others; None without.

    The jobs that leave have fewer GPUs than the one that waits, each lies on one node and ran for an hour, and each
    fits on what is idle elsewhere.
    """

    def may(victim: Victim) -> bool:
        one = victim.job
        ran = standings.had_s(one) >= JOIN_AFTER_S
        return ran and len(one.nodes) == 1 and one.gpus < job.gpus and not standings.outranks(one, job)

    found = room.least_eviction(request, names, may)
    if found is None or not found[1] or sum(one.job.gpus for one in found[1]) >= job.gpus:
        return None
    return found if _fit_elsewhere(room, found[0], found[1]) else None


def _fit_elsewhere(room: NodeRoom, spot: Sequence[str], victims: Sequence[Victim]) -> bool:
    """Return True if each of the jobs fits on what is free on other nodes than these."""
    taken: list[tuple[NodeRequest, tuple[str, ...]]] = []
    try:
        for victim in sorted(victims, key=lambda one: (-one.job.gpus, one.job.key)):
            request = room.request(victim.job)
            names = [name for name in room.admitting(request) if name not in spot]
            there = room.fits(request, sorted(names, key=lambda name: room.free[name][0]))
            if not there:
                return False
            room.take(request, there)
            taken.append((request, there))
        return True
    finally:
        for request, there in taken:
            room.give_back(request, there)
