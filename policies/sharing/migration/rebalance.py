"""Migration (Gandiva, OSDI'18, §3 and §4): fill GPUs that became free, even out hosts, bring split jobs together.

After departures a job that takes turns goes to idle GPUs; a job of several hosts goes to one that can hold all of it.
A job that waits behind higher priorities goes where it meets none. In introspective mode hosts of one class are evened
out too, so that fewer jobs share a GPU. A move must gain more than it costs; one job moves at most every
``move_every_s``, and a round moves at most ``moves_per_round``.

Of the jobs that take turns a waiting one goes, because that costs no GPU its time. Where none of them may, the holder
goes, and the next one gets its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil

from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.relocation.phases import follows_size
from cadenza.policies.sharing.board.host import HostState, Resident, Seat
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.state.round_state import RoundState, sharers

LOCALITY_GAIN = 0.05
"""Part of its speed that a job of several hosts is thought to gain on one (5 to 47 % in Gandiva, §2.2)."""
PAYS_BACK = 2.0
"""A move that frees no idle GPU must gain this many times its cost, for the gain is a guess."""


def rebalance(state: RoundState) -> None:
    """Move jobs to idle GPUs, onto one host, and away from jobs of higher priority."""
    _fill(state)
    _rejoin(state)
    _from_below_higher(state)


def even_out(state: RoundState) -> None:
    """Move packed jobs to idle GPUs, and jobs from crowded hosts to others of their class."""
    _separate(state)
    _even_out(state)


# --- Free GPUs -----------------------------------------------------------------------------------------


def _fill(state: RoundState) -> None:
    """Move jobs that take turns to idle GPUs, those in the longest rounds first."""
    if not _any_idle(state):
        return
    movable = [(host, resident) for host in state.where.hosts.values() for resident in _in_turns(state, host)]
    vain: set[object] = set()
    while movable:
        movable.sort(key=lambda row: _need(state, *row))
        moved = next((row for row in movable if _alike(*row) not in vain and _fills(state, *row, vain)), None)
        if moved is None:
            return
        movable.remove(moved)


def _in_turns(state: RoundState, host: HostState) -> Iterator[Resident]:
    """Return the jobs of a host that may go out of their turns: who waits for its GPUs, else who has them."""
    able = [resident for resident in state.residents(host) if resident.job.key not in state.who.packed]
    waiting = [resident for resident in able if resident.job.key not in state.who.holders and not _held(resident)]
    yield from waiting
    # On a real cluster it is mostly the holder that goes: a job that has yielded can save only from host memory.
    wanted = frozenset().union(*(resident.gpus for resident in waiting))
    for resident in able:
        stays = resident.job.key in state.who.holders and _held(resident)
        if stays and wanted.isdisjoint(resident.gpus) and sharers(host, resident) > 1:
            yield resident


def _held(resident: Resident) -> bool:
    return resident.job.lease is not None and resident.job.lease.state == "held"


def _need(state: RoundState, host: HostState, resident: Resident) -> tuple[int, int, float, JobKey]:
    """Return the sort key of those in turns: the higher priority, then the longer rounds, then the longer wait."""
    lease = resident.job.lease
    waited_s = lease.waited_s if lease is not None else 0.0
    return -state.settings.priority(resident.job), -sharers(host, resident), -waited_s, resident.job.key


def _fills(state: RoundState, host: HostState, resident: Resident, vain: set[object]) -> bool:
    """Move a waiting job to idle GPUs if that pays; a request that no host can meet is added to ``vain``."""
    met = sharers(host, resident)
    if not state.where.moves_left or state.left_s(resident.job) * (met - 1) <= state.gandiva.move_s:
        return False
    place = _idle_seat(state, host, resident.job, resident.request)
    if place is None:
        vain.add(_alike(host, resident))
        return False
    target, seat = place
    reason = f"moves from {resident.lane} to {seat.node.name}, whose GPUs are idle, out of turns with {met - 1} others"
    state.migrate(resident.job, target, seat, resident.request, reason)
    return True


def _alike(host: HostState, resident: Resident) -> object:
    """Return the common key of jobs that find idle GPUs on the same hosts."""
    return resident.request, host.lanes[0].gpu_type, id(resident.job.profile)


def _any_idle(state: RoundState) -> bool:
    return any(host.usable and host.idle() for host in state.where.hosts.values())


def _idle_seat(
    state: RoundState, source: HostState, job: Job, request: ResourceRequest
) -> tuple[HostState, Seat] | None:
    """Return idle GPUs for a job, of its class, of none or of any class, on the least loaded host."""
    rank = {request.gpus: 0, 0: 1}
    candidates = [
        ((rank.get(host.affinity, 2), host.load, host.name), host, seat)
        for host in state.where.hosts.values()
        if host.idle() >= request.gpus and (seat := state.seat(host, request)) is not None and seat.sharers == 0
        if state.suits(job, source, host)
    ]
    return min(candidates, key=lambda row: row[0])[1:] if candidates else None


def _separate(state: RoundState) -> None:
    """Move packed jobs to idle GPUs that no job in turns wants."""
    if not (state.who.packed and _any_idle(state)):
        return
    for host in tuple(state.where.hosts.values()):
        for resident in [resident for resident in state.residents(host) if resident.job.key in state.who.packed]:
            mates = [key for key in host.residents if state.who.packed.get(key) == state.who.packed[resident.job.key]]
            place = _idle_seat(state, host, resident.job, resident.request) if len(mates) > 1 else None
            if place is not None and state.left_s(resident.job) > PAYS_BACK * state.gandiva.move_s:
                target, seat = place
                reason = (
                    f"moves from {resident.lane} to {seat.node.name}, whose GPUs are idle, instead of sharing its GPUs"
                )
                state.migrate(resident.job, target, seat, resident.request, reason)


def _rejoin(state: RoundState) -> None:
    """Move a job of several hosts to one that can hold all of it on idle GPUs."""
    for key in sorted(state.jobs.ours):
        job = state.jobs.ours[key]
        split = len(job.nodes) > 1 and follows_size(job)
        if not split or key in state.who.packed or not state.may(job):
            continue
        request = ResourceRequest.under(replace(job, num_nodes=1), floor=state.settings.floor)
        source = state.where.home(job.key)
        place = _idle_seat(state, source, job, request) if source is not None else None
        if place is not None and state.left_s(job) * LOCALITY_GAIN > state.gandiva.move_s:
            target, seat = place
            reason = f"moves from {len(job.nodes)} hosts to {seat.node.name}, which has all its GPUs on one"
            state.migrate(job, target, seat, request, reason)


# --- Turns ---------------------------------------------------------------------------------------------


def _from_below_higher(state: RoundState) -> None:
    """Move jobs that wait behind higher priorities, which never make way, to where there are none."""
    priority = state.settings.priority
    if len({priority(job) for job in state.jobs.ours.values()}) < 2:  # noqa: PLR2004 - one priority has no higher one
        return
    for host in tuple(state.where.hosts.values()):
        for resident in list(_in_turns(state, host)):
            if priority(resident.job) >= _highest(state, host, resident.gpus):
                continue
            place = _fair_seat(state, host, resident)
            if place is not None:
                target, seat = place
                reason = f"moves from {resident.lane} to {seat.node.name}: higher priorities keep its GPUs"
                state.migrate(resident.job, target, seat, resident.request, reason)


def _highest(state: RoundState, host: HostState, gpus: Iterable[int]) -> float:
    """Return the highest priority on some of a host's GPUs."""
    wanted = frozenset(gpus)
    there = (resident.job for resident in host.residents.values() if resident.gpus & wanted)
    return max(map(state.settings.priority, there), default=float("-inf"))


