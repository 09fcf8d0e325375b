"""The outcome of an assignment as a plan: every node divided, who has what, and why where it is not obvious."""

from __future__ import annotations

import numpy as np

from cadenza.policies.allocation.cadenza.arrays import Arrays
from cadenza.policies.allocation.cadenza.assignment import Assignment
from cadenza.policies.allocation.cadenza.knapsack import Ints, Longs, divide
from cadenza.policies.allocation.demand import Need, promises
from cadenza.policies.allocation.problem import Plan, Server, share_speed
from cadenza.policies.core.model import Job, JobKey, Placement, Share


def plan_of(arrays: Arrays) -> Plan:
    """Divide every node and write down who has what; what does not change is the same object as before."""
    assignment = arrays.assignment
    which = np.arange(len(assignment.servers), dtype=np.int32)
    choice = np.zeros(len(assignment.gpus), dtype=np.int32)
    total: Longs = np.zeros(len(assignment.servers), dtype=np.int64)
    divide(arrays.field, arrays.nodes, which, choice, total)
    placements = _placements(arrays, choice)
    if assignment.case.costs.tune_s > 0:
        for node in range(len(assignment.servers)):
            _keep_shares(assignment, node, placements)
    return Plan(placements, _reasons(assignment))


def _placements(arrays: Arrays, choice: Ints) -> dict[JobKey, Placement]:
    assignment = arrays.assignment
    cpus, memory_mb = arrays.cpus[choice].tolist(), arrays.memory_mb[choice].tolist()
    names = [server.name for server in assignment.servers]

    def share(item: int) -> Share:
        return Share(names[assignment.where[item]], assignment.gpus[item], cpus[item], memory_mb[item])

    placements: dict[JobKey, Placement] = {}
    for item, job in enumerate(assignment.jobs):
        parts = assignment.parts.get(item)
        placement = (share(item),) if parts is None else tuple([share(one) for one in parts])
        placements[job.key] = job.placement if placement == job.placement else placement
    return placements


def _keep_shares(assignment: Assignment, node: int, placements: dict[JobKey, Placement]) -> None:
    """Leave the CPUs and memory of a node's jobs as they are when changing them gains less than it costs."""
    items, costs = assignment.members[node], assignment.case.costs
    if any(assignment.home[item] != node for item in items):
        return  # newcomers and parts have no home
    changed = [item for item in items if placements[assignment.jobs[item].key] != assignment.jobs[item].placement]
    server, jobs = assignment.servers[node], [assignment.jobs[item] for item in items]
    shares = [job.placement[0] for job in jobs]
    fits = sum(one.cpus for one in shares) <= server.cpus and sum(one.memory_mb for one in shares) <= server.memory_mb
    margin = assignment.case.margin
    if not fits or not all(
        promises(job.profile, server, job.gpus, Need(share.cpus, share.memory_mb), margin)
        for job, share in zip(jobs, shares, strict=True)
    ):
        return
    gain = sum(
        (share_speed(job.profile, placements[job.key][0], server.gpu_type) - _speed(job, server))
        * assignment.weight(item)
        for item, job in zip(items, jobs, strict=True)
    )
    cost = sum(_speed(assignment.jobs[item], server) * assignment.weight(item) for item in changed)
    if gain * costs.horizon_s <= cost * costs.tune_s:
        placements.update({job.key: job.placement for job in jobs})


def _speed(job: Job, server: Server) -> float:
    return share_speed(job.profile, job.placement[0], server.gpu_type)


def _reasons(assignment: Assignment) -> dict[JobKey, str]:
    """Return why jobs move, and why they are on several nodes."""
    reasons = {}
    for job, home, node in zip(assignment.jobs, assignment.home, assignment.where, strict=False):
        if home not in (-1, node):
            target = assignment.servers[node].name if node >= 0 else "several nodes"
            way = f"moves from {assignment.servers[home].name} to {target}"
            reasons[job.key] = f"{way}: together the jobs gain more than the move costs"
    for item, parts in assignment.parts.items():
        job = assignment.jobs[item]
        reasons[job.key] = f"on {len(parts)} nodes: no node has {job.gpus} GPUs for it"
    return reasons
