"""Moves in a decision: each round takes their next step, and begins those that the policy wants.

A job that makes way, or is requeued, and can save a checkpoint goes the same way, as a move to no nodes: once it is
requeued it is left to Slurm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, is_

from cadenza.policies.core.actions import (
    Action,
    MakeWay,
    Migrate,
    Pack,
    Requeue,
    Resize,
    Resume,
    Suspend,
    Unsuspend,
    Yield,
)  # fmt: skip
from cadenza.policies.core.decision import Decision, Memory, Sentences, remembered
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Lease, Relocating, SiteRules, changed
from cadenza.policies.core.move import Move, Ordered, Over, Placed, Prefetching, Requeued, Wanted
from cadenza.policies.relocation.arrivals import marked_unrestored
from cadenza.policies.relocation.leaving_together import leaving_together
from cadenza.policies.relocation.phases import (
    Step,
    advance,
    follows_size,
    goal,
    hosts_to_prefetch,
    refusal_reason,
    saved_within_s,
)


@dataclass(frozen=True, slots=True)
class Relocation:
    """One round's moves: the steps of those under way, and the snapshot in which their jobs are marked."""

    steps: tuple[Step, ...]
    observed: ClusterSnapshot
    snapshot: ClusterSnapshot
    """Jobs on their way are marked, and only jobs that may move can save a checkpoint."""
    resting: tuple[Move, ...]
    """Moves without a step: nearly all are over."""

    @classmethod
    def of(cls, snapshot: ClusterSnapshot, memory: Memory) -> Relocation:
        """Return the next step of each move, and the snapshot as a policy sees it."""
        snapshot = marked_unrestored(snapshot, memory.unrestored)
        under_way = [move for move in memory.moves if not isinstance(move.phase, Over)]
        going = {move.job.id: relocating for move in under_way if (relocating := _relocating(move)) is not None}
        jobs = [
            _marked(job, going.get(job.key.id))
            if (job.lease is not None and job.lease.state != "held") or job.key.id in going  # the others save here
            else job
            for job in snapshot.jobs
        ]
        unchanged = all(map(is_, jobs, snapshot.jobs))
        live, resting, stirring = snapshot.by_id, list[Move](), list[Move]()
        for move in memory.moves:
            (resting if _rests(move, live.get(move.job.id)) else stirring).append(move)
        steps = leaving_together(stirring, [advance(move, snapshot, memory) for move in stirring], snapshot)
        return cls(steps, snapshot, snapshot if unchanged else replace(snapshot, jobs=tuple(jobs)), tuple(resting))

    def join(self, decision: Decision, *, prefetch: bool) -> Decision:
        """Return the decision with the moves' steps, and with the moves that it begins on record.

        ``prefetch``: hosts that a job goes to read its files before it stops.
        """
        # 1. Jobs that can save a checkpoint do so before they are requeued.
        moves = {move.job.id: move for move in self.resting}
        moves |= {step.move.job.id: step.move for step in self.steps if step.move is not None}
        placed, refused = decision.memory.placed, dict[JobKey, str]()
        leaves: dict[JobKey, MakeWay] = {}
        wanted: list[Action] = []
        for action in decision.actions:
            wanted += self._saving_first(action, moves, decision.memory, leaves, refused)
        begins = leaves or refused or any(isinstance(action, Migrate | Resize) for action in wanted)
        if not (moves or self.steps or begins):
            return decision
        rests = all(step.move is not None and step.move.over and step.action is None for step in self.steps)
        if rests and not decision.actions and _in_order(moves) == decision.memory.moves:
            return replace(decision, reasons=Sentences(lambda: self._sentences(decision.reasons, (), {})))
        # 2. Jobs on their way are left to their moves; one that cannot be stopped yet goes on taking turns, or it would
        #    never come to a stop.
        busy = {number for number, move in moves.items() if not move.over}
        busy |= {step.action.job.id for step in self.steps if step.move is None and isinstance(step.action, Resume)}
        leaving = busy - {step.move.job.id for step in self.steps if step.move is not None and _only_wanted(step)}
        free = [
            action
            for action in wanted
            if (leaving if isinstance(action, Yield | Resume | Suspend) else busy).isdisjoint(_job_ids(action))
            or _wakes(action)
        ]
        # 3. Moves begin, or are refused with a reason.
        actions: list[Action] = []
        for action in free:
            job = self.observed.job(action.job) if isinstance(action, Migrate | Resize) else None
            if isinstance(action, Migrate | Resize) and job is not None:
                if reason := _refusal_reason(action, job, moves.get(job.key.id), placed):
                    refused[job.key] = f"cannot be moved: {reason}"
                    continue
                move = self._begun(action, job, leaves.get(job.key), moves.get(job.key.id), decision.memory)
                moves[job.key.id] = move
                action = replace(action, goal=goal(move), save_s=saved_within_s(move))  # noqa: PLW2901
            actions.append(action)
        # 4. Every job has its sentence; the outcome of a finished move follows the present state.
        reasons = Sentences(lambda: self._sentences(decision.reasons, busy, refused))
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
            remembered(decision.memory, moves=_in_order(moves)),
            reasons,
            0.0 if busy or actions else decision.quiet_until_s,
        )

    def _sentences(
        self, reasons: Mapping[JobKey, str], busy: Collection[int], refused: Mapping[JobKey, str]
    ) -> dict[JobKey, str]:
        found = {key: text for key, text in reasons.items() if key.id not in busy}
        keys: dict[int, JobKey] = {}
        for key in reasons:
            keys.setdefault(key.id, key)
        for step in (*self.steps, *map(Step, self.resting)):
            step.explain(found, keys)
        for key, text in refused.items():
            found[key] = "; ".join(filter(None, (found.get(key, ""), text)))
        return found

    def _saving_first(
        self,
        action: Action,
        moves: dict[int, Move],
        memory: Memory,
        leaves: dict[JobKey, MakeWay],
        refused: dict[JobKey, str],
    ) -> list[Action]:
        """Return moves to no nodes for the requeue of jobs that can save a checkpoint, else the action itself.

        Jobs that make way together do so only if each of them can save: ``leaves`` notes them, or ``refused`` why not.
        """
        # Slurm requeues a job by SIGTERM and, after KillWait, SIGKILL: nothing else leaves it time to save.
        if isinstance(action, Requeue) and not action.repair:
            job = self.observed.job(action.job)
            return [Migrate(action.job, (), action.reason)] if job and _saves(job, moves, memory) else [action]
        if not isinstance(action, MakeWay):
            return [action]
        found = [job for key in action.jobs if (job := self.observed.job(key)) is not None]
        saving = [job for job in found if _saves(job, moves, memory)]
        if action.for_job in action.jobs and not saving:
            return [action]  # a round stops it, with a checkpoint or without
        if len(saving) < len(action.jobs):
            others = [key for key in action.jobs if all(job.key != key for job in saving)]
            reason = f"does not make way: job {others[0]} cannot save a checkpoint now"
            refused.update(dict.fromkeys(action.jobs, reason))
            return []
        leaves.update({job.key: action for job in saving})
        return [Migrate(job.key, (), action.reason) for job in saving]

    def _begun(
        self, action: Migrate | Resize, job: Job, way: MakeWay | None, before: Move | None, memory: Memory
    ) -> Move:
        """Return a move that begins; ``way``: the action by which the job makes way with others."""
        had = memory.factors.get(job.key.id, 0)
        move = Move(
            job.key,
            action.shares,
            action.reason,
            Wanted(self.observed.time_s),
            resize=isinstance(action, Resize) or _other_nodes(action, job),
            former_gpus=job.gpus,
            pinned=job.required_nodes,
            for_job=way.for_job if way is not None and way.for_job != job.key else None,
            factor=had if way is None else way.factors[way.jobs.index(job.key)],
            # Slurm shows the priority with which a running job started, its age and SiteFactor of that time included.
            base=job.slurm_priority - had - age_points(job, self.observed.site),
        )
        if before is None:
            return move
        # What is known of the job's earlier moves goes with it.
        waited_s = 0.0
        if before.successor == job.key and before.over and not before.shares and job.start_s is not None:
            waited_s = max(job.start_s - before.phase.since_s, 0.0)
        base = move.base if before.base is None else before.base
        displaced_s = before.displaced_s + waited_s
        return replace(move, base=base, cost_s=before.cost_s, lost_s=before.lost_s, displaced_s=displaced_s)


