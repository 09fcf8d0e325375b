"""Jobs with several GPUs: on one node, from which small jobs move out where that pays, else on several nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from cadenza.policies.allocation.cadenza.assignment import Board

CANDIDATES = 16
"""Nodes on which room is looked for: those with most free GPUs."""


def reunite(board: Board, moves: int) -> int:
    """Bring running jobs from several nodes together on one that has room, and return how many moves are left."""
    for job in sorted(board.parts):
        fits = [node for node in range(len(board.servers)) if _with_own(board, job, node) >= board.gpus[job]]
        fits = [node for node in fits if board.rows[job][board.kind_of[node]] is not None]
        if moves > 0 and fits and board.price(job) < board.case.costs.span * board.best(job):
            own = {board.where[item] for item in board.parts[job]}
            board.join(job)
            board.seat(job, min(fits, key=lambda node: (node not in own, board.free[node], node)))
            moves -= 1
    return moves


def _with_own(board: Board, job: int, node: int) -> int:
    """Return the GPUs that a job could have on a node, its own there included."""
    return board.free[node] + sum(board.gpus[item] for item in board.parts[job] if board.where[item] == node)


def make_room(board: Board, job: int, moves: int) -> list[int] | None:
    """Seat a job on one node by taking others off it; return those, or None where that is impossible or pays not.

    The others find free GPUs elsewhere. What their moves cost must be less than what the network would cost the job.
    """
    gpus, gain = board.gpus[job], board.case.costs.span * board.best(job)
    rooms = [
        (sum(board.price(item) for item in out if board.home[item] >= 0), node, out)
        for node in _roomy(board, job)
        if (out := _leavers(board, node, gpus - board.free[node])) is not None and len(out) <= moves
    ]
    if not rooms or min(rooms)[0] >= gain:
        return None
    _, node, out = min(rooms)
    for item in out:
        board.unseat(item)
    board.seat(job, node)
    return out


def _roomy(board: Board, job: int) -> list[int]:
    usable = [options is not None for options in board.rows[job]]
    nodes = (node for node, kind in enumerate(board.kind_of) if usable[kind])
    return nsmallest(CANDIDATES, nodes, key=lambda node: (-board.free[node], node))


def _leavers(board: Board, node: int, missing: int) -> list[int] | None:
    """Return the one-GPU jobs of a node that cost least to move and free so many GPUs; None where there are too few."""
    small = [item for item in board.members[node] if board.gpus[item] == 1 and item < len(board.jobs)]
    small.sort(key=lambda item: (board.price(item) if board.home[item] >= 0 else 0.0, item))
    elsewhere = sum(board.free) - board.free[node]
    return sorted(small[:missing]) if missing <= min(len(small), elsewhere) else None


def span(board: Board, job: int) -> None:
    """Put a job on several nodes, as few as possible, of one GPU type where that has enough free GPUs."""
    usable = [node for node, free in enumerate(board.free) if free > 0 and board.may(job, board.kind_of[node])]
    if sum(board.free[node] for node in usable) < board.gpus[job]:
        usable = [node for node, free in enumerate(board.free) if free > 0]
    board.split(job, _spots(board, board.gpus[job], _of_one_type(board, usable, board.gpus[job])))


def _of_one_type(board: Board, nodes: Sequence[int], gpus: int) -> Sequence[int]:
    free: dict[str, int] = {}
    for node in nodes:
        kind = board.servers[node].gpu_type
        free[kind] = free.get(kind, 0) + board.free[node]
    enough = [kind for kind in sorted(free, key=lambda kind: (-free[kind], kind)) if free[kind] >= gpus]
    return [node for node in nodes if board.servers[node].gpu_type == enough[0]] if enough else nodes


def _spots(board: Board, gpus: int, nodes: Iterable[int]) -> list[tuple[int, int]]:
    """Take the nodes with most free GPUs, and last the one with fewest that is enough; in order of nodes."""
    left = set(nodes)
    spots = []
    while gpus:
        enough = [node for node in left if board.free[node] >= gpus]
        node = min(enough or left, key=lambda node: (board.free[node] if enough else -board.free[node], node))
        left.discard(node)
        spots.append((node, min(gpus, board.free[node])))
        gpus -= spots[-1][1]
    return sorted(spots)
