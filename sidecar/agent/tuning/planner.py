"""What each job on a host gets: floors first, then wishes out of what nobody needs (pure).

Amounts of CPU are integers of 1/1000 CPU (``milli``), memory is in MB. A job's *floor* is what Slurm's books
guarantee it, its *wish* what the service ordered for it. A wish above the floor is served out of what no job
holds and of what donors, whose wish is below their floor, do not need. Without takers a donor keeps its floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.tuning.topology import Cpu, Topology

MILLI = 1000
LEAST_MILLI = 10
"""The kernel takes no quota below 1 ms in 100 ms."""


@dataclass(frozen=True)
class Claim:
    """One job. None where nothing is known (a floor) or nothing was ordered (a wish)."""

    key: JobKey
    floor_milli: int | None
    floor_mb: int | None
    wish_milli: int | None = None
    wish_mb: int | None = None
    ceiling_mb: int | None = None
    """Slurm's own hard limit, which no wish exceeds."""
    own: frozenset[int] = frozenset()
    """CPUs that Slurm bound the job to; empty: it may run anywhere."""
    has: frozenset[int] = frozenset()
    """CPUs that an earlier plan gave it."""
    near: frozenset[int] = frozenset()
    """NUMA nodes of its GPUs."""
    running: bool = True
    """Whether it may compute now; one that waits for its lease needs memory, but no CPU."""

    @property
    def floor(self) -> int | None:
        """Return the floor in milli; CPUs that Slurm bound the job to are part of it."""
        return max(self.floor_milli or 0, len(self.own) * MILLI) or None

    @property
    def tuned(self) -> bool:
        """Whether this job's CPUs are ours to choose."""
        return self.wish_milli is not None


class Grant(NamedTuple):
    """What one job has; 0 and no CPUs are Slurm's to say.

    ``quota``: the CPUs do not limit it to ``milli``, so a quota must.
    """

    milli: int
    memory_mb: int
    cpus: frozenset[int]
    quota: bool


class Ask(NamedTuple):
    """One job's part in a division of one resource."""

    floor: int | None
    wish: int | None


def plan(topology: Topology, claims: Iterable[Claim]) -> Mapping[JobKey, Grant]:
    """Return what each running, tuned job is to have; the same claims give the same plan in any order.

    While a running job's floor is not known, no job gets more than its own: the extra may be that job's.
    """
    ordered = sorted(claims, key=lambda claim: claim.key)
    running = [claim for claim in ordered if claim.running]
    milli = _milli(topology, running)
    memory = dict(zip((claim.key for claim in ordered), divide(topology.memory_mb, map(_memory, ordered)), strict=True))
    seats = _Seating(topology, running, milli).seats()
    found = {}
    for claim in running:
        memory_mb = memory[claim.key] if claim.wish_mb is not None else 0
        if claim.tuned:
            found[claim.key] = Grant(milli[claim.key], memory_mb, *seats[claim.key])
        elif memory_mb:
            found[claim.key] = Grant(0, memory_mb, frozenset(), quota=False)
    return found


def _milli(topology: Topology, running: Sequence[Claim]) -> dict[JobKey, int]:
    """Return each running job's amount of CPU; in whole CPUs when all that is asked for is whole."""
    asks = [Ask(claim.floor, claim.wish_milli) for claim in running]
    whole = all(value % MILLI == 0 for ask in asks for value in ask if value is not None)
    unit = MILLI if whole else 1
    amounts = divide(len(topology.cpus) * MILLI, asks, unit)
    return {claim.key: max(amount, LEAST_MILLI) for claim, amount in zip(running, amounts, strict=True)}


def _memory(claim: Claim) -> Ask:
    """Return a job's part in the division of memory."""
    if claim.wish_mb is None or claim.ceiling_mb is None:
        return Ask(claim.floor_mb, claim.wish_mb)
    return Ask(claim.floor_mb, min(claim.wish_mb, max(claim.ceiling_mb, claim.floor_mb or 0)))


