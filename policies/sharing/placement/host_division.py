"""Division of a host's CPUs and memory among the jobs that have its GPUs now, by the allocation.

Synergy's allocations (OSDI'22, §4) know one job a GPU, so each host is a problem of its own with the jobs that hold
GPUs there at this moment; packed jobs count once and split their share, and a job of several hosts has its
proportional share of each. As long as a job waits on a host, no job has more memory than it asked for; CPUs are all the
holders'. Where Slurm's allocation is a floor, a job never has less memory than it has there, nor so few CPUs that it
were slower than with those; without a profile, or before its first iteration, it keeps its CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cadenza.policies.allocation.problem import Allocate, Case, Server, proportional_share, share_speed
from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.core.actions import Migrate, Resize, Tune, Unpack
from cadenza.policies.core.model import Gpu, Job, JobKey, Placement, Share
from cadenza.policies.core.profile import TOLERANCE, least_cpus
from cadenza.policies.sharing.board.board import Board
from cadenza.policies.sharing.board.host import HostState, Resident
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.placement.reservations import seated
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import SharingSettings

CPU_HEADROOM = 1.25
"""Factor on the CPUs of a job's profile: it keeps so many where Slurm's allocation is a floor. Profiles are measured on
nodes that do little else; with busy neighbors (second threads, caches, clock rates) a CPU does less. If that is not
enough, the measured speed undoes the loan (see ``cpu_loans``)."""


def divide_hosts(state: RoundState) -> None:
    """Give each job its CPUs and memory: tunes of running jobs, and the shares of moves and placements."""
    # 1. What every job should have where it is, or goes to.
    division = HostDivision.of(state)
    wanted = division.divide(state.where.hosts)
    # 2. Running jobs that stay are tuned.
    moving = frozenset(action.job for action in state.outcome.moves)
    staying = {key: placement for key, placement in wanted.items() if key not in moving}
    keeps = {key: state.outcome.reasons[key]["cpus"] for key in state.how_big.keeps_cpus}
    state.outcome.tunes = tunes(state.jobs.ours, staying, keeps)
    # 3. Moves and starts carry their shares.
    floor = state.settings.floor
    state.outcome.moves = [
        replace(a, shares=startable(wanted[a.job], state.where, a.job) if floor else wanted[a.job])
        if a.job in wanted and not isinstance(a, Unpack)
        else a
        for a in state.outcome.moves
    ]
    state.outcome.placements = tuple(
        replace(a, shares=wanted.get(a.job) or _needed(division.jobs[a.job], a.nodes, state.settings))
        for a in state.outcome.placements
    )


def keep_requests(state: RoundState) -> None:
    """Leave all jobs with the CPUs and memory that they asked for, or as much for each GPU where their size changes."""
    for number, action in enumerate(state.outcome.moves):
        job = state.jobs.ours[action.job]
        if isinstance(action, Migrate):
            kept = tuple(share._replace(cpus=0, memory_mb=0) for share in action.shares)
            state.outcome.moves[number] = replace(action, shares=kept)
        elif isinstance(action, Resize) and job.gpus:
            scaled = tuple(
                share._replace(
                    cpus=max(job.cpus * share.gpus // job.gpus, 1),
                    memory_mb=max(job.memory_mb * share.gpus // job.gpus, 1),
                )
                for share in action.shares
            )
            state.outcome.moves[number] = replace(action, shares=scaled)


@dataclass(frozen=True, slots=True)
class HostDivision:
    """One round's division of the hosts."""

    now_s: float
    allocate: Allocate
    jobs: Mapping[JobKey, Job]
    """Managed jobs, those about to start included."""
    holders: frozenset[JobKey]
    """Jobs that have GPUs once this round is done."""
    units: Mapping[JobKey, JobKey]
    """For a packed job the least key of its pack."""
    order: Mapping[JobKey, int]
    """Rank of each job; those without one come last, by key."""
    settings: SharingSettings = field(default_factory=SharingSettings)
    keeps: Collection[JobKey] = ()
    """Jobs that lend no CPUs."""
    wide: frozenset[JobKey] = frozenset()
    """Jobs on several hosts once this round is done."""

    @classmethod
    def of(cls, state: RoundState) -> HostDivision:
        """Return how the hosts are divided among the jobs that have GPUs once the moves so far are done."""
        starting = frozenset(action.job for action in state.outcome.placements)
        parts = Counter(key for host in state.where.hosts.values() for key in host.residents)
        return cls(
            state.now_s,
            state.how_big.allocate,
            {**state.jobs.ours, **{job.key: job for job in state.snapshot.jobs if job.key in starting}},
            holders=_holders(state),
            units=state.who.packed,
            order=state.ranks,
            settings=state.settings,
            keeps=state.how_big.keeps_cpus,
            wide=frozenset(key for key, count in parts.items() if count > 1),
        )

    def divide(self, hosts: Mapping[str, HostState]) -> dict[JobKey, Placement]:
        """Return the placement of every job that is on one host only."""
        division: dict[JobKey, Placement] = {}
        for host in hosts.values():
            division |= self.on(host)
        return division

    def on(self, host: HostState) -> dict[JobKey, Placement]:
        """Return the same for the jobs of one host; those whose share does not change may be left out."""
        there = [host.residents[key] for key in sorted(host.residents)]
        holding = [t for t in there if t.job.key in self.holders]
        wide = [t for t in holding if t.job.key in self.wide]
        division: dict[JobKey, Placement] = {
            t.job.key: (trimmed,) for t in there if (trimmed := self._too_much(t)) is not None
        }
        units = self._by_unit([t for t in holding if t not in wide and t.job.key in self.jobs])
        gpus = sum(unit[0].request.gpus for unit in units)
        server = self._rest(host, [*wide, *(t for t in holding if t.job.key not in self.jobs and t not in wide)], gpus)
        if not units or gpus > server.gpus:
            return division
        parts = self._floored(units, server) if self.settings.floor else self._parts(units, server)
        shared = len(holding) < len(there)
        own = {
            resident.job.key: (self._own(resident, part, shared=shared),)
            for unit in units
            for resident, part in zip(unit, _split(parts[unit[0].job.key], len(unit)), strict=True)
        }
        if self.settings.floor and sum(share.memory_mb for (share,) in own.values()) > server.memory_mb:
            own = {
                key: (share._replace(memory_mb=host.residents[key].request.memory_mb),) for key, (share,) in own.items()
            }
        return division | own

    def _rest(self, host: HostState, apart: Sequence[Resident], gpus: int) -> Server:
        """Return a host without what some jobs have: by Slurm's allocation where that is a floor, else their shares.

        ``gpus``: of the jobs that divide the rest; where that leaves little, only these count.
        """
        node = host.lanes[0]
        server = Server(node.name, node.gpus, node.cpus, host.memory_mb, node.gpu_type)
        shares = [proportional_share(server, resident.request.gpus) for resident in apart]
        booked = [Share(server.name, t.request.gpus, t.request.cpus, t.request.memory_mb) for t in apart]
        rest = _less(server, booked if self.settings.floor else shares)
        if min(rest.cpus, rest.memory_mb) >= rest.gpus:
            return rest
        return rest._replace(gpus=gpus) if min(rest.cpus, rest.memory_mb) >= gpus else _less(server, shares)

    def _parts(self, units: Sequence[Sequence[Resident]], server: Server) -> dict[JobKey, Share]:
        """Return the share that the allocation gives to each unit, by its first job."""
        cases = tuple(_as_one(unit, server) for unit in units)
        case = Case(self.now_s, (server,), cases, len(cases))
        plan = self.allocate(case)
        if len(plan.placements) < len(cases):  # it leaves jobs out, but theirs are the GPUs now
            plan = proportional(case)
        return {job.key: plan.placements[job.key][0] for job in cases}

    def _floored(self, units: Sequence[Sequence[Resident]], server: Server) -> dict[JobKey, Share]:
        """Return the same with no job slower than with what it asked for, as far as the server has that.

        Those that would be get what they need for it, and the others divide the rest.
        """
        kept: dict[JobKey, Share] = {}
        rest, left = server, list(units)
        while left:
            parts = self._parts(left, rest)
            floors = {unit[0].job.key: floor for unit in left if (floor := self._floor(unit, parts, rest)) is not None}
            if not floors:
                return kept | parts
            kept |= floors
            left = [unit for unit in left if unit[0].job.key not in floors]
            rest = _less(rest, floors.values())
            # Lanes together may have promised more CPUs than the host has: then the allocation's guarantee is all that
            # there is.
            if min(rest.cpus, rest.memory_mb) < sum(unit[0].request.gpus for unit in left):
                return self._parts(units, server)
        return kept

    def _floor(self, unit: Sequence[Resident], parts: Mapping[JobKey, Share], server: Server) -> Share | None:
        """Return the share that keeps a unit as fast as its request would, or None if its part does."""
        first = unit[0]
        part, profile = parts[first.job.key], first.job.profile
        asked = Share(
            server.name, first.request.gpus, sum(t.request.cpus for t in unit), sum(t.request.memory_mb for t in unit)
        )
        jobs = [resident.job for resident in unit]
        # Profiles are of iterations: they say nothing of what a job needs until its first one.
        starting = any(job.lease is None or not job.lease.step for job in jobs)  # no iteration since its start
        if profile is None or starting or any(job.key in self.keeps for job in jobs):
            return asked if part.cpus < asked.cpus else None
        wanted = share_speed(profile, asked, server.gpu_type)
        asked = asked._replace(cpus=least_cpus(profile.on(server.gpu_type), *asked[1:], headroom=CPU_HEADROOM))
        part = part._replace(memory_mb=max(part.memory_mb, asked.memory_mb))
        slower = part.cpus < asked.cpus or share_speed(profile, part, server.gpu_type) < wanted - TOLERANCE
        return asked if slower else None

    def _own(self, resident: Resident, share: Share, *, shared: bool) -> Share:
        """Return a job's share on its own lane; ``shared``: others on the host wait."""
        asked_mb = resident.request.memory_mb
        # A job that does not run keeps its memory: only CPUs are free while it waits.
        memory_mb = min(share.memory_mb, asked_mb) if shared else share.memory_mb
        if self.settings.floor:
            memory_mb = max(memory_mb, asked_mb)
        return Share(resident.lane, resident.request.gpus, share.cpus, memory_mb)

    def _too_much(self, resident: Resident) -> Share | None:
        """Return the smaller share of a waiting job that has more memory than it needs, else None."""
        key, had = resident.job.key, resident.job.placement
        if key in self.holders or key not in self.jobs:
            return None
        if len(had) != 1 or had[0][:2] != (resident.lane, resident.request.gpus):  # of several hosts, or it moves
            return None
        if had[0].memory_mb <= resident.request.memory_mb:
            return None
        return had[0]._replace(memory_mb=resident.request.memory_mb)

    def _by_unit(self, residents: Sequence[Resident]) -> list[list[Resident]]:
        """Return packed jobs together, in the order of the round."""
        last = len(self.order)
        units: dict[JobKey, list[Resident]] = {}
        for resident in sorted(residents, key=lambda t: (self.order.get(t.job.key, last), t.job.submit_s, t.job.key)):
            key = resident.job.key
            units.setdefault(self.units.get(key, key), []).append(resident)
        return list(units.values())


