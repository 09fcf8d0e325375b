"""A policy whose moves are carried out round by round: checkpoint, requeue, place, restore; see ``policies.moves``.

A Requeue into a hold of a job that can save a checkpoint goes the same way, as a move to no nodes: once the job is
held it is left to the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from cadenza.policies.core.actions import Action, Migrate, Pack, Requeue, Resize
from cadenza.policies.core.decision import Decision, Memory, Move
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.relocation.phases import Step, advance, cold, why_not


def moving(
    decide: Callable[[ClusterSnapshot, Memory], Decision], *, warm: bool = False
) -> Callable[[ClusterSnapshot, Memory], Decision]:
    """Return a policy whose moves are carried out; while a job moves, nothing else is decided about it.

    ``warm``: hosts that a job goes to read its files before it stops.
    """

    def decided(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        steps = [advance(move, snapshot, memory) for move in memory.moves]
        found = _saving_first(decide(_as_movable(snapshot), memory), snapshot, memory)
        if not steps and not any(isinstance(action, Migrate | Resize) for action in found.actions):
            return found
        joined = _joined(found, steps, snapshot)
        return _warming_first(joined, snapshot) if warm else joined

    return decided


def _warming_first(found: Decision, snapshot: ClusterSnapshot) -> Decision:
    """Return a decision whose moves to other hosts begin by having these read the jobs' files."""
    actions = (
        replace(action, warm=cold(action.job, action.shares, snapshot))
        if isinstance(action, Migrate | Resize)
        else action
        for action in found.actions
    )
    return replace(found, actions=tuple(actions))


def _as_movable(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Return the snapshot in which only jobs that policies may move can save a checkpoint.

    They hold their GPUs, for others cannot be stopped; and those of several nodes have said that they follow Slurm's.
    """
    return replace(snapshot, jobs=tuple(map(_stoppable, snapshot.jobs)))


def _stoppable(job: Job) -> Job:
    lease = job.lease
    if lease is None or not lease.checkpoints or (lease.state == "held" and (job.num_nodes <= 1 or _follows(job))):
        return job
    return replace(job, lease=replace(lease, checkpoints=False))


def _saving_first(found: Decision, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
    """Return a decision in which jobs that can save a checkpoint do so before they are requeued into a hold."""
    before = {move.job.id: move for move in memory.moves}
    ours = memory.placed

    def saves(action: Action) -> bool:
        job = snapshot.job(action.job) if isinstance(action, Requeue) and action.hold else None
        if job is None or job.lease is None or job.state != "RUNNING":
            return False
        if why_not(job, before.get(job.key.id), placed=job.key in ours):
            return False
        return job.lease.checkpoints and job.lease.ready and job.lease.state == "held"

    actions = (
        Migrate(action.job, (), action.reason) if isinstance(action, Requeue) and saves(action) else action
        for action in found.actions
    )
    return replace(found, actions=tuple(actions))


def _joined(found: Decision, steps: list[Step], snapshot: ClusterSnapshot) -> Decision:
    """Return a decision with the moves' steps, and without what it wanted of jobs that move."""
    under_way = [step.move for step in steps if step.move is not None]
    busy = {move.job.id for move in under_way if move.phase != "over"}
    kept = [action for action in found.actions if busy.isdisjoint(_ids(action))]
    wanted = [action for action in kept if isinstance(action, Migrate | Resize)]
    begun, refused = _begun(wanted, snapshot, under_way, found.memory.placed)
    begun_ids = {move.job.id for move in begun}
    moves = [*(move for move in under_way if move.job.id not in begun_ids), *begun]
    return Decision(
        (
            *(step.action for step in steps if step.action is not None),
            *(action for action in kept if getattr(action, "job", None) not in refused or action not in wanted),
        ),
        replace(found.memory, moves=tuple(sorted(moves, key=lambda move: move.job))),
        _reasons(found.reasons, steps, refused, busy),
    )


def _ids(action: Action) -> set[int]:
    """Return the jobs that an action is about."""
    if isinstance(action, Pack):
        return {key.id for key in action.jobs}
    key: JobKey | None = getattr(action, "job", None)
    return set() if key is None else {key.id}


def _begun(
    wanted: Iterable[Migrate | Resize], snapshot: ClusterSnapshot, known: Iterable[Move], placed: Collection[JobKey]
) -> tuple[list[Move], dict[JobKey, str]]:
    """Return the moves that a policy begins now, and why others cannot be."""
    moves, refused = [], {}
    before = {move.job.id: move for move in known}
    for action in wanted:
        job = snapshot.job(action.job)
        why = "" if job is None else _why_not(action, job, before.get(job.key.id), placed)
        if why:
            refused[action.job] = f"cannot be moved: {why}"
        elif job is not None:
            moves.append(_move(action, job, snapshot.time_s))
    return moves, refused


def _why_not(action: Migrate | Resize, job: Job, before: Move | None, placed: Collection[JobKey]) -> str:
    """Return why a job cannot go where a policy wants it, else ""."""
    if _other_nodes(action, job) and not _follows(job):
        return f"its {job.num_nodes} nodes would become {len(action.shares)}, and it names no min_gpus or max_gpus"
    return why_not(job, before, placed=job.key in placed)


def _follows(job: Job) -> bool:
    """Whether a job has said that its script takes its size from Slurm at each start."""
    return job.options is not None and (job.options.min_gpus or job.options.max_gpus) is not None


def _other_nodes(action: Migrate | Resize, job: Job) -> bool:
    """Whether a job's number of nodes changes, which Slurm has to be asked for, and its script has to follow."""
    return bool(action.shares) and len(action.shares) != job.num_nodes


def _move(action: Migrate | Resize, job: Job, now_s: float) -> Move:
    resize = isinstance(action, Resize) or _other_nodes(action, job)
    return Move(
        job.key, action.shares, action.reason, now_s, resize=resize, former_gpus=job.gpus, pinned=job.required_nodes
    )


def _reasons(
    reasons: Mapping[JobKey, str], steps: Iterable[Step], refused: Mapping[JobKey, str], busy: set[int]
) -> dict[JobKey, str]:
    """Return every job's sentence; a move that is over is told of after what holds now."""
    found = {key: text for key, text in reasons.items() if key.id not in busy}
    for step in steps:
        if step.move is None:
            continue
        if step.move.phase != "over":
            key = step.move.successor if step.move.phase in ("placed", "leaving") else step.move.job
            found[key] = step.sentence
        else:
            key = next((key for key in reasons if key.id == step.move.job.id), None) or step.move.successor
            found[key] = "; ".join(filter(None, (found.get(key, ""), step.move.outcome)))
    for key, why in refused.items():
        found[key] = "; ".join(filter(None, (found.get(key, ""), why)))
    return found

