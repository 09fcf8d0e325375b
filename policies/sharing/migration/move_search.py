"""Search of moves: the fewest migrations after which one host has all the GPUs that a waiting job needs.

The search deepens: plans of one move, of two and so on, first those in which only jobs of the emptied host move, then
those in which further jobs make way for them. So the first plan that it meets is one with the fewest moves. All jobs of
a plan leave before any of them arrives, as their requeues do. Each goes to GPUs that no job has or waits for.

The search ends on a count of evaluations, never on time. Beyond it, hosts are tried greedily: the largest jobs leave
first, each to the fullest host that has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from cadenza.policies.core.model import Job
from cadenza.policies.sharing.board.host import HostState, Resident, Seat
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.state.round_state import RoundState

MAX_EVALUATIONS = 1000
"""Seats and packings that the exact search looks at for one job."""
MAX_GREEDY_HOSTS = 8
"""Hosts that are tried beyond it."""


class Wish(NamedTuple):
    """A job and what it needs on one host; ``home``: it is there already and waits for the GPUs that it has there."""

    job: Job
    request: ResourceRequest
    home: HostState | None = None


class Mover(NamedTuple):
    """A job that may leave its host."""

    home: HostState
    resident: Resident

    @property
    def size(self) -> int:
        """Return its GPUs."""
        return self.resident.request.gpus


class Step(NamedTuple):
    """A job and where it goes."""

    mover: Mover
    target: HostState
    seat: Seat


class Plan(NamedTuple):
    """The host that gets room, the waiting job's GPUs there (None: those that it has), and who leaves for where."""

    host: HostState
    seat: Seat | None
    steps: tuple[Step, ...]


class _Spent(Exception):  # noqa: N818 - it ends a search and is no error
    """The evaluations are used up."""


def room(state: RoundState, wish: Wish, movers: Sequence[Mover], evaluations: int = MAX_EVALUATIONS) -> Plan | None:
    """Return the plan with the fewest moves, at most as many as the round has left; None when there is none.

    ``movers``: jobs that it may move. The hosts are as before afterwards. A wish that needs no move has no plan.
    """
    search = _Search(state, wish, movers, evaluations)
    if not search.enough_gpus():
        return None
    try:
        return search.plan()
    except _Spent:
        search.evaluations = None
        return search.greedy()


