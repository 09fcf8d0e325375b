"""Moves that an admin requests by hand: files next to the store, which the service takes up before a round.

Root and the service's own user may request them: ``cadenza move`` checks a request against the last round and writes
it, and the guard judges the move like any other action.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, Share
from cadenza.policies.core.move import Move, Wanted
from cadenza.policies.relocation.phases import refusal_reason
from cadenza.slurm_plugin.errors import RequestError

log = logging.getLogger(__name__)


def folder(store: Path) -> Path:
    """Return the folder of requests to a store's service."""
    return store.with_name(f"{store.name}.moves")


def requested_move(
    snapshot: ClusterSnapshot, job_id: int, nodes: tuple[str, ...], gpus: int | None, reason: str
) -> Move:
    """Return the move of ``cadenza move``; raise RequestError naming the reason for which it is impossible."""
    job = next((job for job in snapshot.jobs if job.key.id == job_id), None)
    if job is None:
        raise RequestError(f"job {job_id}: the last round did not see it")
    if job.state not in ("RUNNING", "SUSPENDED"):
        raise RequestError(f"job {job_id} is {job.state}: only a job that runs is moved")
    if reason_against := refusal_reason(job, by_hand=True):
        raise RequestError(f"job {job_id} cannot be moved: {reason_against}")
    partition = {node.name for node in snapshot.nodes if job.partition in node.partitions}
    if foreign := sorted(set(nodes) - partition):
        raise RequestError(f"{', '.join(foreign)}: no node of partition {job.partition}, in which job {job_id} is")
    return Move(job.key, _shares(job, nodes, gpus), reason, Wanted(0.0), resize=gpus is not None, by_hand=True)


def _shares(job: Job, nodes: tuple[str, ...], gpus: int | None) -> tuple[Share, ...]:
    """Return each node's share: the job's resources, scaled by its number of GPUs."""
    total = job.gpus if gpus is None else gpus
    if gpus is None and len(nodes) != len(job.nodes):
        raise RequestError(f"job {job.key.id} is on {len(job.nodes)} nodes: name as many, or --gpus too")
    if total % len(nodes):
        raise RequestError(f"{total} GPUs cannot be split evenly over {len(nodes)} nodes")
    if gpus is not None:
        options = job.options
        if options is None or (options.min_gpus is None and options.max_gpus is None):
            raise RequestError(f"job {job.key.id} names no min_gpus or max_gpus: it cannot be resized")
        low, high = options.min_gpus or job.gpus, options.max_gpus or job.gpus
        if not low <= gpus <= high:
            raise RequestError(f"job {job.key.id} runs with {low} to {high} GPUs, not with {gpus}")
    scale = total / max(job.gpus, 1) / len(nodes)
    cpus, memory_mb = max(1, round(job.cpus * scale)), max(1, round(job.memory_mb * scale))
    return tuple(Share(node, total // len(nodes), cpus, memory_mb) for node in sorted(nodes))


def write(store: Path, move: Move) -> Path:
    """Write a request to the service; raise RequestError when this user may not, or no service has made the folder."""
    place = folder(store) / f"{move.job.id}.json"
    draft = place.with_suffix(".new")
    try:
        draft.write_bytes(msgspec.json.encode(move))
        draft.chmod(0o644)  # the service reads it, and the folder is its own alone
        draft.replace(place)
    except OSError as error:
        raise RequestError(f"{place}: {error.strerror}; only root and cadenzad itself may move jobs") from None
    return place


def take(store: Path, memory: Memory, now_s: float) -> Memory:
    """Return the memory with the moves of all requests in the folder wanted, and remove the files.

    An unreadable request is only logged, and so is one for a job that is being moved already.
    """
    moves = {move.job.id: move for move in memory.moves}
    for path in sorted(folder(store).glob("*.json")):
        try:
            data = path.read_bytes()
            path.unlink()
            move = msgspec.json.decode(data, type=Move)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s: no move that can be taken up: %s", path, error)
            continue
        if move.job.id in moves and not moves[move.job.id].over:
            log.warning("JOBID=%s is being moved already: a further request is dropped", move.job)
        else:
            moves[move.job.id] = replace(move, phase=Wanted(now_s), by_hand=True)
    ordered = tuple(sorted(moves.values(), key=lambda move: move.job))
    return memory if ordered == memory.moves else replace(memory, moves=ordered)