def _rests(move: Move, job: Job | None) -> bool:
    """Return True if nothing comes of a move while its job waits, or as long as it lives."""
    phase = move.phase
    if job is None or move.shares or not isinstance(phase, Over):
        return False
    return not phase.saved_s or job.start_s is None


def _in_order(moves: Mapping[int, Move]) -> tuple[Move, ...]:
    return tuple(sorted(moves.values(), key=attrgetter("job")))


def _saves(job: Job, moves: dict[int, Move], memory: Memory) -> bool:
    """Return True if a running job can save a checkpoint now, and may be moved."""
    lease = job.lease
    # The ranks of a suspended job stand still: they can save once Slurm has resumed it.
    if lease is None or job.state != "RUNNING" or not _saves_here(lease):
        return False
    return lease.stoppable and not refusal_reason(
        job, moves.get(job.key.id), by_hand=True, placed=job.key in memory.placed
    )


def _only_wanted(step: Step) -> bool:
    """Return True if a move has ordered nothing yet, and orders nothing now."""
    return step.move is not None and isinstance(step.move.phase, Wanted) and step.action is None


def _wakes(action: Action) -> bool:
    """Return True if a job's processes are to run, or Slurm's word is to be true of them, which its move needs too."""
    return isinstance(action, Unsuspend) or (isinstance(action, Suspend) and action.repair)


def age_points(job: Job, site: SiteRules) -> int:
    """Return the points of age in the priority with which Slurm started a job: its wait since it was submitted last."""
    if job.start_s is None or site.max_age_s <= 0:
        return 0
    return int(site.weights.get("age", 0) * min(max(job.start_s - job.submit_s, 0.0) / site.max_age_s, 1.0))


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
    return changed(job, lease=lease, relocating=relocating)


def _saves_here(lease: Lease) -> bool:
    """Return True if a job that is ready can save a checkpoint where its state is now."""
    return lease.checkpoints and (lease.state == "held" or (lease.state == "yielded" and lease.saves_away))


def _job_ids(action: Action) -> set[int]:
    """Return the ids of the jobs that an action is about."""
    keys = action.jobs if isinstance(action, Pack | MakeWay) else (getattr(action, "job", None),)
    return {key.id for key in keys if key is not None}


def _refusal_reason(action: Migrate | Resize, job: Job, before: Move | None, placed: Collection[JobKey]) -> str | None:
    """Return why a job cannot go where a policy wants it, None if it can."""
    if not action.shares:
        return refusal_reason(job, before, by_hand=True)  # nodes that its owner wants are those that it waits for then
    if _other_nodes(action, job) and not follows_size(job):
        return f"its {job.num_nodes} nodes would become {len(action.shares)}, and it names no min_gpus or max_gpus"
    return refusal_reason(job, before, placed=job.key in placed)


def _other_nodes(action: Migrate | Resize, job: Job) -> bool:
    """Return True if a job's number of nodes changes, which Slurm is asked for, and its script has to follow."""
    return bool(action.shares) and len(action.shares) != job.num_nodes