class _Search:
    """One search; between its methods the hosts are as the plan so far leaves them."""

    def __init__(self, state: RoundState, wish: Wish, movers: Sequence[Mover], evaluations: int) -> None:
        self.state = state
        self.wish = wish
        self.evaluations: int | None = evaluations
        """Evaluations that are left; None: no limit."""
        self.must = [mover for mover in movers if mover.home is wish.home and _overlap(mover.resident, wish)]
        self.movers = self._useful(movers)
        self.targets = sorted(self._targets(), key=lambda row: (row[0], row[1].name))

    def enough_gpus(self) -> bool:
        """Return False if there are fewer free GPUs than arrive: who makes way for them needs as many elsewhere."""
        _leave(self.must)
        hosts = [host for host in self.state.where.hosts.values() if host.usable]
        free = sum(min(host.idle(), max(host.gpus - host.gpus_allocated, 0)) for host in hosts)
        _return(self.must)
        return free >= (self.wish.request.gpus if self.wish.home is None else sum(mover.size for mover in self.must))

    def plan(self) -> Plan | None:
        """Return a plan with the fewest state."""
        for count in range(1, min(self.state.where.moves_left, len(self.movers)) + 1):
            for further in range(count):
                for least, host in self.targets:
                    plan = self._at(host, count - further, further) if least <= count - further else None
                    if plan is not None:
                        return plan
        return None

    def greedy(self) -> Plan | None:
        """Return a plan without looking back, for the hosts that need the fewest moves first."""
        most = self.state.where.moves_left
        plans = (self._at_once(host) for least, host in self.targets[:MAX_GREEDY_HOSTS] if least <= most)
        return next((plan for plan in plans if plan is not None), None)

    # --- Which host, and who leaves ---------------------------------------------------------------------

    def _useful(self, movers: Sequence[Mover]) -> Sequence[Mover]:
        """Return the movers without those that have all GPUs of a host where all hosts are alike.

        Such a job goes to a host that is empty by then; who would take its place can go there with a move less.
        """
        shapes = {
            tuple((node.gpus, node.cpus, node.memory_mb, node.gpu_type, node.partitions) for node in host.lanes)
            for host in self.state.where.hosts.values()
        }
        pinned = self.wish.home is None and self.wish.job.required_nodes
        if len(shapes) > 1 or pinned:
            return movers
        must = {mover.resident.job.key for mover in self.must}
        return [mover for mover in movers if mover.size < mover.home.gpus or mover.resident.job.key in must]

    def _targets(self) -> Iterator[tuple[int, HostState]]:
        """Return the hosts that may get room, and how many jobs must leave each at least."""
        if self.wish.home is not None:
            sharers_by_gpu = self.wish.home.sharers_by_gpu()
            mine = self.wish.home.residents[self.wish.job.key].gpus
            gone = [sum(index in mover.resident.gpus for mover in self.must) for index in range(len(sharers_by_gpu))]
            if self.must and all(sharers_by_gpu[index] - gone[index] <= 1 for index in mine):
                yield len(self.must), self.wish.home
            return
        for host in self.state.where.hosts.values():
            lacking = host.gpus_allocated + self.wish.request.gpus - host.gpus
            sizes = sorted((mover.size for mover in self.movers if mover.home is host), reverse=True)
            least = next((n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= lacking), None)
            if least is not None and sizes and host.usable and self.wish.request.gpus <= host.gpus:
                yield max(least, 1), host

    def _at(self, host: HostState, out: int, further: int) -> Plan | None:
        """Return a plan in which ``out`` jobs leave this host and ``further`` jobs others."""
        here = self._here(host)
        others = [
            mover for mover in self.movers if mover.resident.job.key not in {one.resident.job.key for one in here}
        ]
        for leaving in _choices(here, out):
            plan = self._without(leaving, host, lambda: _choices(others, further))
            if plan is not None:
                return plan
        return None

    def _at_once(self, host: HostState) -> Plan | None:
        """Return a plan in which the largest jobs leave this host, until there is room."""
        here = sorted(self._here(host), key=_largest)
        counts = range(len(here) if self.wish.home is not None else 1, min(len(here), self.state.where.moves_left) + 1)
        enough = next((count for count in counts if self._has_room(host, here[:count])), None)
        return None if enough is None else self._without(here[:enough], host, lambda: iter([[]]), tries=1)

    def _here(self, host: HostState) -> list[Mover]:
        """Return the jobs that may leave a host for the waiting job; if its GPUs are given, the holders of these."""
        return self.must if self.wish.home is not None else [mover for mover in self.movers if mover.home is host]

    def _has_room(self, host: HostState, leaving: Sequence[Mover]) -> bool:
        _leave(leaving)
        fits = self.wish.home is not None or self._welcome(host) is not None
        _return(leaving)
        return fits

    def _without(
        self, leaving: Sequence[Mover], host: HostState, groups: Callable[[], Iterable[list[Mover]]], tries: int = 0
    ) -> Plan | None:
        """Return a plan in which these leave, and one of the groups as well."""
        _leave(leaving)
        try:
            seat = None if self.wish.home is not None else self._welcome(host)
            if seat is None:
                return self._seat_all(leaving, host, groups, tries) if self.wish.home is not None else None
            host.enter(self.wish.job, self.wish.request, seat)
            try:
                plan = self._seat_all(leaving, host, groups, tries)
            finally:
                host.leave(host.residents[self.wish.job.key])
            return None if plan is None else plan._replace(seat=seat)
        finally:
            _return(leaving)

    def _seat_all(
        self, leaving: Sequence[Mover], host: HostState, groups: Callable[[], Iterable[list[Mover]]], tries: int
    ) -> Plan | None:
        """Return a plan now that there is room: a place for each that left, with one of the groups on its way too."""
        widest = max(leaving, key=lambda mover: mover.size)
        free = {name: host.gpus - host.gpus_allocated for name, host in self.state.where.hosts.items()}
        roomy = max(free.values()) >= widest.size
        for further in groups():
            if not (roomy or self._frees_a_host(widest, free, further)):
                continue
            _leave(further)
            try:
                steps = self._seated(sorted([*leaving, *further], key=_largest), (), tries)
            finally:
                _return(further)
            if steps is not None:
                return Plan(host, None, steps)
        return None

    def _frees_a_host(self, widest: Mover, free: Mapping[str, int], further: Sequence[Mover]) -> bool:
        """Return True if some host has the GPUs for a job once the others have left; ``free``: before they do."""
        left: dict[str, int] = {}
        for mover in further:
            left[mover.home.name] = left.get(mover.home.name, 0) + mover.size
        frees = any(free[name] + gpus >= widest.size for name, gpus in left.items())
        if not frees:
            self._spend()
        return frees

    def _welcome(self, host: HostState) -> Seat | None:
        """Return GPUs that no job has or waits for, for the waiting job."""
        self._spend()
        return free_seat(host, self.wish.job, self.wish.request)

    # --- Where they go ----------------------------------------------------------------------------------

    def _seated(self, movers: Sequence[Mover], steps: tuple[Step, ...], tries: int) -> tuple[Step, ...] | None:
        """Return a place for each, or None; ``tries``: how many places are tried for each, 0: all."""
        if len(steps) == len(movers):
            return steps
        mover = movers[len(steps)]
        for target, seat in islice(self._places(mover), tries or None):
            target.enter(mover.resident.job, mover.resident.request, seat)
            try:
                seated = self._seated(movers, (*steps, Step(mover, target, seat)), tries)
            finally:
                target.leave(target.residents[mover.resident.job.key])
            if seated is not None:
                return seated
        return None

    def _places(self, mover: Mover) -> list[tuple[HostState, Seat]]:
        """Return idle GPUs on other hosts, hosts of the job's class first, then the fullest."""
        self._spend()
        request = mover.resident.request
        candidates = []
        for host in self.state.where.hosts.values():
            if host is mover.home or host.gpus_allocated + request.gpus > host.gpus:
                continue
            self._spend()
            seat = self.state.seat(host, request)
            if seat is not None and seat.sharers == 0 and self.state.suits(mover.resident.job, mover.home, host):
                candidates.append(
                    ((host.affinity != request.gpus, host.gpus - host.gpus_allocated, host.name), host, seat)
                )
        return [(host, seat) for _, host, seat in sorted(candidates, key=lambda row: row[0])]

    def _spend(self) -> None:
        if self.evaluations is not None:
            self.evaluations -= 1
            if self.evaluations < 0:
                raise _Spent


