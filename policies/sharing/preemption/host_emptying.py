"""Room for wide jobs: running jobs move to idle GPUs of other hosts if a wider job that waits then gets theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cadenza.policies.core.model import JobKey
from cadenza.policies.sharing.preemption.preemptive_turn import Candidate, Turn
from cadenza.policies.sharing.preemption.seat_map import HostSeats, Occupant, Seat

MAX_WAITING = 4
"""Waiting jobs that room is made for in one turn."""
MAX_HOSTS = 4
"""Hosts that are tried for one of them."""

ROOM_SLICES = 10
"""Slices between two moves of a running job that only makes room."""


def empty_for_waiting(turn: Turn, may_leave: Callable[[JobKey], bool]) -> None:
    """Make room on one host for each of the best waiting jobs, by moves of fewer GPUs than it gets."""
    if not turn.places:
        return
    tried, idle = 0, _idle(turn)
    for job in list(turn.candidates.values()):
        if not idle or tried == MAX_WAITING:
            return
        waits = not job.seats and job.key not in turn.plan.placed and job.request.nodes == 1
        if waits and 1 < job.gpus <= idle:
            tried += 1
            _empty_one(turn, job, may_leave)
            idle = _idle(turn)


def _idle(turn: Turn) -> int:
    """Return the number of GPUs that no job of the turn has."""
    return sum(host.unclaimed.bit_count() for host in turn.hosts if host.state.usable)


def _empty_one(turn: Turn, job: Candidate, may_leave: Callable[[JobKey], bool]) -> None:
    """Empty the host that costs the fewest GPUs for a job, if those who leave find idle ones elsewhere.

    Those who leave have fewer GPUs than the job gets, so a host without idle ones is none for it.
    """
    choices, running = [], set(turn.plan.runs)
    for host in turn.hosts:
        if not host.unclaimed or not host.state.usable or host.every.bit_count() < job.gpus:
            continue
        able = _able(turn, host, running, may_leave)
        for number, lane in enumerate(host.lanes):
            if able and lane.admits(job.request):
                leavers = _leavers(turn, host, number, job, able)
                cost = sum(turn.candidates[occupant.key].gpus for occupant in leavers)
                if leavers and cost < job.gpus:
                    choices.append((cost, number, host.position, leavers))
    for _, number, position, leavers in sorted(choices, key=lambda choice: choice[:3])[:MAX_HOSTS]:
        if _move_all(turn, turn.hosts[position], number, job, leavers):
            return


def _able(turn: Turn, host: HostSeats, running: set[JobKey], may_leave: Callable[[JobKey], bool]) -> list[Occupant]:
    """Return the running jobs of a host that may move elsewhere, few GPUs first."""
    able = []
    for occupant in host.occupants.values():
        if occupant.key in running:
            candidate = turn.candidates[occupant.key]
            if candidate.movable and candidate.holding and len(candidate.seats) == 1 and may_leave(occupant.key):
                able.append(occupant)
    return sorted(able, key=lambda occupant: (occupant.mask.bit_count(), occupant.key))


def _leavers(turn: Turn, host: HostSeats, lane: int, job: Candidate, able: Sequence[Occupant]) -> list[Occupant]:
    """Return those of some running jobs without which a job has a seat on a lane; empty if they do not suffice."""
    gone: list[Occupant] = []
    for occupant in able:
        gone.append(occupant)
        if _seat(turn, host, lane, job, gone) is not None:
            break
    else:
        return []
    for occupant in gone[:]:
        fewer = [other for other in gone if other is not occupant]
        if _seat(turn, host, lane, job, fewer) is not None:
            gone = fewer
    return gone


def _seat(turn: Turn, host: HostSeats, lane: int, job: Candidate, gone: Iterable[Occupant]) -> Seat | None:
    """Return a job's seat once others have left, on GPUs that no job of this turn then has."""
    left = tuple(gone)
    claimed = host.claimed
    for occupant in left:
        host.claimed &= ~occupant.mask
    seat = turn.seat_without(host, lane, job, left)
    host.claimed = claimed
    return seat


def _move_all(turn: Turn, host: HostSeats, lane: int, job: Candidate, leavers: list[Occupant]) -> bool:
    """Move the leavers to idle GPUs of other hosts and promise their seats to the job; False if one finds none."""
    found: list[tuple[Candidate, tuple[Seat, ...]]] = []
    for occupant in sorted(leavers, key=lambda occupant: -occupant.mask.bit_count()):
        candidate = turn.candidates[occupant.key]
        seats = turn.find(candidate, waits=False, idle=True, without=host)
        if not seats:
            break
        for seat in seats:
            seat.host.claimed |= seat.mask
        found.append((candidate, seats))
    for _, seats in found:
        for seat in seats:
            seat.host.claimed &= ~seat.mask
    if len(found) < len(leavers) or not _apart([seat for _, seats in found for seat in seats]):
        return False
    for candidate, seats in found:
        turn.release(candidate)
        turn.move(candidate, seats)
        turn.plan.emptied[candidate.key] = job.key
    promised = turn.seat_without(host, lane, job, ())
    if promised is not None:
        turn.place(job, (promised,))
    return True


def _apart(seats: list[Seat]) -> bool:
    """Return True if no two seats are on one lane: the second one's GPUs would be others than was foreseen."""
    return len({(seat.host.position, seat.lane) for seat in seats}) == len(seats)
