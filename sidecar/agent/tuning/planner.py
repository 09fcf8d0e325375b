"""Division of a host's CPUs and memory among its jobs: floors first, then wishes out of the surplus (pure).

Amounts of CPU are integers of 1/1000 CPU (``milli``), memory is in MB. A job's *floor* is Slurm's allocation, its
*wish* the service's order. A wish above the floor is served from free capacity, and from lenders, whose wish is below
their floor. Without a borrower a lender keeps its floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.tuning.topology import Cpu, Topology

MILLI = 1000
MIN_MILLI = 10
"""The kernel takes no quota below 1 ms in 100 ms."""


@dataclass(frozen=True)
class Claim:
    """One job; a floor is None if unknown, a wish is None without an order."""

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
    """CPUs from an earlier plan."""
    near: frozenset[int] = frozenset()
    """NUMA nodes of its GPUs."""
    running: bool = True
    """True if it may compute now; a job that waits for its lease needs memory, but no CPU."""

    @property
    def floor(self) -> int | None:
        """The floor in milli; CPUs that Slurm bound the job to are part of it."""
        return max(self.floor_milli or 0, len(self.own) * MILLI) or None

    @property
    def tuned(self) -> bool:
        """True if the agent chooses this job's CPUs."""
        return self.wish_milli is not None


class Grant(NamedTuple):
    """Resources of one job; 0 and no CPUs leave the choice to Slurm.

    ``quota``: the CPUs alone do not limit it to ``milli``, so a quota must.
    """

    milli: int
    memory_mb: int
    cpus: frozenset[int]
    quota: bool


class Request(NamedTuple):
    """One job's part in a division of one resource."""

    floor: int | None
    wish: int | None


def plan(topology: Topology, claims: Iterable[Claim]) -> Mapping[JobKey, Grant]:
    """Return the grants of all running, tuned jobs; the same claims give the same plan in any order.

    While a running job's floor is unknown, no job gets more than its own: the extra may belong to that job.
    """
    ordered = sorted(claims, key=lambda claim: claim.key)
    running = [claim for claim in ordered if claim.running]
    # 1. Amounts of CPU, in whole CPUs if all requests are whole.
    requests = [Request(claim.floor, claim.wish_milli) for claim in running]
    whole = all(value % MILLI == 0 for request in requests for value in request if value is not None)
    amounts = divide(len(topology.cpus) * MILLI, requests, MILLI if whole else 1)
    milli = {claim.key: max(amount, MIN_MILLI) for claim, amount in zip(running, amounts, strict=True)}
    # 2. Memory, also of jobs that wait; no wish exceeds Slurm's hard limit.
    capped = [
        claim.wish_mb
        if claim.wish_mb is None or claim.ceiling_mb is None
        else min(claim.wish_mb, max(claim.ceiling_mb, claim.floor_mb or 0))
        for claim in ordered
    ]
    parts = [Request(claim.floor_mb, wish_mb) for claim, wish_mb in zip(ordered, capped, strict=True)]
    memory = {claim.key: mb for claim, mb in zip(ordered, divide(topology.memory_mb, parts), strict=True)}
    # 3. The CPUs themselves.
    cpus = _CpuAssignment(topology, running, milli).assign()
    grants = {}
    for claim in running:
        memory_mb = memory[claim.key] if claim.wish_mb is not None else 0
        if claim.tuned:
            grants[claim.key] = Grant(milli[claim.key], memory_mb, *cpus[claim.key])
        elif memory_mb:
            grants[claim.key] = Grant(0, memory_mb, frozenset(), quota=False)
    return grants


