"""Moves in a decision: each round takes their next step, and begins those that the policy wants.

A Requeue into a hold of a job that can save a checkpoint goes the same way, as a move to no nodes: once the job is
held it is left to the policy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from cadenza.policies.core.actions import Action, Migrate, Pack, Requeue, Resize, Resume, Suspend, Unsuspend, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Lease, Relocating
from cadenza.policies.core.move import Move, Ordered, Placed, Prefetching, Requeued, Wanted
from cadenza.policies.relocation.phases import Step, advance, follows_size, hosts_to_prefetch, refusal_reason


@dataclass(frozen=True, slots=True)
class Relocation:
    """One round's moves: the steps of those under way, and the snapshot in which their jobs are marked."""

    steps: tuple[Step, ...]
    observed: ClusterSnapshot
    snapshot: ClusterSnapshot
    """Jobs on their way are marked, and only jobs that may move can save a checkpoint."""

    @classmethod
    def of(cls, snapshot: ClusterSnapshot, memory: Memory) -> Relocation:
        """Return the next step of each move, and the snapshot as a policy sees it."""
        going = {move.job.id: relocating for move in memory.moves if (relocating := _relocating(move)) is not None}
        jobs = [_marked(job, going.get(job.key.id)) for job in snapshot.jobs]
        unchanged = all(one is other for one, other in zip(jobs, snapshot.jobs, strict=True))
        steps = tuple(advance(move, snapshot, memory) for move in memory.moves)
        return cls(steps, snapshot, snapshot if unchanged else replace(snapshot, jobs=tuple(jobs)))

    def join(self, decision: Decision, *, prefetch: bool) -> Decision:
        """Return the decision with the moves' steps, and with the moves that it begins on record.

        ``prefetch``: hosts that a job goes to read its files before it stops.
        """
        # 1. A job that can save a checkpoint does so before it is requeued into a hold.
        moves = {step.move.job.id: step.move for step in self.steps if step.move is not None}
        placed = decision.memory.placed
        wanted = [self._saving_first(action, moves, placed) for action in decision.actions]
        if not self.steps and not any(isinstance(action, Migrate | Resize) for action in wanted):
            return decision
        # 2. Jobs on their way are left to their moves; one that cannot be stopped yet goes on taking turns, or it would
        #    never come to a stop.
        busy = {number for number, move in moves.items() if not move.over}
        leaving = busy - {step.move.job.id for step in self.steps if step.move is not None and _only_wanted(step)}
        free = [
            action
            for action in wanted
            if (leaving if isinstance(action, Yield | Resume | Suspend) else busy).isdisjoint(_job_ids(action))
            or _wakes(action)
        ]
        # 3. Moves begin, or are refused with a reason.
        actions: list[Action] = []
        refused: dict[JobKey, str] = {}
        for action in free:
            job = self.observed.job(action.job) if isinstance(action, Migrate | Resize) else None
            if isinstance(action, Migrate | Resize) and job is not None:
                if reason := _refusal_reason(action, job, moves.get(job.key.id), placed):
                    refused[job.key] = f"cannot be moved: {reason}"
                    continue
                moves[job.key.id] = _begun(action, job, self.observed.time_s)
            actions.append(action)
        # 4. Every job has its sentence; the outcome of a finished move follows the present state.
        reasons = {key: text for key, text in decision.reasons.items() if key.id not in busy}
        keys: dict[int, JobKey] = {}
        for key in decision.reasons:
            keys.setdefault(key.id, key)
        for step in self.steps:
            step.explain(reasons, keys)
        for key, text in refused.items():
            reasons[key] = "; ".join(filter(None, (reasons.get(key, ""), text)))
        # 5. Hosts read the files of a job before it stops, also if the move was requested by hand.
        actions = [*(step.action for step in self.steps if step.action is not None), *actions]
        if prefetch:
            actions = [
                replace(action, prefetch=hosts_to_prefetch(action.job, action.shares, self.observed))
                if isinstance(action, Migrate | Resize)
                else action
                for action in actions
            ]
        return Decision(
            tuple(actions),
            replace(decision.memory, moves=tuple(sorted(moves.values(), key=lambda move: move.job))),
            reasons,
            0.0 if busy or actions else decision.quiet_until_s,
        )

    def _saving_first(self, action: Action, moves: dict[int, Move], placed: Collection[JobKey]) -> Action:
        """Return a move to no nodes for the requeue of a job that can save a checkpoint, else the action itself."""
        job = self.observed.job(action.job) if isinstance(action, Requeue) and action.hold else None
        if job is None or job.lease is None or job.state != "RUNNING" or not isinstance(action, Requeue):
            return action
        if not (_saves_here(job.lease) and (job.lease.ready or job.lease.state == "yielded")) or refusal_reason(
            job, moves.get(job.key.id), placed=job.key in placed
        ):
            return action
        return Migrate(action.job, (), action.reason)


def _only_wanted(step: Step) -> bool:
    """Return True if a move has ordered nothing yet, and orders nothing now."""
    return step.move is not None and isinstance(step.move.phase, Wanted) and step.action is None


def _wakes(action: Action) -> bool:
    """Return True if a job's processes are to run, or Slurm's word is to be true of them, which its move needs too."""
    return isinstance(action, Unsuspend) or (isinstance(action, Suspend) and action.repair)


def _relocating(move: Move) -> Relocating | None:
    """Return where a move's job goes, None if it has no place that is kept for it."""
    if isinstance(move.phase, Prefetching | Ordered | Requeued | Placed):
        return Relocating(move.shares, arriving=isinstance(move.phase, Placed))
    return None


def _marked(job: Job, relocating: Relocating | None) -> Job:
    """Return a job as a policy sees it.

    Only a job that holds its GPUs can save a checkpoint, or one that has yielded and saves from host memory.
    """
    lease = job.lease
    if lease is not None and lease.checkpoints and not _saves_here(lease):
        lease = replace(lease, checkpoints=False)
    if lease is job.lease and relocating is None:
        return job
    return replace(job, lease=lease, relocating=relocating)


def _saves_here(lease: Lease) -> bool:
    """Return True if a job that is ready can save a checkpoint where its state is now."""
    return lease.checkpoints and (lease.state == "held" or (lease.state == "yielded" and lease.saves_away))


def _job_ids(action: Action) -> set[int]:
    """Return the ids of the jobs that an action is about."""
    keys = action.jobs if isinstance(action, Pack) else (getattr(action, "job", None),)
    return {key.id for key in keys if key is not None}


def _refusal_reason(action: Migrate | Resize, job: Job, before: Move | None, placed: Collection[JobKey]) -> str | None:
    """Return why a job cannot go where a policy wants it, None if it can."""
    if _other_nodes(action, job) and not follows_size(job):
        return f"its {job.num_nodes} nodes would become {len(action.shares)}, and it names no min_gpus or max_gpus"
    return refusal_reason(job, before, placed=job.key in placed)


def _other_nodes(action: Migrate | Resize, job: Job) -> bool:
    """Return True if a job's number of nodes changes, which Slurm is asked for, and its script has to follow."""
    return bool(action.shares) and len(action.shares) != job.num_nodes


def _begun(action: Migrate | Resize, job: Job, now_s: float) -> Move:
    resize = isinstance(action, Resize) or _other_nodes(action, job)
    phase, pinned = Wanted(now_s), job.required_nodes
    return Move(job.key, action.shares, action.reason, phase, resize=resize, former_gpus=job.gpus, pinned=pinned)
