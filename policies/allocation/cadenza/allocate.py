"""Cadenza's own allocation: the whole profile matrix, each node divided exactly, placement chosen for it, sticky."""

from __future__ import annotations

from dataclasses import replace
from math import floor

from cadenza.policies.allocation.cadenza.arrays import Arrays
from cadenza.policies.allocation.cadenza.assignment import Assignment
from cadenza.policies.allocation.cadenza.gangs import make_room, reunite, span
from cadenza.policies.allocation.cadenza.initial import assign_evenly, keep, order
from cadenza.policies.allocation.cadenza.local_search import BLOCK, Improver, insert, level
from cadenza.policies.allocation.cadenza.node_plan import plan_of
from cadenza.policies.allocation.problem import Case, Plan, Server
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.core.profile import Profile

MAX_PAIRS_TRIED = 1 << 17
"""Most (job, node) pairs for which each newcomer is tried on each node; more are dealt out."""
EXTRA_EVALUATIONS_PER_JOB = 1
"""Evaluations that each newcomer adds to the case's, so that a start from scratch gets the search that it needs."""
REGROUP_TRIES = 16
"""Offers of a job with several GPUs in exchange for smaller ones."""
MAX_EXTRA_EVALUATIONS = 2000
"""Most that newcomers add together."""


def cadenza(case: Case) -> Plan:
    """Place and divide so that the sum of speeds is high and no job is slower than with its proportional share.

    Each job gets a point of its profile that promises at least ``1 + margin`` times its proportional throughput on
    the kind of node where it runs, or exactly the proportional share. A node is divided among its jobs exactly, by
    dynamic programming; jobs change places between nodes while the sum gains more within ``horizon_s`` than moving
    costs. All runnable jobs are placed, one with several GPUs on one node where that is possible.
    """
    if not case.runnable or not case.servers:
        return Plan({})
    # 1. Running jobs stay where they can.
    assignment = Assignment(case)
    newcomers = order(assignment, keep(assignment))
    fresh = len(newcomers) == len(assignment.jobs)
    moves = reunite(assignment, _moves(case, len(assignment.jobs)))
    # 2. Jobs with several GPUs come first; small ones may leave their nodes for them.
    gangs = [item for item in newcomers if assignment.gpus[item] > 1]
    out = _assign_gangs(assignment, gangs, newcomers, moves, fresh=fresh)
    moves -= sum(assignment.home[item] >= 0 for item in out)
    # 3. Deal out the one-GPU jobs that may not go everywhere, or all where there are too many to try.
    singles = [item for item in newcomers if assignment.gpus[item] == 1]
    if out:
        singles = order(assignment, {*singles, *out})
    many = fresh or len(singles) * len(assignment.servers) > MAX_PAIRS_TRIED
    dealt = singles if many else [item for item in singles if None in assignment.rows[item]]
    left = assign_evenly(assignment, dealt, dealt, tight=False)
    for item in left:
        assignment.allow(item)
    singles = left if many else order(assignment, {*singles} - {*dealt} | {*left})
    # 4. Put each of the others on the node to which it adds most, exchange, and divide the nodes.
    arrays = Arrays(assignment)
    for job in assignment.parts:
        level(arrays, job)
    insert(arrays, singles)
    _improve(arrays, newcomers, moves)
    for job in assignment.parts:
        level(arrays, job)
    return plan_of(arrays)


def warm() -> None:
    """Compile everything on a small case; without numba there is nothing to compile."""
    profile = Profile("warm", 1.0, (1.0, 3.0, 6.0), (20.0, 62.5), ((0.5, 0.5), (1.0, 1.0), (1.5, 2.0)))
    servers = tuple(Server(f"n{number}", 4, 12, 256000) for number in range(3))
    jobs = tuple(
        Job(JobKey(number, 0), "", "", "", "", "PENDING", gpus, 3 * gpus, 0, 1, 0.0, profile=profile)
        for number, gpus in enumerate((1, 1, 2, 1, 1, 4))
    )
    started = cadenza(Case(0.0, servers, jobs, len(jobs))).placements
    running = [replace(job, state="RUNNING", placement=started[job.key]) for job in jobs[1:]]
    newcomer = replace(jobs[0], key=JobKey(len(jobs), 0))
    cadenza(Case(0.0, servers, (*running, newcomer), len(jobs)))


