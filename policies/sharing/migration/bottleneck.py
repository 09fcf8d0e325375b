"""Bottleneck moves: a job that its host's CPUs or memory hold back moves to a host where it is faster, if that pays.

Tunes give a job the resources of its own host (Synergy, OSDI'22, §4); those of another host reach it only by a
migration. Both hosts are divided as they are and as they would be. The job must be faster there, no job may fall below
its promise, and the gain of all until the job ends, or within the horizon, must exceed the cost of the move by the
margin of the other moves. Only jobs with a profile move, on their own type of GPU, to GPUs that no job has or waits
for, on a host of their class or an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from cadenza.policies.allocation.problem import Server, proportional_share, share_speed
from cadenza.policies.core.model import JobKey, Placement, Share
from cadenza.policies.core.profile import MB_PER_GB, TOLERANCE
from cadenza.policies.sharing.board.host import HostState, Resident, Seat
from cadenza.policies.sharing.migration.rebalance import PAYS_BACK
from cadenza.policies.sharing.placement.host_division import HostDivision
from cadenza.policies.sharing.state.round_state import RoundState, sharers

MIN_SPEED_LACKING = 0.05
"""A job that lacks less than this part of its best speed is not worth a look."""
MAX_MOVES_TRIED = 32
"""Most moves that a round looks at: a count and never a time, so that a replay finds the same."""
MAX_HOSTS_TRIED = 3
"""Hosts that are tried for one job, those with the most CPUs left for it first."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Predicted speeds of the jobs of two hosts."""

    speeds: Mapping[JobKey, float]

    @property
    def total(self) -> float:
        return sum(self.speeds.values())


def relieve_bottlenecks(state: RoundState) -> None:
    """Move jobs that their host's CPUs or memory hold back, if nothing else moves and no job waits to be placed."""
    if state.slurm.to_place or state.slurm.queued or state.outcome.moves:
        return
    if not any(host.usable and host.idle() for host in state.where.hosts.values()):
        return
    division = HostDivision.of(state)
    tries, changed = MAX_MOVES_TRIED, set[str]()
    for source, resident in sorted(_held_back(state), key=lambda row: (-_lacks(*row), row[1].job.key)):
        seats = [row for row in _seats(state, source, resident) if changed.isdisjoint((source.name, row[0].name))]
        for target, seat in seats[: min(MAX_HOSTS_TRIED, tries)] if state.may(resident.job) else ():
            tries -= 1
            if _relieves(division, state, (source, resident), (target, seat)):
                reason = f"moves from {resident.lane} to {seat.node.name}, which has the CPUs or memory that it lacks"
                state.migrate(resident.job, target, seat, resident.request, reason)
                changed |= {source.name, target.name}  # what was promised on these holds for this round
                break


def _held_back(state: RoundState) -> Iterator[tuple[HostState, Resident]]:
    """Return the jobs that have their GPUs to themselves and are slower than they could be."""
    for host in state.where.hosts.values():
        for resident in state.residents(host):
            key = resident.job.key
            alone = key in state.who.holders and key not in state.who.packed and sharers(host, resident) == 1
            if alone and _lacks(host, resident) > MIN_SPEED_LACKING:
                yield host, resident


def _lacks(host: HostState, resident: Resident) -> float:
    """Return the part of its best speed that a job does not have now; 0 where that is not known."""
    profile, had = resident.job.profile, resident.job.placement
    if profile is None or len(had) != 1:
        return 0.0
    there = profile.on(host.lanes[0].gpu_type)
    _, gpus, cpus, memory_mb = had[0]
    return 1.0 - there.speed(cpus / gpus, memory_mb / gpus / MB_PER_GB) / there.best_speed


