"""Repair of what a killed slurmd or slurmctld left: Slurm's word and a job's processes contradict each other.

A slurmd that is killed in the middle of a suspend or resume leaves a job frozen that Slurm calls running. A slurmctld
that is killed forgets its last seconds: it calls a job running that we suspended, or suspended that we resumed. It may
also have forgotten that the job has ended, or that we requeued it. Slurm repairs none of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from cadenza.policies.core.actions import Requeue, Suspend, Unsuspend
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.core.text import job_names
from cadenza.policies.relocation.phases import MAX_LEAVE_S
from cadenza.policies.sharing.state.round_state import RoundState, meet
from cadenza.policies.sharing.state.settings import SharingSettings

MAX_REPAIRS = 3
"""Repairs of one job before its host's further lanes are closed and its place is given back."""


ABSENT = (
    "Slurm calls it running, and no step of it is left on its hosts: a killed slurmctld forgot its end, "
    "and Slurm itself would requeue it once slurmd registers"
)


REQUEUE_FORGOTTEN = (
    "Cadenza requeued it, a killed slurmctld forgot that, and Slurm calls it failed by the SIGTERM of that requeue"
)
TICK_S = 1.0
"""Slurm's times are whole seconds, rounded down."""


PROLOG_LOST = "Slurm waits for the end of its prolog, which a killed slurmd never reported"


def repair_suspends(state: RoundState) -> None:
    """Bring Slurm's word and the processes together; a job that is repaired gets no other order in this round."""
    repairs: list[Suspend | Unsuspend | Requeue] = []
    for job in state.jobs.started:
        amiss = job.absent or job.prolog_lost or (job.lease is not None and job.lease.amiss)
        if not amiss or not state.settings.manages(job):
            continue
        # Slurm requeues a job whose end it forgot once the slurmd registers, which may be half an hour away. For the
        # end of a prolog that a killed slurmd ran Slurm waits until the job's time is over.
        lost = ABSENT if job.absent else PROLOG_LOST if job.prolog_lost else ""
        if lost and job.state in ("RUNNING", "SUSPENDED") and job.requeueable:
            repairs.append(Requeue(job.key, hold=False, reason=lost))
            state.outcome.say("repair", job.key, lost)
        if lost or job.lease is None or not job.lease.amiss:
            continue
        action = _repair(job, state)
        if action is not None:
            repairs.append(action)
        reason = action.reason if action is not None else f"left alone: {job.lease.amiss}"
        state.outcome.say("repair", job.key, reason)
    repaired = {action.job for action in repairs}
    others = (action for action in state.outcome.slurm_actions if getattr(action, "job", None) not in repaired)
    state.outcome.slurm_actions = (*repairs, *others)


def requeue_forgotten(
    decision: Decision, snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings
) -> Decision:
    """Return the decision with the requeues of ours ordered again that a killed slurmctld took for failures.

    Our own record has the order, and Slurm the end of that incarnation after it, by SIGTERM as slurmctld restarted.
    """
    lost = [
        job
        for job in (snapshot.by_key[key] for key in sorted(memory.requeued.keys() & snapshot.by_key.keys()))
        if job.terminated_s is not None and settings.manages(job)
        if 0.0 <= job.terminated_s + TICK_S - memory.requeued[job.key] <= MAX_LEAVE_S
    ]
    if not lost:
        return decision
    tries = {job.key: memory.repairs.get(job.key, 0) for job in lost}
    # Slurm requeues a failed batch job if it is asked to, but never starts it again by itself.
    again = (
        Requeue(key, JobKey(key.id, key.restart + 1) in memory.held, REQUEUE_FORGOTTEN, repair=True)
        for key, count in tries.items()
        if count < MAX_REPAIRS
    )
    shown = {key: f"{REQUEUE_FORGOTTEN} ({count} of {MAX_REPAIRS} repairs tried)" for key, count in tries.items()}
    return replace(
        decision,
        actions=(*again, *decision.actions),
        reasons={**decision.reasons, **shown},
        quiet_until_s=0.0,
    )


def beyond_repair(snapshot: ClusterSnapshot, memory: Memory) -> dict[JobKey, Job]:
    """Return the jobs that still contradict Slurm's word after all repairs."""
    jobs = {key: snapshot.job(key) for key, tries in memory.repairs.items() if tries >= MAX_REPAIRS}
    return {key: job for key, job in jobs.items() if job is not None and job.lease is not None and job.lease.amiss}


def shows(job: Job, state: Literal["running", "frozen", "gone"]) -> bool:
    """Return True if the job's hosts show its processes in this state."""
    return job.lease is not None and job.lease.shown == state


def _repair(job: Job, state: RoundState) -> Suspend | Unsuspend | Requeue | None:
    """Return the action that puts a job right; None if nothing of ours does."""
    lease, tries = job.lease, state.memory.repairs.get(job.key, 0)
    if lease is None:
        return None
    reason = f"{lease.amiss}: a killed slurmd or slurmctld left that (repair {tries + 1} of {MAX_REPAIRS})"
    if tries >= MAX_REPAIRS:
        met = [other.key for other in state.jobs.all if meet(job, other)]
        if not met or not job.requeueable:
            return None
        given = f"gives its place back: {lease.amiss} after {tries} repairs, and {job_names(met)} may want its GPUs"
        return Requeue(job.key, hold=False, reason=given)
    # Slurm refuses to resume a job that it calls running: it is suspended first, and resumed when its turn comes.
    if job.state == "RUNNING" and shows(job, "frozen"):
        return Suspend(job.key, reason, repair=True)
    # A suspend that is in force freezes the processes. Where they run, a resume takes nothing from an admin; still only
    # a suspend of ours is undone.
    ours = job.key in state.memory.suspended or job.key in state.memory.resumed
    if job.state == "SUSPENDED" and shows(job, "running") and ours:
        return Unsuspend(job.key, reason, repair=True)
    return None