def divide(capacity: int, requests: Iterable[Request], unit: int = 1) -> list[int]:
    """Return each amount: the floor, then a proportional part of free capacity, then of the lenders' surplus.

    A job that did not wish for less never gets less than its floor. The sum does not exceed the capacity unless the
    floors do so, as with lanes whose allocations overlap; then it does not exceed the floors.
    """
    parts = list(requests)
    floors = [request.floor or 0 for request in parts]
    extra = [max((part.wish or 0) - floor, 0) for part, floor in zip(parts, floors, strict=True)]
    loans = [
        max(floor - part.wish, 0) if part.wish is not None else 0 for part, floor in zip(parts, floors, strict=True)
    ]
    free = capacity - sum(floors)
    known = all(request.floor is not None for request in parts)
    given = min(sum(extra), max(free + sum(loans), 0)) // unit * unit if known else 0
    lent = max(given - max(free, 0), 0)
    lent = -(-lent // unit) * unit  # lenders lend whole units
    plus, minus = spread(given, extra, unit), spread(min(lent, sum(loans)), loans, unit)
    return [floor + up - down for floor, up, down in zip(floors, plus, minus, strict=True)]


def spread(total: int, weights: Sequence[int], unit: int = 1) -> list[int]:
    """Return ``total`` in proportion to the weights, none above its weight, in units; the first get the rest."""
    everything = sum(weights)
    if total >= everything:
        return list(weights)
    parts = [total * weight // everything // unit * unit for weight in weights]
    for index, weight in enumerate(weights):
        left = total - sum(parts)
        if left > 0 and parts[index] < weight:
            parts[index] += min(unit, left, weight - parts[index])
    return parts


class _CpuAssignment:
    """Assigns CPUs to jobs: whole CPUs to one job alone, fractions on CPUs that are shared by quota."""

    def __init__(self, topology: Topology, running: Sequence[Claim], milli: Mapping[JobKey, int]) -> None:
        self.cpus = {cpu.id: cpu for cpu in topology.cpus}
        self.running = running
        self.milli = milli
        self.taken: dict[JobKey, set[int]] = {claim.key: set() for claim in running}
        self.holder: dict[int, JobKey] = {}
        """The job that has a CPU for itself."""
        self.threads: dict[int, list[int]] = {}
        """Hardware threads by core."""
        had = [cpu for claim in running for cpu in claim.has]
        self.pooled = {cpu for cpu in had if had.count(cpu) > 1}
        """CPUs that several jobs have from an earlier plan: they stay the shared ones."""
        for cpu in topology.cpus:
            self.threads.setdefault(cpu.core, []).append(cpu.id)

    def assign(self) -> Mapping[JobKey, tuple[frozenset[int], bool]]:
        """Return each job's CPUs and whether it needs a quota on them."""
        if sum(self.milli.values()) > len(self.cpus) * MILLI:
            return dict.fromkeys(self.taken, (frozenset(self.cpus), True))
        for claim in self.running:
            if not claim.tuned:
                self._take(claim, claim.own, len(claim.own))
        tuned = [claim for claim in self.running if claim.tuned]
        for keep in ("own", "has"):
            for claim in tuned:
                self._take(claim, getattr(claim, keep), self._missing(claim))
        for claim in (*tuned, *(claim for claim in self.running if not claim.tuned and not claim.own)):
            self._take(claim, frozenset(self.cpus), self._missing(claim))
        return self._with_pool()

    def _missing(self, claim: Claim) -> int:
        """Return the number of whole CPUs that a job still needs."""
        return self.milli[claim.key] // MILLI - len(self.taken[claim.key])

    def _take(self, claim: Claim, among: frozenset[int], count: int) -> None:
        """Give a job the best free CPUs among some, one by one, because each changes the order of the rest."""
        for _ in range(count):
            free = [cpu for cpu in among if cpu in self.cpus and cpu not in self.holder]
            if not free:
                return
            best = min(free, key=lambda cpu: (cpu in self.pooled, self._order(claim, self.cpus[cpu])))
            self.taken[claim.key].add(best)
            self.holder[best] = claim.key

    def _order(self, claim: Claim, cpu: Cpu) -> tuple[bool, bool, bool, int]:
        """Return the order of choice: the job's NUMA nodes, cores without other jobs, cores that it is not on yet."""
        mine = self.taken[claim.key]
        nodes = {self.cpus[one].node for one in (mine or claim.own) if one in self.cpus} or claim.near or {cpu.node}
        on_core = {self.holder[one] for one in self.threads[cpu.core] if one in self.holder}
        return cpu.node not in nodes, bool(on_core - {claim.key}), claim.key in on_core, cpu.id

    def _with_pool(self) -> Mapping[JobKey, tuple[frozenset[int], bool]]:
        """Add shared CPUs, as many as all fractions together, to the jobs whose amount is not whole."""
        lacking = {claim.key: self.milli[claim.key] - len(self.taken[claim.key]) * MILLI for claim in self.running}
        sharing = {key: lack for key, lack in lacking.items() if lack > 0}
        size = -(-sum(sharing.values()) // MILLI)
        pool: set[int] = set()
        for claim in self.running:
            if claim.key in sharing and len(pool) < size:  # its earlier CPUs first, then the best
                free = [cpu for cpu in self.cpus if cpu not in self.holder and cpu not in pool]
                ranked = sorted(
                    (cpu not in claim.has, cpu not in self.pooled, self._order(claim, self.cpus[cpu]), cpu)
                    for cpu in free
                )
                pool.update(cpu for *_, cpu in ranked[: size - len(pool)])
        return {
            key: (frozenset(mine | pool if key in sharing else mine), key in sharing)
            for key, mine in self.taken.items()
        }