def _seats(state: RoundState, source: HostState, resident: Resident) -> list[tuple[HostState, Seat]]:
    """Return free GPUs of the job's type on hosts of its class or empty ones, most CPUs for each GPU in use first."""
    candidates = [
        (-target.lanes[0].cpus / (target.gpus_allocated + resident.request.gpus), target.name, target, seat)
        for target in state.where.hosts.values()
        if target is not source
        and target.lanes[0].gpu_type == source.lanes[0].gpu_type
        and target.affinity in (0, resident.request.gpus)
        and _stays(state, source, -resident.request.gpus)
        and _stays(state, target, resident.request.gpus)
        and (seat := state.seat(target, resident.request)) is not None
        and seat.sharers == 0
    ]
    return [(target, seat) for *_, target, seat in sorted(candidates, key=lambda row: row[:2])]


def _stays(state: RoundState, host: HostState, more: int) -> bool:
    """Return True if defragmentation leaves a host as it is with so many more GPUs in use: else it undoes the move."""
    gpus_allocated = host.gpus_allocated + more
    return not (
        state.gandiva.defrag and gpus_allocated and host.gpus - gpus_allocated >= state.gandiva.free_share * host.gpus
    )


def _relieves(
    division: HostDivision, state: RoundState, source: tuple[HostState, Resident], target: tuple[HostState, Seat]
) -> bool:
    """Return True if a move makes its job faster, no job slower than promised, and gains more than it costs."""
    (home, resident), (there, _) = source, target
    key = resident.job.key
    floors = _floors(division, home) | _floors(division, there)
    before, after = _as_it_is(division, home, there), _as_moved(division, source, target)
    if after.speeds.get(key, 0.0) <= before.speeds.get(key, inf):
        return False
    kept = all(
        after.speeds.get(other, 0.0) >= min(speed, floors[other]) - TOLERANCE for other, speed in before.speeds.items()
    )
    ahead_s = min(state.left_s(resident.job) / after.speeds[key], state.gandiva.horizon_s)
    cost = state.gandiva.move_s * before.speeds[key]
    return kept and (after.total - before.total) * ahead_s > PAYS_BACK * cost


def _as_it_is(division: HostDivision, *hosts: HostState) -> _Outlook:
    return _Outlook({key: speed for host in hosts for key, speed in _speeds(division, host).items()})


def _as_moved(division: HostDivision, source: tuple[HostState, Resident], target: tuple[HostState, Seat]) -> _Outlook:
    """Return the outlook with the job at its new place; the hosts are as before afterwards."""
    (home, resident), (there, seat) = source, target
    home.leave(resident)
    there.enter(resident.job, resident.request, seat)
    try:
        return _as_it_is(division, home, there)
    finally:
        there.leave(there.residents[resident.job.key])
        home.stay(resident)


def _speeds(division: HostDivision, host: HostState) -> dict[JobKey, float]:
    """Return the predicted speed of each job that holds GPUs of a host alone of all hosts, once it is divided."""
    wanted = division.on(host)
    return {
        key: share_speed(resident.job.profile, _share(wanted, resident), host.lanes[0].gpu_type)
        for key, resident in host.residents.items()
        if key in division.holders and key in division.jobs and len(resident.job.nodes) == 1
    }


def _share(wanted: Mapping[JobKey, Placement], resident: Resident) -> Share:
    """Return the share of a job: its part of the division, else its need, as on a host that is too full."""
    parts = wanted.get(resident.job.key)
    return (
        parts[0]
        if parts
        else Share(resident.lane, resident.request.gpus, resident.request.cpus, resident.request.memory_mb)
    )


def _floors(division: HostDivision, host: HostState) -> dict[JobKey, float]:
    """Return the speed promised to each job of a host: that of its request, or of its proportional share."""
    node = host.lanes[0]
    server = Server(node.name, host.gpus, node.cpus, host.memory_mb, node.gpu_type)
    speeds = {}
    for key, resident in host.residents.items():
        asked = Share(node.name, resident.request.gpus, resident.request.cpus, resident.request.memory_mb)
        promised = asked if division.settings.floor else proportional_share(server, resident.request.gpus)
        speeds[key] = share_speed(resident.job.profile, promised, node.gpu_type)
    return speeds
