"""Relief: a job that its host's CPUs or memory hold back moves to a host where it is faster, if that pays for the move.

Tunes give a job what its own host has (Synergy, OSDI'22, §4); what another host has reaches it only by a migration.
Both hosts are divided as they are and as they would be. The job must be faster there, nobody may fall below what it
is promised, and what all of them gain until the job ends, or within the horizon, must exceed the cost of the move by
the margin of the other state. Only jobs with a profile move, on their own type of GPU, to GPUs that nobody has or
waits for, on a host of their class or an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from cadenza.policies.allocation.problem import Server, proportional_share, share_speed
from cadenza.policies.core.model import JobKey, Placement, Share
from cadenza.policies.core.profile import MB_PER_GB, NEARLY
from cadenza.policies.sharing.migration.rebalance import PAYS_BACK
from cadenza.policies.sharing.placement.host_division import HostDivision
from cadenza.policies.sharing.state.host import HostBook, Seat, Tenant
from cadenza.policies.sharing.state.sharing_state import SharingState, crowd

SLOWER = 0.05
"""A job that lacks less than this part of its best speed is not worth a look."""
TRIES = 32
"""Most moves that a round looks at: a count and never a time, so that a replay finds the same."""
HOSTS = 3
"""Hosts that are tried for one job, those with the most CPUs left for it first."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Predicted speeds of the jobs of two hosts."""

    speeds: Mapping[JobKey, float]

    @property
    def total(self) -> float:
        return sum(self.speeds.values())


def relieve_bottlenecks(state: SharingState) -> None:
    """Move jobs that their host's CPUs or memory hold back, if nothing else moves and no job waits to be placed."""
    if state.pending or state.queued or state.moves:
        return
    if not any(host.usable and host.idle() for host in state.hosts.values()):
        return
    division = HostDivision.of(state)
    tries, changed = TRIES, set[str]()
    for source, tenant in sorted(_held_back(state), key=_need):
        seats = [row for row in _seats(state, source, tenant) if changed.isdisjoint((source.name, row[0].name))]
        for target, seat in seats[: min(HOSTS, tries)] if state.may(tenant.job) else ():
            tries -= 1
            if _relieves(division, state, (source, tenant), (target, seat)):
                why = f"moves from {tenant.lane} to {seat.node.name}, which has the CPUs or memory that it lacks"
                state.migrate(tenant.job, target, seat, tenant.ask, why)
                changed |= {source.name, target.name}  # what was promised on these holds for this round
                break


def _held_back(state: SharingState) -> Iterator[tuple[HostBook, Tenant]]:
    """Return the jobs that have their GPUs to themselves and are slower than they could be."""
    for host in state.hosts.values():
        for tenant in state.tenants(host):
            key = tenant.job.key
            alone = key in state.holders and key not in state.packed and crowd(host, tenant) == 1
            if alone and _lacks(host, tenant) > SLOWER:
                yield host, tenant


def _lacks(host: HostBook, tenant: Tenant) -> float:
    """Return the part of its best speed that a job does not have now; 0 where that is not known."""
    profile, had = tenant.job.profile, tenant.job.placement
    if profile is None or len(had) != 1:
        return 0.0
    there = profile.on(host.lanes[0].gpu_type)
    return 1.0 - there.speed(had[0].cpus / had[0].gpus, _memory_gb(had[0])) / there.best_speed


def _memory_gb(share: Share) -> float:
    return share.memory_mb / share.gpus / MB_PER_GB


def _need(row: tuple[HostBook, Tenant]) -> tuple[float, JobKey]:
    return -_lacks(*row), row[1].job.key