def _less(server: Server, taken: Collection[Share]) -> Server:
    return server._replace(
        gpus=server.gpus - sum(share.gpus for share in taken),
        cpus=server.cpus - sum(share.cpus for share in taken),
        memory_mb=server.memory_mb - sum(share.memory_mb for share in taken),
    )


def _as_one(unit: Sequence[Resident], server: Server) -> Job:
    """Return a unit as a job of the server, with what all its members have."""
    had = [share for resident in unit for share in resident.job.placement]
    first = unit[0]
    whole = Share(server.name, first.request.gpus, sum(s.cpus for s in had), sum(s.memory_mb for s in had))
    return replace(first.job, gpus=first.request.gpus, num_nodes=1, placement=(whole,) if had else ())


def _split(share: Share, parts: int) -> list[Share]:
    """Return a share in equal parts, the first ones with what is left over; each has all its GPUs."""
    return [
        share._replace(
            cpus=max(share.cpus * (i + 1) // parts - share.cpus * i // parts, 1),
            memory_mb=share.memory_mb // parts,
        )
        for i in reversed(range(parts))
    ]


def tunes(
    jobs: Mapping[JobKey, Job], wanted: Mapping[JobKey, Placement], keeps: Mapping[JobKey, str]
) -> tuple[Tune, ...]:
    """Return a tune for every running job that is to have something else than it has, in order of keys.

    ``keeps``: why a job does not lend any more.
    """
    return tuple(
        Tune(
            key,
            wanted[key],
            keeps.get(key) or _reason(wanted[key][0], jobs[key].placement[0]),
            caches_mb(jobs[key], wanted[key]),
        )
        for key in sorted(wanted)
        if key in jobs and jobs[key].placement and jobs[key].placement != wanted[key]
    )


def caches_mb(job: Job, wanted: Placement) -> tuple[int | None, ...]:
    """Return the cache size in each share of a job; empty if it has no more memory than it asked for."""
    # Who wrote the script chose its caches for the memory that the job asked for, so only more memory changes them.
    asked_mb = -(-job.memory_mb // max(job.num_nodes, 1))
    if job.profile is None or all(share.memory_mb <= asked_mb for share in wanted):
        return ()
    return tuple(
        job.profile.cache_mb(share.gpus, share.memory_mb) if share.memory_mb > asked_mb else None for share in wanted
    )


def _reason(wanted: Share, had: Share) -> str:
    return (
        f"its host is shared out among those that have GPUs: {wanted.cpus} CPUs and {wanted.memory_mb} MB "
        f"instead of {had.cpus} and {had.memory_mb}"
    )


def _holders(state: RoundState) -> frozenset[JobKey]:
    """Return the jobs that have GPUs once this round is done: by the turns, and those that come to free GPUs."""
    staying = state.who.holders - {action.job for action in state.outcome.moves}
    taken = {
        Gpu(host.name, index)
        for host in state.where.hosts.values()
        for key, resident in host.residents.items()
        if key in staying
        for index in resident.gpus
    }
    holders = set(staying)
    # Agents give free GPUs to the first who comes: jobs that are placed start before jobs that move.
    coming = tuple(dict.fromkeys(action.job for action in (*state.outcome.placements, *state.outcome.moves)))
    seats = seated(state.where.hosts, coming)
    for key in coming:
        gpus = seats.get(key)
        if gpus and gpus.isdisjoint(taken):
            holders.add(key)
            taken |= gpus
    return frozenset(holders)


def startable(wanted: Placement, board: Board, key: JobKey) -> Placement:
    """Return the share with which Slurm can start a job if its allocation is a floor: at most its lane's free part.

    What others lend of theirs comes in place once it runs.
    """
    host = board.home(key)
    if host is None or len(wanted) != 1:
        return wanted
    lane, request = host.residents[key].lane, host.residents[key].request
    node, use = next(node for node in host.lanes if node.name == lane), host.use[lane]
    cpus, memory_mb = (
        max(node.cpus - use.cpus, 0) + request.cpus,
        max(node.memory_mb - use.memory_mb, 0) + request.memory_mb,
    )
    share = wanted[0]
    return (share._replace(cpus=min(share.cpus, cpus), memory_mb=min(share.memory_mb, memory_mb)),)


def _needed(job: Job, nodes: Sequence[str], settings: SharingSettings) -> Placement:
    request = ResourceRequest.under(job, floor=settings.floor)
    return tuple(Share(node, request.gpus, request.cpus, request.memory_mb) for node in sorted(nodes))
