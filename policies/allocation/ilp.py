"""Synergy's two programs (OSDI'22, §4): ILP1 chooses each job's grid point on one super-machine, LP2 places them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from cadenza.policies.allocation.demand import allows
from cadenza.policies.allocation.problem import Case, Server
from cadenza.policies.core.errors import SolverError
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.core.profile import MB_PER_GB, TOLERANCE, Profile

GAP = 1e-4
"""ILP1 is solved to this relative gap."""
SOLVED = 0


class Choice(NamedTuple):
    """A choice for a job: CPUs and memory for each of its GPUs, on GPUs of a type, and its throughput with them."""

    gpu_type: str
    cpus: float
    memory_gb: float
    speed: float
    fair: bool = False
    """True for the proportional share itself."""


class Pool(NamedTuple):
    """All servers of one GPU type as one machine."""

    gpu_type: str
    gpus: int
    cpus: float
    memory_gb: float


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimum of ILP1 or of its relaxation."""

    objective: float
    """Total (weighted) throughput of the choices."""
    bound: float
    """No choice has more."""
    choices: Mapping[JobKey, Choice] = field(default_factory=dict)
    """By job; empty for the relaxation, whose choices are mixtures."""


Offers: TypeAlias = tuple[tuple[Choice, Choice], ...]
"""All that a job may get: (choice, proportional share of its pool)."""
Group: TypeAlias = tuple[Offers, int, float]
"""Jobs that are alike: offers, GPUs, weight. By value, so that a replay with profiles read anew forms the same."""


def ilp1(case: Case, weights: Mapping[JobKey, float] | None = None, *, relaxed: bool = False) -> Solution:
    """Solve ILP1 for the runnable jobs, or with ``relaxed`` LP1: the most total throughput, none below proportional.

    All servers of a GPU type count as one machine, so that the result is a bound for any placement. A job gets a grid
    point of its profile, or exactly its proportional share; without a profile the latter. Each job counts once
    unless ``weights`` say otherwise (by GPUs, for example). Raise SolverError when no choice fits.
    """
    jobs = case.jobs[: case.runnable]
    pools = pools_of(case.servers)
    offers: dict[tuple[Profile | None, str], Offers] = {}
    groups: dict[Group, list[Job]] = {}
    for job in jobs:
        key = job.profile, case.gpu_type.get(job.key, "")
        if key not in offers:
            offers[key] = _offers(*key, pools, case.margin, relaxed=relaxed)
        weight = 1.0 if weights is None else weights[job.key]
        groups.setdefault((offers[key], job.gpus, weight), []).append(job)
    if not groups:
        return Solution(0.0, 0.0)
    result = _solve_ilp1(list(groups), [len(alike) for alike in groups.values()], pools, relaxed=relaxed)
    objective, bound = -result.fun, -result.fun if relaxed else -result.mip_dual_bound
    if relaxed:
        return Solution(objective, bound)
    return Solution(objective, bound, _hand_out(groups, np.rint(result.x).astype(int)))


def pools_of(servers: Sequence[Server]) -> list[Pool]:
    """Return the servers of each GPU type as one machine, in order of types."""
    pools = []
    for gpu_type in sorted({server.gpu_type for server in servers}):
        alike = [server for server in servers if server.gpu_type == gpu_type]
        gpus, cpus = sum(server.gpus for server in alike), sum(server.cpus for server in alike)
        pools.append(Pool(gpu_type, gpus, cpus, sum(server.memory_mb for server in alike) / MB_PER_GB))
    return pools


def fair_choice(profile: Profile | None, pool: Pool) -> Choice:
    """Return the proportional share of a pool."""
    cpus, memory_gb = pool.cpus / pool.gpus, pool.memory_gb / pool.gpus
    return Choice(pool.gpu_type, cpus, memory_gb, _speed(profile, pool, cpus, memory_gb), fair=True)


