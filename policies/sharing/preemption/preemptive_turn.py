"""One turn: by rank the jobs claim GPUs, where they sit, elsewhere, or where worse-ranked jobs make way (pure).

A job that has its GPUs keeps them unless a better one claims them, and a job that waits on its GPUs goes on there as
soon as they are unclaimed. A job that is blocked where it sits and keeps checkpoints moves to unclaimed GPUs elsewhere.
A job without GPUs gets unclaimed ones where it strands the fewest: a GPU is stranded if its job would have run in this
turn and loses another of its GPUs to the newcomer. If no seat is left, jobs of worse rank that can move give theirs up:
they save a checkpoint, are requeued, and come back by their rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from cadenza.policies.core.model import JobKey
from cadenza.policies.sharing.preemption.reservation import Reservation
from cadenza.policies.sharing.preemption.seat_map import HostSeats, Occupant, Seat
from cadenza.policies.sharing.state.host import ResourceRequest


class Candidate(NamedTuple):
    """A job that wants GPUs in this turn."""

    key: JobKey
    gpus: int
    """All its GPUs."""
    request: ResourceRequest
    """Its needs on each of its nodes."""
    seats: tuple[tuple[HostSeats, int], ...] = ()
    """Hosts and masks of the GPUs that it has or waits for; empty: it has no seat yet."""
    holding: bool = False
    """True if it uses its GPUs now."""
    movable: bool = False
    """True if it can save a checkpoint now, and leave or move without a loss."""
    steadfast: bool = False
    """True if it keeps no checkpoints: once it has GPUs it may have to stay there until its end."""
    ends_s: float = inf
    """Latest end by its time limit, if it starts now; on the clock of the round."""
    reserve: bool = False
    """True if GPUs are reserved for it where it finds none now."""
    barred: JobKey | None = None
    """A job of another user that has used its GPUs and is still there, so that no agent lets this one start."""


@dataclass(slots=True)
class Plan:
    """Result of a turn."""

    runs: list[JobKey] = field(default_factory=list)
    """Seated jobs that have their GPUs in this turn, in order of rank."""
    placed: dict[JobKey, tuple[Seat, ...]] = field(default_factory=dict)
    """Seats of jobs that had none; those that wait are promised."""
    moves: dict[JobKey, tuple[Seat, ...]] = field(default_factory=dict)
    evicted: dict[JobKey, JobKey] = field(default_factory=dict)
    """Jobs that give their seats up, with the job that gets them."""
    blocked: dict[JobKey, JobKey] = field(default_factory=dict)
    """Seated jobs that wait, with a job that has their GPUs."""
    emptied: dict[JobKey, JobKey] = field(default_factory=dict)
    """Jobs among ``moves`` that make room for a wider one, with that one."""


class _Offer(NamedTuple):
    """A seat with the price of it."""

    price: tuple[int, ...]
    seat: Seat
    victims: tuple[Occupant, ...] = ()


class Turn:
    """One turn in the making."""

    def __init__(
        self, hosts: Sequence[HostSeats], candidates: Iterable[Candidate], *, share_between_users: bool, places: bool
    ) -> None:
        self.hosts = hosts
        self.candidates = {candidate.key: candidate for candidate in candidates}
        """In order of rank."""
        self.rank = {key: number for number, key in enumerate(self.candidates)}
        self.share_between_users = share_between_users
        self.places = places
        self.plan = Plan()
        self._usable = [host for host in hosts if host.state.usable]
        self._left = sum(host.unclaimed.bit_count() for host in self._usable)
        """GPUs that no job has claimed."""
        self._owner: dict[tuple[int, int], JobKey] = {}
        """The job that has claimed a GPU, by host and bit."""
        self._vain: dict[tuple[object, ...], list[ResourceRequest]] = {}
        """Requests for which no seat was found, by kind: claims only grow, so there is none for a later one that needs
        as much or more."""
        self.lasting: dict[JobKey, float] = {}
        """Latest ends of the jobs that keep their GPUs until then."""
        self._reservation: Reservation | None = None

    # --- Claims ---------------------------------------------------------------------------------------

    def claim(self, key: JobKey, seats: Iterable[tuple[HostSeats, int]]) -> None:
        """Give a job GPUs for this turn."""
        for host, mask in seats:
            self._left -= (mask & ~host.claimed).bit_count() if host.state.usable else 0
            host.claimed |= mask
            for bit in _bits(mask):
                self._owner[host.position, bit] = key

    def run(self) -> Plan:
        """Return the plan for all candidates, in order of rank."""
        for candidate in self.candidates.values():
            if candidate.seats:
                self._seated(candidate)
            elif self.places:
                self._unseated(candidate)
        return self.plan

    def _seated(self, job: Candidate) -> None:
        plan = self.plan
        gave_up = job.key in plan.evicted
        if job.barred is not None:
            plan.blocked[job.key] = job.barred
            return
        if not gave_up and not any(host.claimed & mask for host, mask in job.seats):
            self.claim(job.key, job.seats)
            plan.runs.append(job.key)
            return
        if not gave_up:
            host, mask = next((host, host.claimed & mask) for host, mask in job.seats if host.claimed & mask)
            plan.blocked[job.key] = self._owner[host.position, next(_bits(mask))]
        if not job.movable or self._left < job.gpus or self._is_vain(job.request, "moves"):
            return
        seats = self.find(job, waits=False)
        if seats:
            plan.evicted.pop(job.key, None)
            plan.blocked.pop(job.key, None)
            self.move(job, seats)
        else:
            self._note_vain(job.request, "moves")

    def move(self, job: Candidate, seats: tuple[Seat, ...]) -> None:
        """Send a seated job to other GPUs."""
        for host, _ in job.seats:
            if job.key in host.occupants:
                host.vacate(job.key)
        self.plan.moves[job.key] = seats
        self._take(job, seats)

    def release(self, job: Candidate) -> None:
        """Take a running job's GPUs back, because it moves."""
        self.plan.runs.remove(job.key)
        for host, mask in job.seats:
            self._left += mask.bit_count() if host.state.usable else 0
            host.claimed &= ~mask

    def place(self, job: Candidate, seats: tuple[Seat, ...]) -> None:
        """Give a job that has no seat one, or promise it."""
        self.plan.placed[job.key] = seats
        if job.steadfast:
            self.lasting[job.key] = job.ends_s
        if job.steadfast and self._reservation is not None:
            self._reservation.use((seat.host.position for seat in seats), job.request.gpus, job.ends_s)
        self._take(job, seats)

    def _take(self, job: Candidate, seats: tuple[Seat, ...]) -> None:
        for seat in seats:
            seat.host.enter(Occupant(job.key, job.request.user, seat.mask, seat.lane, job.request))
        self.claim(job.key, [(seat.host, seat.mask) for seat in seats])

    def _unseated(self, job: Candidate) -> None:
        reserved = self._reservation
        outlasts = job.steadfast and reserved is not None and job.ends_s > reserved.at_s
        if self._left >= job.gpus and not self._is_vain(job.request, job.steadfast, outlasts):
            seats = self.find(job) or self._make_room(job)
            if seats:
                self.place(job, seats)
                return
            self._note_vain(job.request, job.steadfast, outlasts)
        if job.reserve:
            self._reservation = Reservation.of(self.hosts, job.request, self.lasting)

    def _is_vain(self, request: ResourceRequest, *how: object) -> bool:
        """Return True if no seat was found for a request of the same kind that needs no more than this one."""
        failed = self._vain.get(self._kind(request, how), ())
        return any(
            one.gpus <= request.gpus
            and one.cpus <= request.cpus
            and one.memory_mb <= request.memory_mb
            and one.state_mb <= request.state_mb
            for one in failed
        )

    def _note_vain(self, request: ResourceRequest, *how: object) -> None:
        self._vain.setdefault(self._kind(request, how), []).append(request)

    def _kind(self, request: ResourceRequest, how: tuple[object, ...]) -> tuple[object, ...]:
        user = "" if self.share_between_users else request.user
        return user, request.partition, request.nodes, request.gpu_type, request.barred, how

    # --- Seats ----------------------------------------------------------------------------------------

    def find(
        self, job: Candidate, *, waits: bool = True, idle: bool = False, without: HostSeats | None = None
    ) -> tuple[Seat, ...]:
        """Return the seats on unclaimed GPUs where a job strands the fewest, none if there are too few.

        ``waits`` False: only seats that are free now; ``idle``: only GPUs that no job that would run has;
        ``without``: a host that is left out.
        """
        offers = [
            offer
            for host in self._usable
            if host is not without and (host.every & ~host.claimed).bit_count() >= job.request.gpus
            for offer in self._offers(host, job)
            if (waits or not offer.seat.waits) and not (idle and offer.price[1])
        ]
        return tuple(offer.seat for offer in _cheapest(offers, job.request.nodes))

    def _offers(self, host: HostSeats, job: Candidate) -> Iterator[_Offer]:
        request = job.request
        for number, lane in enumerate(host.lanes):
            if not lane.admits(request):
                continue
            seat = host.seat(number, request)
            if seat is None or not self._may_share(seat, request) or not host.keeps(seat, job.key):
                continue
            stranded, displaced = self._stranded(seat)
            if job.steadfast and (displaced or self._is_reserved(host, job)):
                continue
            yield _Offer((stranded, displaced, seat.waits, host.unclaimed.bit_count(), number, host.position), seat)

    def _may_share(self, seat: Seat, request: ResourceRequest, gone: frozenset[JobKey] = frozenset()) -> bool:
        if self.share_between_users:
            return True
        return all(other.user == request.user or other.key in gone for other in seat.host.on(seat.mask))

    def _stranded(self, seat: Seat, gone: frozenset[JobKey] = frozenset()) -> tuple[int, int]:
        """Return the GPUs that jobs would lose without anyone taking them, and those that are taken from a job."""
        stranded = displaced = taken = 0
        rank = self.rank
        able = [o for o in seat.host.on(seat.mask) if o.key not in gone and self._able(o.key)]
        for occupant in sorted(able, key=lambda o: rank[o.key]):
            if occupant.mask & taken:
                continue  # a better one would have run there
            taken |= occupant.mask
            lost = (occupant.mask & seat.mask).bit_count()
            displaced += lost
            stranded += self.candidates[occupant.key].gpus - lost
        return stranded, displaced

    def _able(self, key: JobKey) -> bool:
        """Return True if a job would run where it sits, were this turn to end here."""
        candidate = self.candidates.get(key)
        return (
            candidate is not None
            and bool(candidate.seats)
            and candidate.barred is None
            and key not in self.plan.evicted
            and not any(host.claimed & mask for host, mask in candidate.seats)
        )

    # --- Seats that others give up --------------------------------------------------------------------

    def _make_room(self, job: Candidate) -> tuple[Seat, ...]:
        """Return seats that jobs of worse rank give up, none if there are too few."""
        offers = []
        for host in self._usable:
            if (host.every & ~host.claimed).bit_count() < job.request.gpus:
                continue
            able = self._able_to_leave(host, job)
            for number, lane in enumerate(host.lanes):
                offer = self._eviction(host, number, job, able) if lane.admits(job.request) else None
                if offer is not None:
                    offers.append(offer)
        chosen = _cheapest(offers, job.request.nodes)
        for offer in chosen:
            for victim in offer.victims:
                self.plan.evicted[victim.key] = job.key
                for host, _ in self.candidates[victim.key].seats:
                    if victim.key in host.occupants:
                        host.vacate(victim.key)
        return tuple(offer.seat for offer in chosen)

    def _able_to_leave(self, host: HostSeats, job: Candidate) -> list[Occupant]:
        """Return the jobs of worse rank on a host that have no GPUs in this turn and can leave, the worst first."""
        mine, rank = self.rank[job.key], self.rank
        able = [
            occupant
            for occupant in host.occupants.values()
            if rank.get(occupant.key, -1) > mine
            and (candidate := self.candidates[occupant.key]).movable
            and not any(at.claimed & mask for at, mask in candidate.seats)
        ]
        return sorted(able, key=lambda occupant: -rank[occupant.key])

    def _eviction(self, host: HostSeats, lane: int, job: Candidate, able: Sequence[Occupant]) -> _Offer | None:
        """Return the offer of a lane once some of its jobs have given their seats up: as few GPUs as possible."""
        victims: list[Occupant] = []
        seat = self.seat_without(host, lane, job, victims)
        if seat is None and (not able or host.seat(lane, job.request, given_up=tuple(able)) is None):
            return None  # none of these GPUs is claimed, so fewer jobs leave no seat either
        for occupant in able:
            if seat is not None:
                break
            victims.append(occupant)
            seat = self.seat_without(host, lane, job, victims)
        if seat is None:
            return None
        for occupant in victims[:]:
            fewer = [other for other in victims if other is not occupant]
            smaller = self.seat_without(host, lane, job, fewer)
            if smaller is not None:
                victims, seat = fewer, smaller
        gone = frozenset(victim.key for victim in victims)
        stranded, _ = self._stranded(seat, gone)
        lost = sum(self.candidates[victim.key].gpus for victim in victims)
        worst = min((self.rank[victim.key] for victim in victims), default=len(self.rank))
        return _Offer((stranded + lost, -worst, lane, host.position), seat, tuple(victims))

    def seat_without(self, host: HostSeats, lane: int, job: Candidate, gone: Sequence[Occupant]) -> Seat | None:
        """Return the seat of a job on a lane once some jobs have left the host."""
        seat = host.seat(lane, job.request, given_up=tuple(gone))
        if seat is None:
            return None
        keys = frozenset(other.key for other in gone)
        if not self._may_share(seat, job.request, keys):
            return None
        if job.steadfast and (self._stranded(seat, keys)[1] or self._is_reserved(host, job)):
            return None
        return seat

    def _is_reserved(self, host: HostSeats, job: Candidate) -> bool:
        """Return True if a job that stays until its end would delay the job that GPUs are reserved for."""
        reserved = self._reservation
        return reserved is not None and reserved.delayed(host.position, job.request.gpus, job.ends_s)


def _cheapest(offers: list[_Offer], nodes: int) -> list[_Offer]:
    """Return the cheapest offer of each of so many hosts, all in one lane; none if there are too few."""
    if nodes == 1:
        return [min(offers, key=lambda offer: offer.price)] if offers else []
    best: tuple[tuple[int, ...], list[_Offer]] | None = None
    for lane in sorted({offer.seat.lane for offer in offers}):
        chosen = sorted((offer for offer in offers if offer.seat.lane == lane), key=lambda offer: offer.price)[:nodes]
        price = (sum(offer.price[0] for offer in chosen), lane)
        if len(chosen) == nodes and (best is None or price < best[0]):
            best = price, chosen
    return best[1] if best is not None else []


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