def _moves(case: Case, jobs: int) -> int:
    """Return how many running jobs may be moved in this round, an even number, so that two can change places.

    The allowance of all rounds adds up to ``moves_per_job_hour``: each round takes the pairs that its time passes.
    """
    costs = case.costs
    each = costs.moves_per_job_hour * jobs * costs.round_s / 3600 / 2
    if each <= 0:
        return 0
    at = case.now_s / costs.round_s * each
    return 2 * (floor(at) - floor(at - each))


def _assign_gangs(
    assignment: Assignment, gangs: list[int], everyone: list[int], moves: int, *, fresh: bool
) -> list[int]:
    """Seat all jobs with several GPUs, and return the small ones that had to leave their nodes for it."""
    most = max(kind.gpus for kind in assignment.kinds)
    large = [item for item in gangs if assignment.gpus[item] > most]
    gangs = gangs[len(large) :]
    for item in large:
        span(assignment, item)
    left = assign_evenly(assignment, gangs, everyone, tight=not fresh)
    if left and fresh:
        for item in gangs:
            if assignment.where[item] >= 0:
                assignment.unassign(item)
        left = assign_evenly(assignment, gangs, everyone, tight=True)
    out: list[int] = []
    for item in left:
        leavers = make_room(assignment, item, moves)
        moves -= sum(assignment.home[one] >= 0 for one in leavers or ())
        out += leavers or ()
        if leavers is None:  # a node that the ordering did not want, or several nodes
            assignment.allow(item)
            if assign_evenly(assignment, [item], [item], tight=True):
                span(assignment, item)
    return out


def _improve(arrays: Arrays, newcomers: list[int], moves: int) -> None:
    """Exchange newcomers between nodes, then, as far as moves are allowed, running jobs too."""
    assignment, field = arrays.assignment, arrays.field
    budget = assignment.case.evaluations + min(EXTRA_EVALUATIONS_PER_JOB * len(newcomers), MAX_EXTRA_EVALUATIONS)
    starts = sorted({assignment.where[item] for item in newcomers if assignment.where[item] >= 0})
    stay = field.fixed.copy()
    field.fixed[field.home >= 0] = True
    blocks = -(-len(starts) // BLOCK)
    gangs = [item for item in newcomers if assignment.gpus[item] > 1]
    for number in range(min(blocks, budget // BLOCK + 1)):
        mine = starts[number::blocks]
        block = sorted({*mine, *_others(arrays, mine, BLOCK - len(mine), roomy=True)})
        improver = Improver(arrays, block, budget // blocks, moves)
        improver.improve(mine)
        improver.regroup(gangs, REGROUP_TRIES)
        moves = improver.moves
    field.fixed[:] = stay
    if moves > 0 and len(newcomers) < len(assignment.jobs):
        half = starts[: BLOCK // 4]
        block = sorted({*half, *_others(arrays, half, BLOCK // 2 - len(half), roomy=False)})
        Improver(arrays, block, assignment.case.evaluations, moves).improve(block)


def _others(arrays: Arrays, nodes: list[int], most: int, *, roomy: bool) -> list[int]:
    """Return some other nodes, in each round the next ones; ``roomy``: only those with free GPUs."""
    assignment = arrays.assignment
    if most <= 0:
        return []
    wanted = set(range(len(assignment.servers))).difference(nodes)
    found = sorted(node for node in wanted if assignment.free[node] > 0 or not roomy)
    first = int(assignment.case.now_s // assignment.case.costs.round_s) * most % max(len(found), 1)
    return (found[first:] + found[:first])[:most]