def _fair_seat(state: RoundState, source: HostState, resident: Resident) -> tuple[HostState, Seat] | None:
    """Return the least crowded seat of its class where a job meets no higher priority."""
    mine = state.settings.priority(resident.job)
    candidates = [
        ((seat.sharers, host.load, host.name), host, seat)
        for host in state.where.hosts.values()
        if host is not source and host.affinity in (0, resident.request.gpus)
        for seat in [state.seat(host, resident.request)]
        if seat is not None and _highest(state, host, seat.gpus) <= mine and state.suits(resident.job, source, host)
    ]
    return min(candidates, key=lambda row: row[0])[1:] if candidates else None


def _even_out(state: RoundState) -> None:
    """Move jobs that take turns on the highest hosts of a class to its lowest ones while the height falls."""
    classes: dict[int, list[HostState]] = {}
    for host in state.where.hosts.values():
        if host.affinity:
            classes.setdefault(host.affinity, []).append(host)
    for size in sorted(classes):
        while state.where.moves_left and _lower(state, size, classes[size]):
            pass


def _lower(state: RoundState, size: int, hosts: list[HostState]) -> bool:
    """Move one job from the highest to the lowest host of a class; False when that lowers nothing."""
    low = min(hosts, key=lambda host: (host.pressure, host.name))
    high = max(hosts, key=lambda host: (host.pressure, host.name))
    if ceil(low.pressure + size / low.gpus) >= ceil(high.pressure):
        return False
    movable = [resident for resident in _in_turns(state, high) if resident.request.gpus == size]
    for resident in sorted(movable, key=lambda resident: (-sharers(high, resident), resident.job.key)):
        met, seat = sharers(high, resident), state.seat(low, resident.request)
        good = seat is not None and state.suits(resident.job, high, low)
        if seat is None or not good:
            continue
        then = seat.sharers + 1
        saved_s = state.left_s(resident.job) * (met - then)  # by shorter rounds
        if then < met and saved_s > PAYS_BACK * state.gandiva.move_s * then:
            reason = f"moves from {resident.lane} to {seat.node.name}: turns of {then} instead of {met}"
            state.migrate(resident.job, low, seat, resident.request, reason)
            return True
    return False