def divide(capacity: int, asks: Iterable[Ask], unit: int = 1) -> list[int]:
    """Return what each gets: its floor, and beyond it what is free, then what donors can spare, in proportion.

    Nobody who did not ask for less gets less than its floor. The sum does not exceed the capacity unless the
    floors do by themselves, as with lanes whose books overlap; then it does not exceed the floors.
    """
    parts = list(asks)
    floors = [ask.floor or 0 for ask in parts]
    extra = [max((ask.wish or 0) - floor, 0) for ask, floor in zip(parts, floors, strict=True)]
    gifts = [
        max(floor - ask.wish, 0) if ask.wish is not None else 0 for ask, floor in zip(parts, floors, strict=True)
    ]
    free = capacity - sum(floors)
    known = all(ask.floor is not None for ask in parts)
    given = min(sum(extra), max(free + sum(gifts), 0)) // unit * unit if known else 0
    lent = max(given - max(free, 0), 0)
    lent = -(-lent // unit) * unit  # donors lend whole units
    plus, minus = spread(given, extra, unit), spread(min(lent, sum(gifts)), gifts, unit)
    return [floor + up - down for floor, up, down in zip(floors, plus, minus, strict=True)]


def spread(total: int, weights: Sequence[int], unit: int = 1) -> list[int]:
    """Return ``total`` in proportion to the weights, none above its weight, in units; the first ones get the rest."""
    everything = sum(weights)
    if total >= everything:
        return list(weights)
    parts = [total * weight // everything // unit * unit for weight in weights]
    for index, weight in enumerate(weights):
        left = total - sum(parts)
        if left > 0 and parts[index] < weight:
            parts[index] += min(unit, left, weight - parts[index])
    return parts


class _Seating:
    """Which CPUs each job runs on: whole ones for itself, fractions on CPUs that are shared by quota."""

    def __init__(self, topology: Topology, running: Sequence[Claim], milli: Mapping[JobKey, int]) -> None:
        self.cpus = {cpu.id: cpu for cpu in topology.cpus}
        self.running = running
        self.milli = milli
        self.taken: dict[JobKey, set[int]] = {claim.key: set() for claim in running}
        self.holder: dict[int, JobKey] = {}
        """Who has a CPU for itself."""
        self.threads: dict[int, list[int]] = {}
        """Hardware threads by core."""
        for cpu in topology.cpus:
            self.threads.setdefault(cpu.core, []).append(cpu.id)

    def seats(self) -> Mapping[JobKey, tuple[frozenset[int], bool]]:
        """Return each job's CPUs and whether it needs a quota on them."""
        if sum(self.milli.values()) > len(self.cpus) * MILLI:
            return dict.fromkeys(self.taken, (frozenset(self.cpus), True))
        for claim in self.running:
            if not claim.tuned:
                self._take(claim, claim.own, len(claim.own))
        tuned = [claim for claim in self.running if claim.tuned]
        for keep in ("own", "has"):
            for claim in tuned:
                self._take(claim, getattr(claim, keep), self._lacks(claim))
        for claim in (*tuned, *(claim for claim in self.running if not claim.tuned and not claim.own)):
            self._take(claim, frozenset(self.cpus), self._lacks(claim))
        return self._with_pool()

    def _lacks(self, claim: Claim) -> int:
        """Return how many whole CPUs a job still has to get."""
        return self.milli[claim.key] // MILLI - len(self.taken[claim.key])

    def _take(self, claim: Claim, among: frozenset[int], count: int) -> None:
        """Give a job the best free CPUs among some, one after the other, since each changes what is best."""
        for _ in range(count):
            free = [cpu for cpu in among if cpu in self.cpus and cpu not in self.holder]
            if not free:
                return
            best = min(free, key=lambda cpu: self._order(claim, self.cpus[cpu]))
            self.taken[claim.key].add(best)
            self.holder[best] = claim.key

    def _order(self, claim: Claim, cpu: Cpu) -> tuple[bool, bool, bool, int]:
        """Return the order of choice: the job's NUMA nodes, cores without other jobs, cores it is not on yet."""
        mine = self.taken[claim.key]
        nodes = {self.cpus[one].node for one in (mine or claim.own) if one in self.cpus} or claim.near or {cpu.node}
        on_core = {self.holder[one] for one in self.threads[cpu.core] if one in self.holder}
        return cpu.node not in nodes, bool(on_core - {claim.key}), claim.key in on_core, cpu.id

    def _with_pool(self) -> Mapping[JobKey, tuple[frozenset[int], bool]]:
        """Add the shared CPUs for those whose amount is not whole: as many as the fractions come to."""
        lacking = {claim.key: self.milli[claim.key] - len(self.taken[claim.key]) * MILLI for claim in self.running}
        sharing = {key: lack for key, lack in lacking.items() if lack > 0}
        size = -(-sum(sharing.values()) // MILLI)
        pool: set[int] = set()
        for claim in self.running:
            if claim.key in sharing and len(pool) < size:
                pool |= self._nearest(claim, size - len(pool), pool)
        return {
            key: (frozenset(mine | pool if key in sharing else mine), key in sharing)
            for key, mine in self.taken.items()
        }

    def _nearest(self, claim: Claim, count: int, but: set[int]) -> set[int]:
        """Return free CPUs that suit one of the jobs that share: those it has, then the best."""
        free = [cpu for cpu in self.cpus if cpu not in self.holder and cpu not in but]
        free.sort(key=lambda cpu: (cpu not in claim.has, self._order(claim, self.cpus[cpu])))
        return set(free[:count])