def points(profile: Profile | None, pool: Pool) -> list[Choice]:
    """Return the grid points of a profile that no other beats, and the proportional share; least CPUs first.

    A point is beaten by one that needs no more of anything and is as fast.
    """
    fair = fair_choice(profile, pool)
    there = profile.on(pool.gpu_type) if profile is not None else None
    grid = [(cpus, memory) for cpus in there.cpus_per_gpu for memory in there.memory_gb_per_gpu] if there else []
    found = [Choice(pool.gpu_type, *point, _speed(profile, pool, *point)) for point in grid]
    kept: list[Choice] = []
    for one in sorted([*found, fair], key=lambda one: (one.cpus, one.memory_gb, -one.speed, not one.fair)):
        if one.fair or not any(other.memory_gb <= one.memory_gb and other.speed >= one.speed for other in kept):
            kept.append(one)
    return kept


def _speed(profile: Profile | None, pool: Pool, cpus: float, memory_gb: float) -> float:
    if profile is None:
        return 1.0
    there = profile.on(pool.gpu_type) if pool.gpu_type else profile
    return there.speed(cpus, memory_gb) * profile.iteration_s / there.iteration_s


def _offers(profile: Profile | None, gpu_type: str, pools: Sequence[Pool], margin: float, *, relaxed: bool) -> Offers:
    """Return all that jobs with a profile may get on GPUs of a type (empty: any); LP1 may mix slow points in."""
    found = []
    for pool in pools:
        if not gpu_type or pool.gpu_type == gpu_type:
            fair = fair_choice(profile, pool)
            least = (1 + margin) * fair.speed - TOLERANCE
            found += [(one, fair) for one in points(profile, pool) if relaxed or one.fair or one.speed >= least]
    return tuple(found)


def _solve_ilp1(
    groups: Sequence[Group],
    counts: Sequence[int],
    pools: Sequence[Pool],
    *,
    relaxed: bool,
) -> Any:
    """Return HiGHS' result: how many jobs of each group get each of its offers."""
    owner = np.array([number for number, group in enumerate(groups) for _ in group[0]])
    if not owner.size:
        raise SolverError("ILP1: no server has the GPU type that a job must run on")
    flat = [offer for group in groups for offer in group[0]]
    gpus = np.array([groups[number][1] for number in owner], dtype=float)
    weights = np.array([groups[number][2] for number in owner])
    speeds = np.array([choice.speed for choice, _ in flat])
    cpus, memory = np.array([choice.cpus for choice, _ in flat]), np.array([choice.memory_gb for choice, _ in flat])
    rows = []  # GPUs, CPUs and memory as parts of what a pool has, since the solver's tolerance is absolute
    for pool in pools:
        here = np.array([choice.gpu_type == pool.gpu_type for choice, _ in flat]) * gpus
        rows += [here / pool.gpus, here * cpus / pool.cpus, here * memory / pool.memory_gb]
    constraints = [LinearConstraint(np.vstack(rows), ub=1 + TOLERANCE)]
    each = coo_array((np.ones(owner.size), (owner, np.arange(owner.size))), shape=(len(groups), owner.size)).tocsr()
    constraints.append(LinearConstraint(each, lb=counts, ub=counts))
    if relaxed:
        above = speeds - np.array([fair.speed for _, fair in flat])
        constraints.append(LinearConstraint(each.multiply(above[np.newaxis, :]).tocsr(), lb=0.0))
    result = milp(
        -weights * speeds,
        integrality=np.full(owner.size, 0 if relaxed else 1),
        bounds=Bounds(0, np.array(counts, dtype=float)[owner]),
        constraints=constraints,
        options={"mip_rel_gap": GAP},
    )
    if result.status != SOLVED:
        raise SolverError(f"ILP1 of {len(groups)} groups of jobs: {result.message}")
    return result


