"""Jobs that make way for one waiting job leave together: all save first, then one command requeues all of them.

Slurm starts the first job of its queue once all of its GPUs are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cadenza.policies.core.actions import MakeWay, Resume
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.core.move import Move, Ordered
from cadenza.policies.relocation.phases import Step

WAITS_FOR_OTHERS = "its checkpoint is complete; it waits for the others that make way with it"


def leaving_together(before: Sequence[Move], steps: Sequence[Step], snapshot: ClusterSnapshot) -> tuple[Step, ...]:
    """Return the steps of all moves, in which the jobs that make way for one job are requeued by one action (pure).

    If one of them cannot leave, or the waiting job waits no more, the others go on where they are.
    """
    groups: defaultdict[JobKey, list[int]] = defaultdict(list)
    for at, move in enumerate(before):
        if move.for_job is not None and isinstance(move.phase, Ordered):
            groups[move.for_job].append(at)
    merged = list(steps)
    for waiting, members in groups.items():
        failed = any((one := steps[at].move) is None or one.over for at in members)
        beneficiary = snapshot.job(waiting)
        # While they saved, Slurm may have started the waiting job elsewhere, or its owner may have cancelled it.
        if failed or beneficiary is None or beneficiary.state != "PENDING":
            for at in members:
                merged[at] = _called_off(before[at], steps[at], snapshot)
            continue
        # What a single job frees before could go to others that Slurm backfills before the rest has left, and then the
        # rest would have left for nothing.
        ready = [at for at in members if isinstance(steps[at].action, MakeWay)]
        complete = len(ready) == len(members)
        for at in ready:
            sentence = steps[at].sentence if complete else WAITS_FOR_OTHERS
            merged[at] = steps[at]._replace(action=None, sentence=sentence)
        if complete:
            moves = [before[at] for at in members]
            action = MakeWay(
                tuple(move.job for move in moves), tuple(move.factor for move in moves), waiting, moves[0].reason
            )
            merged[members[0]] = merged[members[0]]._replace(action=action)
    return tuple(merged)


def _called_off(move: Move, step: Step, snapshot: ClusterSnapshot) -> Step:
    """Return the step of a job that makes way no more; one that stands with its checkpoint goes on.

    Its move is forgotten, so that it may make way later on. A job whose own move has failed keeps that outcome.
    """
    if step.move is None or step.move.over:
        return step
    job: Job | None = snapshot.job(move.job)
    stands = job is not None and job.state == "RUNNING" and job.lease is not None and job.lease.saved
    if not stands:
        return Step(move, sentence=step.sentence)  # it saves: once it stands, it goes on
    return Step(None, Resume(move.job, "goes on: the job for which it was to make way does not need its GPUs now"))
