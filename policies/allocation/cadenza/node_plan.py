"""The outcome of a board as a plan: every node divided, who has what, and why where it is not obvious."""

from __future__ import annotations

import numpy as np

from cadenza.policies.allocation.cadenza.arrays import Arrays
from cadenza.policies.allocation.cadenza.assignment import Board
from cadenza.policies.allocation.cadenza.knapsack import Division, Ints, Longs
from cadenza.policies.allocation.problem import Plan, Server, proportional_share, share_speed
from cadenza.policies.core.model import Job, JobKey, Placement, Share
from cadenza.policies.core.profile import NEARLY


def written(arrays: Arrays, by: Division) -> Plan:
    """Divide every node and write down who has what; what does not change is the same object as before."""
    board = arrays.board
    which = np.arange(len(board.servers), dtype=np.int32)
    choice = np.zeros(len(board.gpus), dtype=np.int32)
    total: Longs = np.zeros(len(board.servers), dtype=np.int64)
    by.divide(arrays.field, arrays.nodes, which, choice, total)
    placements = _placements(arrays, choice)
    if board.case.costs.tune_s > 0:
        for node in range(len(board.servers)):
            _keep_shares(board, node, placements)
    return Plan(placements, _reasons(board))


def _placements(arrays: Arrays, choice: Ints) -> dict[JobKey, Placement]:
    board = arrays.board
    cpus, memory_mb = arrays.cpus[choice].tolist(), arrays.memory_mb[choice].tolist()
    names = [server.name for server in board.servers]

    def share(item: int) -> Share:
        return Share(names[board.where[item]], board.gpus[item], cpus[item], memory_mb[item])

    placements: dict[JobKey, Placement] = {}
    for item, job in enumerate(board.jobs):
        parts = board.parts.get(item)
        placement = (share(item),) if parts is None else tuple([share(one) for one in parts])
        placements[job.key] = job.placement if placement == job.placement else placement
    return placements


def _keep_shares(board: Board, node: int, placements: dict[JobKey, Placement]) -> None:
    """Leave the CPUs and memory of a node's jobs as they are when changing them gains less than it costs."""
    items, costs = board.members[node], board.case.costs
    if any(board.home[item] != node for item in items):
        return  # newcomers and parts have no home
    changed = [item for item in items if placements[board.jobs[item].key] != board.jobs[item].placement]
    server, jobs = board.servers[node], [board.jobs[item] for item in items]
    shares = [job.placement[0] for job in jobs]
    fits = sum(one.cpus for one in shares) <= server.cpus and sum(one.memory_mb for one in shares) <= server.memory_mb
    if not fits or not all(_good(job, server, board.case.margin) for job in jobs):
        return
    gain = sum(
        (share_speed(job.profile, placements[job.key][0], server.gpu_type) - _speed(job, server)) * board.weight(item)
        for item, job in zip(items, jobs, strict=True)
    )
    cost = sum(_speed(board.jobs[item], server) * board.weight(item) for item in changed)
    if gain * costs.horizon_s <= cost * costs.tune_s:
        placements.update({job.key: job.placement for job in jobs})


def _speed(job: Job, server: Server) -> float:
    return share_speed(job.profile, job.placement[0], server.gpu_type)


def _good(job: Job, server: Server, margin: float) -> bool:
    """Return whether what a job has may be given to it."""
    fair = proportional_share(server, job.gpus)
    if job.profile is None or job.placement[0] == fair:
        return job.placement[0] == fair
    return _speed(job, server) >= (1 + margin) * share_speed(job.profile, fair, server.gpu_type) - NEARLY


def _reasons(board: Board) -> dict[JobKey, str]:
    """Return why jobs move, and why they are on several nodes."""
    reasons = {}
    for job, home, node in zip(board.jobs, board.home, board.where, strict=False):
        if home not in (-1, node):
            reasons[job.key] = _why_moved(board, home, node)
    for item, parts in board.parts.items():
        job = board.jobs[item]
        reasons[job.key] = f"on {len(parts)} nodes: no node has {job.gpus} GPUs for it"
    return reasons


def _why_moved(board: Board, home: int, node: int) -> str:
    source, target = board.servers[home].name, board.servers[node].name if node >= 0 else "several nodes"
    return f"moves from {source} to {target}: together the jobs gain more than the move costs"