def _hand_out(groups: Mapping[Group, Sequence[Job]], counts: Any) -> dict[JobKey, Choice]:
    """Return each job's choice; of jobs that are alike the earlier in the queue get the faster."""
    choices: dict[JobKey, Choice] = {}
    at = 0
    for (offers, _, _), jobs in groups.items():
        given = [(choice, count) for (choice, _), count in zip(offers, counts[at : at + len(offers)], strict=True)]
        given.sort(key=lambda item: (-item[0].speed, item[0]))
        each = (choice for choice, count in given for _ in range(count))
        choices.update(zip((job.key for job in jobs), each, strict=True))
        at += len(offers)
    return choices


class Item(NamedTuple):
    """A unit that LP2 places whole: a job, or an equal part of one that is larger than any server. Memory in MB."""

    gpus: int
    cpus: int
    memory_mb: int
    gpu_type: str


def item_of(servers: Sequence[Server], gpus: int, choice: Choice) -> tuple[Item, int]:
    """Return the item for a job with a choice, and how many a job is: more than one if larger than any server."""
    largest = max(server.gpus for server in servers if allows(server, choice.gpu_type))
    parts = next(parts for parts in range(-(-gpus // largest), gpus + 1) if gpus % parts == 0)
    each = gpus // parts
    cpus, memory_mb = ceil(choice.cpus * each - TOLERANCE), ceil(choice.memory_gb * each * MB_PER_GB - TOLERANCE)
    return Item(each, cpus, memory_mb, choice.gpu_type), parts


def lp2(servers: Sequence[Server], items: Sequence[tuple[Item, int]]) -> list[list[int]]:
    """Return how many of each item to put on each server (``[item][server]``), so that few are left over.

    Synergy's LP2 minimizes the jobs that are split over servers. Here the linear program of what is still to be put
    says where; whole jobs stay, and of those that it splits the largest parts that fit are put whole; then it is
    solved again for the rest. Those left at the end are what the rounding has to split.
    """
    put = np.zeros((len(items), len(servers)), dtype=int)
    if not put.size:
        return [[0] * len(servers) for _ in items]
    sizes = np.array([item[:3] for item, _ in items]).reshape(-1, 3)
    counts = np.array([count for _, count in items], dtype=int)
    free = np.array([server[1:4] for server in servers]).reshape(-1, 3)
    allowed = np.array([[allows(server, item.gpu_type) for server in servers] for item, _ in items])
    while True:
        fits = allowed & (sizes[:, np.newaxis] <= free).all(axis=2) & (counts > 0)[:, np.newaxis]
        if not fits.any():
            return [[int(count) for count in row] for row in put]
        wanted = _solve_lp2(sizes, counts, free, fits)
        order = np.argsort(-(wanted % 1.0), axis=None, kind="stable")
        whole = np.floor(wanted).astype(int)
        free, counts, put = free - whole.T @ sizes, counts - whole.sum(axis=1), put + whole
        for item, server in zip(*np.unravel_index(order, wanted.shape), strict=True):
            if wanted[item, server] % 1.0 and counts[item] and (sizes[item] <= free[server]).all():
                free[server] -= sizes[item]
                counts[item] -= 1
                put[item, server] += 1


def _solve_lp2(sizes: Any, counts: Any, free: Any, fits: Any) -> Any:
    """Return how much of each item the linear program puts on each server; never next to nothing everywhere."""
    item, server = np.nonzero(fits)
    column = np.arange(item.size)
    rows = np.concatenate([server + kind * len(free) for kind in range(3)])
    values = (sizes[item] / np.maximum(free[server], 1)).T.ravel()
    room = coo_array((values, (rows, np.tile(column, 3))), shape=(3 * len(free), item.size)).tocsr()
    each = coo_array((np.ones(item.size), (item, column)), shape=(len(counts), item.size)).tocsr()
    result = milp(
        np.full(item.size, -1.0),
        bounds=Bounds(0, counts[item]),
        constraints=[LinearConstraint(room, ub=1.0), LinearConstraint(each, ub=counts)],
    )
    if result.status != SOLVED:
        raise SolverError(f"LP2 of {len(counts)} kinds of jobs on {len(free)} servers: {result.message}")
    wanted = np.zeros(fits.shape)
    wanted[item, server] = np.round(result.x, 6)
    return wanted
