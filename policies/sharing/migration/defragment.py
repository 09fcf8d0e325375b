"""Defragmentation (Gandiva, OSDI'18, §4.2): jobs move together so that hosts have their GPUs free for large jobs.

For a job that waits for GPUs the fewest migrations are made after which one host has room for it (``move_search``).
Two kinds wait: jobs that no host can start, and those on a further lane that wait for a lease. While the queue is
empty, the host in use that has the most free GPUs is emptied: its jobs go to hosts that have no more free GPUs, until
every host in use has less than 3 of 4 of its GPUs free, or no job can go. In both cases a job moves only where the
move costs it a negligible part of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from cadenza.policies.core.model import Job
from cadenza.policies.sharing.board.host import HostState, Resident, Seat
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.migration.move_search import Mover, Plan, Wish, free_seat, room
from cadenza.policies.sharing.state.pending import lacks_lease
from cadenza.policies.sharing.state.round_state import RoundState, sharers


def open_defragmentation(state: RoundState) -> None:
    """Let the placement of pending jobs make room for those that no host can start."""
    state.slurm.make_room = make_room


def make_room(state: RoundState, job: Job) -> str:
    """Make room for a job that cannot start, and return a sentence; "" where that is not possible."""
    if not _searches(state) or job.num_nodes > 1 or not job.gpus or state.where.home(job.key) is not None:
        return ""
    request = ResourceRequest.under(job, floor=state.settings.floor)
    return _make(state, Wish(job, request))


def defragment_for_queue(state: RoundState) -> None:
    """Make room for jobs that Slurm would start if it had the resources; those with room already keep it."""
    for job in state.slurm.queued:
        # A job that waits for its Priority stands behind another one, which would get the room.
        stuck = job.state_reason == "Resources" and state.settings.manages(job)
        if stuck and _searches(state) and not _served(state, job):
            make_room(state, job)


def defragment_for_lanes(state: RoundState) -> None:
    """Make room for jobs that stand without a lease where Slurm started them: others leave their GPUs."""
    for host in state.where.hosts.values() if _searches(state) else ():
        for key in sorted(host.residents):
            resident = host.residents.get(key)
            if resident is not None and _searches(state) and _waits_for_lease(state, host, resident):
                _make(state, Wish(resident.job, resident.request, host))


def _searches(state: RoundState) -> bool:
    """Return True if room may be made: not while a job may still be counted on the node that it leaves."""
    settled = all(move.arriving for move in state.where.relocating.values())
    return settled and state.where.moves_left > 0 and state.slurm.room_searches_left > 0


def _make(state: RoundState, wish: Wish) -> str:
    state.slurm.room_searches_left -= 1
    plan = room(state, wish, list(_movers(state, wish)))
    if plan is None:
        return ""
    state.slurm.room_made = True
    return _carry_out(state, wish, plan)


# --- Room for those that wait --------------------------------------------------------------------------


def _waits_for_lease(state: RoundState, host: HostState, resident: Resident) -> bool:
    key = resident.job.key
    free = key in state.jobs.ours and key not in state.where.fixed and key not in state.who.packed
    waits = free and lacks_lease(resident) and key not in state.who.holders
    return waits and len(resident.job.nodes) == 1 and sharers(host, resident) > 1


def _served(state: RoundState, job: Job) -> bool:
    """Return True if a job has room already; it is kept for it then."""
    request = ResourceRequest.under(job, floor=state.settings.floor)
    for host in state.where.hosts.values():
        seat = free_seat(host, job, request) if host.usable else None
        if seat is not None:
            host.enter(job, request, seat)
            return True
    return False


def _movers(state: RoundState, wish: Wish) -> Iterator[Mover]:
    """Return the jobs that may move for a job: those with a negligible loss; outside its turns, none above it."""
    most = state.settings.priority(wish.job) if wish.home is not None else inf
    for host in state.where.hosts.values():
        for resident in state.residents(host):
            key = resident.job.key
            fits = key != wish.job.key and key not in state.who.packed and _negligible(state, resident)
            if fits and state.settings.priority(resident.job) <= most:
                yield Mover(host, resident)


def _carry_out(state: RoundState, wish: Wish, plan: Plan) -> str:
    """Order the moves of a plan, and keep the GPUs for the waiting job."""
    for mover, _, _ in plan.steps:
        mover.home.leave(mover.resident)
    if plan.seat is not None:
        plan.host.enter(wish.job, wish.request, plan.seat)
    for mover, target, seat in plan.steps:
        reason = f"moves from {mover.resident.lane} to {seat.node.name}, so that job {wish.job.key} gets GPUs of "
        state.migrate(mover.resident.job, target, seat, mover.resident.request, f"{reason}{plan.host.name}")
    movers = ", ".join(str(mover.resident.job.key) for mover, _, _ in plan.steps)
    return f"waits until room is made for it on {plan.host.name}: job {movers} moves to other hosts"


def _negligible(state: RoundState, resident: Resident) -> bool:
    return state.gandiva.move_s <= state.gandiva.loss * state.left_s(resident.job)


# --- No job waits ---------------------------------------------------------------------------------------


def empty_hosts(state: RoundState) -> None:
    """Empty the hosts with the most free GPUs while no job is pending; each move makes a fuller host fuller."""
    if state.slurm.to_place or state.slurm.queued:
        return
    for source in sorted(state.where.hosts.values(), key=lambda host: (-_free(host), host.name)):
        if source.sizes and _free(source) >= state.gandiva.free_share * source.gpus:
            _empty(state, source)


def _free(host: HostState) -> int:
    return host.gpus - host.gpus_allocated


def _empty(state: RoundState, source: HostState) -> None:
    """Move what can go from a host."""
    for resident in list(state.residents(source)):
        place = _fuller(state, source, resident) if _negligible(state, resident) else None
        if place is not None:
            target, seat = place
            reason = f"moves from {resident.lane} to {seat.node.name}, so that {source.name} is free for larger jobs"
            state.migrate(resident.job, target, seat, resident.request, reason)


def _fuller(state: RoundState, source: HostState, resident: Resident) -> tuple[HostState, Seat] | None:
    """Return idle GPUs on the host with the fewest free ones, hosts of the job's class first."""
    candidates = [
        ((host.affinity != resident.request.gpus, _free(host), host.name), host, seat)
        for host in state.where.hosts.values()
        if host.sizes and host is not source and resident.request.gpus <= _free(host) <= _free(source)
        for seat in [state.seat(host, resident.request)]
        if seat is not None and seat.sharers == 0 and state.suits(resident.job, source, host)
    ]
    return min(candidates, key=lambda row: row[0])[1:] if candidates else None
