"""GPUs and lanes of each host as bit masks: who sits where, which GPUs are claimed, and which seats a job can have.

Slurm gives a job the lowest free GPUs of a lane, so a lane offers one seat to a request: that one. Jobs that are about
to leave have given their seats up; until they have left, a job that is promised such a seat waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from cadenza.policies.core.model import JobKey, Node
from cadenza.policies.sharing.state.host import HostState, ResourceRequest


class Occupant(NamedTuple):
    """A job on a host."""

    key: JobKey
    user: str
    mask: int
    """Its GPUs here."""
    lane: int
    """Position of its lane among those of the host."""
    request: ResourceRequest


class Seat(NamedTuple):
    """GPUs that a request can have on one lane of a host."""

    host: HostSeats
    lane: int
    mask: int
    waits: bool
    """True if jobs must leave before Slurm can start a job there."""

    @property
    def node(self) -> str:
        """Return the lane's name in Slurm."""
        return self.host.lanes[self.lane].node.name


@dataclass(slots=True)
class LaneSeats:
    """One lane: what its jobs leave free once those that leave are gone, and what these still have."""

    node: Node
    taken: int = 0
    free: tuple[int, int, int] = (0, 0, 0)
    """GPUs, CPUs and MB."""
    leaving: int = 0
    still_used: tuple[int, int, int] = (0, 0, 0)

    def admits(self, request: ResourceRequest) -> bool:
        """Return True if the lane is open for a request's partition, type of GPU and constraint."""
        node = self.node
        fits = request.partition in node.partitions and request.gpu_type in ("", node.gpu_type)
        return node.takes_jobs and fits and node.name not in request.barred


@dataclass(slots=True)
class HostSeats:
    """A host's lanes and occupants; ``claimed``: GPUs that a job of this turn has."""

    state: HostState
    lanes: list[LaneSeats]
    every: int
    """All GPUs."""
    position: int
    committed_mb: int
    """Host memory of all jobs, the GPU state that they may have to keep there included."""
    claimed: int = 0
    occupants: dict[JobKey, Occupant] = field(default_factory=dict)
    leaving_mb: int = 0
    """Host memory of jobs that are about to leave."""

    @classmethod
    def of(cls, state: HostState, position: int) -> HostSeats:
        """Return a host without occupants, its lanes as Slurm's books and this round's plans have them."""
        lanes = []
        for node in state.lanes:
            use = state.use[node.name]
            free = (node.gpus - use.gpus, node.cpus - use.cpus, node.memory_mb - use.memory_mb)
            lanes.append(LaneSeats(node, free=free))
        return cls(state, lanes, (1 << state.gpus) - 1, position, state.committed_mb)

    @property
    def unclaimed(self) -> int:
        """Return the mask of the GPUs that no job of this turn has."""
        return self.every & ~self.claimed

    def settle(self, occupant: Occupant) -> None:
        """Note a job that is there, or that comes there in this round, and whose share the books have."""
        self.occupants[occupant.key] = occupant
        self.lanes[occupant.lane].taken |= occupant.mask

    def enter(self, occupant: Occupant) -> None:
        """Book a seat for a job that comes."""
        self.settle(occupant)
        lane, request = self.lanes[occupant.lane], occupant.request
        lane.free = _less(lane.free, request)
        self.committed_mb += request.memory_mb + request.state_mb

    def vacate(self, key: JobKey) -> Occupant:
        """Give up the seat of a job that is about to leave: it has its GPUs until it is gone."""
        occupant = self.occupants.pop(key)
        lane, request = self.lanes[occupant.lane], occupant.request
        lane.taken &= ~occupant.mask
        lane.free = _more(lane.free, request)
        self.committed_mb -= request.memory_mb + request.state_mb
        self.stay_behind(occupant.lane, occupant.mask, request)
        return occupant

    def stay_behind(self, lane: int, mask: int, request: ResourceRequest) -> None:
        """Note what a job still has on a lane whose books have let it go already."""
        at = self.lanes[lane]
        at.leaving |= mask
        at.still_used = _more(at.still_used, request)
        self.leaving_mb += request.memory_mb + request.state_mb

    def on(self, mask: int) -> Iterator[Occupant]:
        """Yield the occupants of some GPUs."""
        return (occupant for occupant in self.occupants.values() if occupant.mask & mask)

    def seat(self, lane: int, request: ResourceRequest, *, given_up: tuple[Occupant, ...] = ()) -> Seat | None:
        """Return the seat that a lane offers to a request, on GPUs that are not claimed; None without one.

        ``given_up``: occupants whose seats count as free. A seat that is free now is preferred.
        """
        at = self.lanes[lane]
        taken, free, memory_mb = at.taken, at.free, 0
        for occupant in given_up:
            memory_mb += occupant.request.memory_mb + occupant.request.state_mb
            if occupant.lane == lane:
                taken &= ~occupant.mask
                free = _more(free, occupant.request)
        committed_mb = self.committed_mb - memory_mb + request.memory_mb + request.state_mb
        alone = len(self.occupants) == len(given_up)
        if not _fits(free, request) or not (alone or committed_mb <= self.state.memory_mb):
            return None
        if not given_up:
            mask = lowest(self.every & ~(taken | at.leaving), request.gpus)
            now = (free[0] - at.still_used[0], free[1] - at.still_used[1], free[2] - at.still_used[2])
            room = (alone and not self.leaving_mb) or committed_mb + self.leaving_mb <= self.state.memory_mb
            if mask and not mask & self.claimed and room and _fits(now, request):
                return Seat(self, lane, mask, waits=False)
        mask = lowest(self.every & ~taken, request.gpus)
        waits = bool(given_up or at.leaving or self.leaving_mb)
        return Seat(self, lane, mask, waits) if mask and waits and not mask & self.claimed else None

    def keeps(self, seat: Seat, key: JobKey) -> bool:
        """Return True if a job gets the GPUs of a seat also where it leaves GPUs of the same lane for it.

        Slurm has those back before it starts the job again: it would get the lowest of them, time and again.
        """
        own = self.occupants.get(key)
        if own is None or own.lane != seat.lane:
            return True
        at = self.lanes[seat.lane]
        return lowest(self.every & ~(at.taken & ~own.mask | at.leaving), seat.mask.bit_count()) == seat.mask


@lru_cache(maxsize=1 << 16)
def lowest(mask: int, count: int) -> int:
    """Return the lowest ``count`` bits that are set, 0 if there are fewer."""
    if mask.bit_count() < count:
        return 0
    found = 0
    for _ in range(count):
        bit = mask & -mask
        found |= bit
        mask ^= bit
    return found


def _fits(free: tuple[int, int, int], request: ResourceRequest) -> bool:
    return request.gpus <= free[0] and request.cpus <= free[1] and request.memory_mb <= free[2]


def _less(free: tuple[int, int, int], request: ResourceRequest) -> tuple[int, int, int]:
    return free[0] - request.gpus, free[1] - request.cpus, free[2] - request.memory_mb


def _more(free: tuple[int, int, int], request: ResourceRequest) -> tuple[int, int, int]:
    return free[0] + request.gpus, free[1] + request.cpus, free[2] + request.memory_mb
