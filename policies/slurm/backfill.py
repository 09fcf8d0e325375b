"""Slurm's backfill: the earliest start of a pending job among running jobs and reservations.

Sources: slurm.conf, ``SchedulerParameters``; Slurm 25.11, ``_attempt_backfill`` in sched/backfill and
``_future_run_test`` in select/cons_tres. ``benchmarks/replay/calibration.py`` compares with a real slurmctld.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeAlias

from cadenza.policies.core.amounts import Amount

Shares: TypeAlias = tuple[tuple[int, Amount], ...]
"""Positions of nodes, and what a job has there."""


@dataclass(frozen=True, slots=True)
class Backfill:
    """Scheduling parameters of a Slurm; the defaults are its own. Times in seconds."""

    interval_s: float = 30.0
    """``bf_interval``: time between two passes."""
    window_s: float = 86_400.0
    """``bf_window``: a job that could only start later than this gets no reservation."""
    max_jobs: int = 500
    """``bf_max_job_test``: jobs in order of priority that a pass looks at."""
    precision_s: float = 0.0
    """``bf_window_linear``: growth of the time over which running jobs count as ending at once; 0: it doubles."""
    batch_delay_s: float = 3.0
    """``batch_sched_delay``: least time between two looks at the queue for submissions."""
    full_interval_s: float = 60.0
    """``sched_interval``: time between two looks at the queue without an event."""
    reservations: int | None = None
    """Jobs that get a reservation in a pass; None: all that it looks at."""


SLURM = Backfill()
EASY = Backfill(window_s=inf, max_jobs=10**9, reservations=1)
"""One reservation, for the first job that does not fit, and no bound on what is looked at (Lifka, JSSPP'95)."""
STRICT = Backfill(max_jobs=0)
"""The main scheduler alone: no job passes another one of its partition."""
FIRST_WINDOW_S = 30.0
"""Jobs that end, by their limits, within so long are taken as ending at once (cons_tres, ``time_window``)."""
LAST_WINDOW_S = 365 * 86_400.0


class Request(Protocol):
    """A pending job as backfill sees it."""

    @property
    def each(self) -> tuple[Amount, ...]:
        """Return its request on each of its nodes, the largest first."""
        ...

    @property
    def pins(self) -> Shares:
        """Return shares at the nodes that it has to have; empty: any nodes of ``among``."""
        ...

    @property
    def among(self) -> int:
        """Return the nodes that it may have, as bits."""
        ...

    @property
    def limit_s(self) -> float:
        """Return its time limit in seconds."""
        ...


Ended: TypeAlias = tuple[float, Shares, int]
"""Place of a running job in the order of the ends: its end, its shares, and a number that no other one has."""
_NOW: Ended = (-inf, (), 0)
MOST_KEPT = 256
"""Sets of nodes that are kept for one request, at most about."""
MOST_NEEDS = 64
"""Requests for which they are kept as jobs start and leave."""


class Future:
    """Resources that become free as running jobs end by their limits; answers are kept as jobs start and leave."""

    def __init__(
        self, now_s: float, free: Sequence[Sequence[int]], running: Iterable[tuple[float, Shares]], lanes: Sequence[int]
    ) -> None:
        self.now_s = now_s
        self._free = [(gpus, cpus, memory_mb) for gpus, cpus, memory_mb in free]
        self._most: int | None = None
        """The most GPUs that are free on a node, once someone has asked."""
        self._lanes = lanes
        self._order = sorted((max(end_s, now_s + 1), shares, number) for number, (end_s, shares) in enumerate(running))
        self._count = len(self._order)
        self.ends_s = [end_s for end_s, _, _ in self._order]
        self.nodes = [
            1 << shares[0][0] if len(shares) == 1 else bits_of(at for at, _ in shares) for _, shares, _ in self._order
        ]
        """By job in the order of their ends: its nodes, as bits."""
        self._there: dict[int, list[tuple[Ended, Amount]]] = {}
        """By node: the jobs there in the order of their ends, and what they have."""
        for ended in self._order:
            for at, amount in ended[1]:
                self._there.setdefault(at, []).append((ended, amount))
        self._base: Future | None = None
        """The one that this is a copy of, which changes no more."""
        self._changed: list[int] = []
        """Nodes that have had another room since, one after the other."""
        self._steps: dict[Amount, _Steps] = {}
        self._within: dict[int, tuple[list[int], list[float]]] = {}
        """By the nodes that a job may have: the positions of the jobs there, and their ends."""
        self._on: dict[int, tuple[list[int], list[float]]] = {}
        """The same by some of them."""

    def reaches(self, now_s: float) -> bool:
        """Go on to a later time, and return True; False where a job has come to its limit, so that its end is new."""
        if self.ends_s and self.ends_s[0] < now_s + 1:
            return False
        self.now_s = now_s
        return True

    def copy(self) -> Future:
        """Return another one that jobs start and leave in; they do so in this one no more."""
        other = Future(self.now_s, (), (), self._lanes)
        other._count, other._most = self._count, self._most
        other._base, other._free, other._order = self, self._free[:], self._order[:]
        other.ends_s, other.nodes, other._there = self.ends_s[:], self.nodes[:], self._there.copy()
        other._within = self._within.copy()
        return other

    def start(self, end_s: float, shares: Shares) -> None:
        """Give a job that starts now what it has until its end."""
        ended = (max(end_s, self.now_s + 1), shares, self._count)
        self._count += 1
        place = bisect_left(self._order, ended)
        self._order.insert(place, ended)
        self.ends_s.insert(place, ended[0])
        nodes = bits_of(at for at, _ in shares)
        self.nodes.insert(place, nodes)
        for among, (positions, ends_s) in self._within.items():
            at = bisect_left(positions, place)
            here = [(place, ended[0])] if nodes & among else []
            self._within[among] = (
                [*positions[:at], *(own for own, _ in here), *(own + 1 for own in positions[at:])],
                [*ends_s[:at], *(end for _, end in here), *ends_s[at:]],
            )
        for at, amount in shares:
            self._there[at] = sorted([*self._there.get(at, ()), (ended, amount)])
            self._more(at, amount, -1)
        self._refit(shares)

    def leave(self, end_s: float, shares: Shares) -> None:
        """Take a running job away now."""
        place = bisect_left(self._order, (max(end_s, self.now_s + 1), shares, -1))
        ended = self._order.pop(place)
        del self.ends_s[place], self.nodes[place]
        for among, (positions, ends_s) in self._within.items():
            at = bisect_left(positions, place)
            gone = at + (at < len(positions) and positions[at] == place)
            self._within[among] = [*positions[:at], *(own - 1 for own in positions[gone:])], ends_s[:at] + ends_s[gone:]
        for at, amount in shares:
            self._there[at] = [one for one in self._there[at] if one[0] != ended]
            self._more(at, amount, 1)
        self._refit(shares)

    def _more(self, at: int, amount: Amount, sign: int) -> None:
        gpus, cpus, memory_mb = self._free[at]
        self._most = None
        self._free[at] = gpus + sign * amount[0], cpus + sign * amount[1], memory_mb + sign * amount[2]

    def _refit(self, shares: Shares) -> None:
        """Note that nodes have another room than before."""
        self._changed += [at for at, _ in shares]
        self._on.clear()

    def spot(self, job: Request, among: int, ended: int) -> list[int]:
        """Return the nodes of ``among`` that a job gets once so many of the running jobs have ended, or nothing."""
        if not (ended or job.pins):
            if self._most is None:
                self._most = max([gpus for gpus, _, _ in self._free], default=0)
            if job.each[0][0] > self._most:
                return []  # nearly always, where jobs wait
        last = self._order[ended - 1] if ended else _NOW
        return choose(job, lambda need: self._fitting(need, last), among, self._lanes)

    def least_ended(self, job: Request, among: int) -> float:
        """Return the least number of running jobs with whose ends ``spot`` has nodes of ``among``; infinite: none."""
        if job.pins:
            found = [self._steps_of(need).reaching(among & 1 << at, 1) for at, need in job.pins]
            last = None if None in found else max(one for one in found if one is not None)
        else:
            steps, last = self._steps_of(job.each[0]), None
            for lane in self._lanes:
                one = steps.reaching(among & lane, len(job.each)) if among & lane else None
                last = one if last is None or (one is not None and one < last) else last
        return inf if last is None else bisect_right(self._order, last)

    def _fitting(self, need: Amount, last: Ended) -> int:
        """Return the nodes, as bits, with room for ``need`` once the jobs up to this one have ended."""
        return self._steps_of(need).after(last)

    def _steps_of(self, need: Amount) -> _Steps:
        found = self._steps.get(need)
        if found is None:
            if len(self._steps) == MOST_NEEDS:
                self._steps.clear()
            if self._base is not None:
                found = self._base._steps_of(need).copy()  # noqa: SLF001 - another one of the class
                found.seen = 0
            else:
                found = _Steps(self._first_fit(at, need) for at in range(len(self._free)))
                found.seen = len(self._changed)
            self._steps[need] = found
        if found.seen < len(self._changed):
            for at in set(self._changed[found.seen :]):
                found.change(at, self._first_fit(at, need))
            found.seen = len(self._changed)
        return found

    def _first_fit(self, at: int, need: Amount) -> Ended | None:
        """Return the job with whose end a node comes to have room; None if it never does."""
        gpus, cpus, memory_mb = self._free[at]
        if need[0] <= gpus and need[1] <= cpus and need[2] <= memory_mb:
            return _NOW
        for ended, (more_gpus, more_cpus, more_mb) in self._there.get(at, ()):
            gpus, cpus, memory_mb = gpus + more_gpus, cpus + more_cpus, memory_mb + more_mb
            if need[0] <= gpus and need[1] <= cpus and need[2] <= memory_mb:
                return ended
        return None

    def on(self, nodes: int, among: int) -> tuple[list[int], list[float]]:
        """Return the positions of the jobs on any of these nodes, and their ends.

        ``among``: these nodes and the few others that are reserved; of those alone the jobs are looked through.
        """
        if among not in self._within:
            positions = [at for at, own in enumerate(self.nodes) if own & among]
            self._within[among] = positions, [self.ends_s[at] for at in positions]
        left_out = among & ~nodes
        if not left_out:
            return self._within[among]
        if nodes in self._on:
            return self._on[nodes]
        gone: set[int] = set()
        while left_out:
            bit = left_out & -left_out
            left_out ^= bit
            for ended, _ in self._there.get(bit.bit_length() - 1, ()):
                place = bisect_left(self._order, ended)
                if not self.nodes[place] & nodes:
                    gone.add(place)
        positions, ends_s = self._within[among]
        if gone:
            positions = [at for at in positions if at not in gone]
            ends_s = [self.ends_s[at] for at in positions]
        self._on[nodes] = positions, ends_s
        return positions, ends_s


class _Steps:
    """The jobs with whose ends nodes come to have room for one request, in order, and the nodes until then.

    On large clusters the nodes are kept at some ends only: of 10,000 nodes, those at each end would be 12 MB.
    """

    def __init__(self, firsts: Iterable[Ended | None]) -> None:
        """``firsts``: by node, the job with whose end it has room."""
        self._firsts = list(firsts)
        self.seen = 0
        """Number of changes that they have followed."""
        self._stride = 1 + len(self._firsts) // MOST_KEPT
        found = sorted((first, at) for at, first in enumerate(self._firsts) if first is not None)
        self._ends = [first for first, _ in found]
        self._at = [at for _, at in found]
        self._until = [0]
        """The nodes, as bits, of the first ends: of so many times the stride."""
        nodes = 0
        for count, at in enumerate(self._at, 1):
            nodes |= 1 << at
            if count % self._stride == 0:
                self._until.append(nodes)

    def copy(self) -> _Steps:
        """Return another one that changes by itself."""
        other = _Steps(())
        other._firsts, other._ends, other._at = self._firsts[:], self._ends[:], self._at[:]
        other._until, other._stride = self._until[:], self._stride
        return other

    def after(self, last: Ended) -> int:
        """Return the nodes with room, as bits, once the jobs up to this one have ended."""
        count = bisect_right(self._ends, last)
        kept, more = divmod(count, self._stride)
        return self._until[kept] | bits_of(self._at[count - more : count]) if more else self._until[kept]

    def reaching(self, nodes: int, count: int) -> Ended | None:
        """Return the job with whose end so many of some nodes have room; None if they never do."""
        kept = bisect_left(self._until, count, key=lambda own: (own & nodes).bit_count()) - 1
        had = (self._until[kept] & nodes).bit_count()
        for place in range(kept * self._stride, len(self._at)):
            had += nodes >> self._at[place] & 1
            if had == count:
                return self._ends[place]
        return None

    def change(self, at: int, first: Ended | None) -> None:
        """Note with whose end a node has room from now on."""
        before, bit = self._firsts[at], 1 << at
        if first == before:
            return
        self._firsts[at] = first
        # Each set that is kept loses the node or gets it, and the one next to its last one in return.
        if before is not None:
            place = self._at.index(at, bisect_left(self._ends, before))
            if len(self._at) % self._stride == 0:
                self._until.pop()
            for kept in range(place // self._stride + 1, len(self._until)):
                self._until[kept] = self._until[kept] & ~bit | 1 << self._at[kept * self._stride]
            del self._ends[place], self._at[place]
        if first is not None:
            place = bisect_left(self._ends, first)
            self._ends.insert(place, first)
            self._at.insert(place, at)
            for kept in range(place // self._stride + 1, len(self._until)):
                self._until[kept] = (self._until[kept] | bit) & ~(1 << self._at[kept * self._stride])
            if len(self._at) % self._stride == 0:
                self._keep_more()

    def _keep_more(self) -> None:
        begin = (len(self._until) - 1) * self._stride
        self._until.append(self._until[-1] | bits_of(self._at[begin : begin + self._stride]))


class Pass:
    """One pass: the reservations so far. A reservation keeps all other jobs off its nodes."""

    def __init__(self, now_s: float, nodes: int, rules: Backfill) -> None:
        self._now_s, self._nodes, self._rules = now_s, nodes, rules
        # Stretches of time without a gap, and the nodes that no reservation has in each, as bits.
        self._begins, self._ends, self._free = [now_s], [now_s + rules.window_s], [nodes]

    def reserve(self, start_s: float, end_s: float, nodes: int) -> None:
        """Take nodes out of the slots in this time; a slot that it cuts becomes two or three."""
        for cut_s in (start_s, end_s):
            at = bisect_right(self._ends, cut_s)
            if at < len(self._ends) and self._begins[at] < cut_s:
                self._begins.insert(at + 1, cut_s)
                self._ends.insert(at, cut_s)
                self._free.insert(at, self._free[at])
        first, last = bisect_left(self._begins, start_s), bisect_left(self._begins, end_s)
        self._free[first:last] = [own & ~nodes for own in self._free[first:last]]

    def unreserved(self, limit_s: float) -> int:
        """Return the nodes, as bits, on which a job that starts now delays no reservation by its time limit."""
        return self.free_of_reservations(self._now_s, self._now_s + limit_s)[0]

    def earliest(self, job: Request, future: Future) -> tuple[float, list[int]]:
        """Return a job's earliest start that no reservation forbids, and its nodes; none where it is past the window.

        The start is sought from the beginning of one slot after the other, on nodes that no reservation has until the
        job's limit.
        """
        later_s: float | None = self._now_s
        last_s = self._now_s + self._rules.window_s
        while later_s is not None and later_s <= last_s:
            from_s = later_s
            nodes, later_s = self.free_of_reservations(from_s, from_s + job.limit_s, job.among, len(job.each))
            nodes &= job.among
            if nodes.bit_count() < len(job.each):
                continue
            start_s, spot = self._future_start(job, future, nodes, from_s, later_s)
            if not spot:
                continue
            if start_s > self._now_s:
                if self._reserved(bits_of(spot), start_s, start_s + job.limit_s):
                    later_s = start_s + (start_s <= from_s)
                    continue
                if later_s is not None and start_s > later_s:
                    continue
            return (start_s, spot) if start_s <= last_s else (inf, [])
        return inf, []

    def _reserved(self, nodes: int, from_s: float, to_s: float) -> bool:
        """Return True if any of these nodes has a reservation in this time."""
        first, last = bisect_right(self._ends, from_s), bisect_left(self._begins, to_s)
        return any(nodes & ~own for own in self._free[first:last])

    def free_of_reservations(
        self, from_s: float, to_s: float, among: int = -1, count: int = 1
    ) -> tuple[int, float | None]:
        """Return the nodes without a reservation in this time, and the time from which further ones are free.

        Where fewer than ``count`` of ``among`` are free, others are left out as well.
        """
        begins, ends, free = self._begins, self._ends, self._free
        nodes, at, last = self._nodes, bisect_right(self._ends, from_s), len(free) - 1
        # 1. To the slot after which nodes are free that are not so before.
        while at <= last:
            if at < last and free[at + 1] & ~(free[at] & nodes):
                break
            if begins[at] > to_s:
                return nodes, ends[at + 1] if at + 1 < last else None
            nodes &= free[at]
            at += 1
        else:
            return nodes, None
        # 2. The others until the end.
        later_s = ends[at]
        for own in free[at : bisect_right(begins, to_s, at)]:
            nodes &= own
            if (nodes & among).bit_count() < count:
                break
        return nodes, later_s

    def _future_start(
        self, job: Request, future: Future, among: int, from_s: float, to_s: float | None
    ) -> tuple[float, list[int]]:
        """Return a job's start on these nodes once running jobs have ended by their limits, and its nodes.

        Jobs whose limits end after ``to_s`` stay.
        """
        ended = future.least_ended(job, among)
        if from_s <= self._now_s and not ended:
            return self._now_s, future.spot(job, among, 0)
        # 1. Running jobs over by then are gone.
        first = bisect_right(future.ends_s, from_s)
        if ended <= first:
            return max(from_s, self._now_s), future.spot(job, among, first)
        if ended == inf or (to_s is not None and future.ends_s[int(ended) - 1] > to_s):
            return inf, []
        # 2. The others on these nodes go by windows: all up to that in which the last one ends that has to go.
        coming, ends_s = future.on(among, job.among)
        begin, least = bisect_left(coming, first), bisect_left(coming, int(ended) - 1)
        end = len(coming) if to_s is None else bisect_right(ends_s, to_s)
        if least >= end:
            return inf, []
        # Slurm takes jobs whose limits end in one window of time away together, and makes each window longer than the
        # one before it.
        window_s, precision_s = FIRST_WINDOW_S, self._rules.precision_s
        bound_s = (ends_s[begin] // window_s + 1) * window_s
        while ends_s[least] > bound_s + window_s and window_s < LAST_WINDOW_S:
            window_s = window_s + precision_s if precision_s else 2 * window_s
        last = max(least, bisect_right(ends_s, bound_s + window_s, begin, end) - 1)
        spot = future.spot(job, among, coming[last] + 1)
        there = bits_of(spot)
        while not future.nodes[coming[last]] & there:
            last -= 1
        return max(ends_s[last], from_s), spot


def bits_of(spot: Iterable[int]) -> int:
    """Return nodes as bits."""
    found = 0
    for at in spot:
        found |= 1 << at
    return found


def choose(job: Request, fitting: Callable[[Amount], int], among: int, lanes: Sequence[int]) -> list[int]:
    """Return the nodes of ``among`` that a job gets, or nothing; ``fitting`` tells the nodes with room, as bits.

    All of them are in one lane, the first that has them.
    """
    if job.pins:
        there = all((among & fitting(amount)) >> at & 1 for at, amount in job.pins)
        return [at for at, _ in job.pins] if there else []
    room = fitting(job.each[0]) & among
    # Slurm takes nodes of lower weight first, and further lanes have a higher one.
    for lane in lanes if room else ():
        if spot := _of_one_lane(room & lane, len(job.each)):
            return spot
    return []


def _of_one_lane(room: int, count: int) -> list[int]:
    """Return so many nodes of those with room: one is the first.

    Several are taken from the smallest run of adjacent nodes with room that has as many, or else from the largest.
    """
    if count == 1:
        return [(room & -room).bit_length() - 1] if room else []
    if room.bit_count() < count:
        return []
    # 1. Runs of adjacent nodes.
    runs = [list(range(*found.span())) for found in re.finditer("1+", bin(room)[:1:-1])]
    # 2. The smallest run that has as many as are left, or else the largest.
    chosen: list[int] = []
    while len(chosen) < count:
        left = count - len(chosen)
        best = min(runs, key=lambda run: len(run) if len(run) >= left else inf)
        if len(best) < left:
            best = max(runs, key=len)
        chosen += best[:left]
        runs.remove(best)
    return sorted(chosen)