def free_seat(host: HostState, job: Job, request: ResourceRequest) -> Seat | None:
    """Return GPUs of a host that no job has or waits for, on a lane where a job may start."""
    if host.gpus_allocated + request.gpus > host.gpus or not host.has_host_memory_for(request):
        return None
    named = job.required_nodes
    seats = (seat for seat in host.seats(request) if seat.sharers == 0 and (not named or seat.node.name in named))
    return next(seats, None)


def _overlap(resident: Resident, wish: Wish) -> bool:
    home = wish.home
    return (
        home is not None
        and resident.job.key != wish.job.key
        and bool(resident.gpus & home.residents[wish.job.key].gpus)
    )


def _largest(mover: Mover) -> tuple[object, ...]:
    return -mover.size, -mover.resident.request.memory_mb, mover.resident.job.key


def _leave(movers: Sequence[Mover]) -> None:
    for mover in movers:
        mover.home.leave(mover.resident)


def _return(movers: Sequence[Mover]) -> None:
    for mover in movers:
        mover.home.stay(mover.resident)


def _choices(movers: Sequence[Mover], count: int) -> Iterator[list[Mover]]:
    """Return the ways to choose so many; of jobs that are alike the first ones, so that no way is looked at twice."""
    kinds: dict[tuple[object, ...], list[Mover]] = {}
    for mover in movers if count else ():
        kinds.setdefault(_kind(mover), []).append(mover)
    return _of_kinds(list(kinds.values()), count)


def _of_kinds(kinds: Sequence[list[Mover]], count: int) -> Iterator[list[Mover]]:
    if count == 0:
        yield []
    elif kinds and sum(map(len, kinds)) >= count:
        for first in range(min(count, len(kinds[0])), -1, -1):
            for rest in _of_kinds(kinds[1:], count - first):
                yield kinds[0][:first] + rest


def _kind(mover: Mover) -> tuple[object, ...]:
    """Return the key that tells jobs apart; if several lanes are in use, it includes the GPUs."""
    home, resident = mover
    apart = resident.job.key if len({other.lane for other in home.residents.values()}) > 1 else None
    return home.name, resident.lane, resident.request, id(resident.job.profile), resident.job.required_nodes, apart