def _seats(state: SharingState, source: HostBook, tenant: Tenant) -> list[tuple[HostBook, Seat]]:
    """Return free GPUs of the job's type on hosts of its class or empty ones, most CPUs for each GPU in use first."""
    found = [
        (-target.lanes[0].cpus / (target.given + tenant.ask.gpus), target.name, target, seat)
        for target in state.hosts.values()
        if target is not source
        and target.lanes[0].gpu_type == source.lanes[0].gpu_type
        and target.affinity in (0, tenant.ask.gpus)
        and _stays(state, source, -tenant.ask.gpus)
        and _stays(state, target, tenant.ask.gpus)
        and (seat := state.seat(target, tenant.ask)) is not None
        and seat.crowd == 0
    ]
    return [(target, seat) for *_, target, seat in sorted(found, key=lambda row: row[:2])]


def _stays(state: SharingState, host: HostBook, more: int) -> bool:
    """Whether defragmentation leaves a host as it is with so many more GPUs given out: else it undoes the relief."""
    given = host.given + more
    return not (state.gandiva.defrag and given and host.gpus - given >= state.gandiva.free_share * host.gpus)


def _relieves(
    division: HostDivision, state: SharingState, source: tuple[HostBook, Tenant], target: tuple[HostBook, Seat]
) -> bool:
    """Whether a move makes its job faster, nobody slower than promised, and gains more than it costs."""
    (home, tenant), (there, _) = source, target
    key = tenant.job.key
    floors = _floors(division, home) | _floors(division, there)
    before, after = _as_it_is(division, home, there), _as_moved(division, source, target)
    if after.speeds.get(key, 0.0) <= before.speeds.get(key, inf):
        return False
    kept = all(
        after.speeds.get(other, 0.0) >= min(speed, floors[other]) - NEARLY for other, speed in before.speeds.items()
    )
    ahead_s = min(state.left_s(tenant.job) / after.speeds[key], state.gandiva.horizon_s)
    cost = state.gandiva.move_s * before.speeds[key]
    return kept and (after.total - before.total) * ahead_s > PAYS_BACK * cost


def _as_it_is(division: HostDivision, *hosts: HostBook) -> _Outlook:
    return _Outlook({key: speed for host in hosts for key, speed in _speeds(division, host).items()})


def _as_moved(division: HostDivision, source: tuple[HostBook, Tenant], target: tuple[HostBook, Seat]) -> _Outlook:
    """Return the outlook with the job at its new place; the books are as before afterwards."""
    (home, tenant), (there, seat) = source, target
    home.leave(tenant)
    there.enter(tenant.job, tenant.ask, seat)
    try:
        return _as_it_is(division, home, there)
    finally:
        there.leave(there.tenants[tenant.job.key])
        home.stay(tenant)


def _speeds(division: HostDivision, host: HostBook) -> dict[JobKey, float]:
    """Return the predicted speed of each job that holds GPUs of a host alone of all hosts, once it is divided."""
    wanted = division.on(host)
    return {
        key: share_speed(tenant.job.profile, _share(wanted, tenant), host.lanes[0].gpu_type)
        for key, tenant in host.tenants.items()
        if key in division.holders and key in division.jobs and len(tenant.job.nodes) == 1
    }


def _share(wanted: Mapping[JobKey, Placement], tenant: Tenant) -> Share:
    """Return what a job is to have: its part of the division, else what it needs, as on a host that is too full."""
    parts = wanted.get(tenant.job.key)
    return parts[0] if parts else Share(tenant.lane, tenant.ask.gpus, tenant.ask.cpus, tenant.ask.memory_mb)


def _floors(division: HostDivision, host: HostBook) -> dict[JobKey, float]:
    """Return what each job of a host is promised: the speed with what it asked for, or of its proportional share."""
    node = host.lanes[0]
    server = Server(node.name, host.gpus, node.cpus, host.memory_mb, node.gpu_type)
    found = {}
    for key, tenant in host.tenants.items():
        asked = Share(node.name, tenant.ask.gpus, tenant.ask.cpus, tenant.ask.memory_mb)
        promised = asked if division.settings.floor else proportional_share(server, tenant.ask.gpus)
        found[key] = share_speed(tenant.job.profile, promised, node.gpu_type)
    return found
