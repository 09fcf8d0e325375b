"""Verification of an action by a later snapshot (pure)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    Migrate,
    OpenNode,
    Place,
    Release,
    Requeue,
    Resize,
    Resume,
    Save,
    Size,
    Suspend,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.model import ClusterSnapshot, Job

Verdict: TypeAlias = Literal["verified", "failed", "gone"]

SLURM_GRACE_S = 2.0
"""Time until Slurm's answers show a job update that slurmctld has accepted."""
AGENT_GRACE_S = 120.0
"""Time for an order to a job: for its step, its copy and, if it resumes, for other jobs' GPUs."""


def verdict(action: Action, snapshot: ClusterSnapshot, applied_s: float) -> Verdict | None:
    """Return the verdict on an action applied at ``applied_s`` (epoch seconds).

    *gone*: the job or node has left. None: the effect is not visible yet, and may still come in time.
    """
    if isinstance(action, Yield | Resume | Migrate | Resize | Save) and not snapshot.hosts:
        return None  # read without the agents: it shows no leases
    effect = _effect(action, snapshot)
    if effect is None:
        return "gone"
    if effect:
        return "verified"
    grace = AGENT_GRACE_S if isinstance(action, Yield | Resume | Migrate | Resize | Save) else SLURM_GRACE_S
    return "failed" if snapshot.time_s - applied_s > grace else None


def _effect(action: Action, snapshot: ClusterSnapshot) -> bool | None:
    """Return whether a snapshot shows an action's effect; None if its job or node is gone."""
    if isinstance(action, DrainNode | OpenNode):
        node = next((node for node in snapshot.nodes if node.name == action.node), None)
        return None if node is None else node.drained == isinstance(action, DrainNode)
    if isinstance(action, MakeWay):
        return all(snapshot.job(key) is None for key in action.jobs)
    job = snapshot.job(action.job)
    if isinstance(action, Requeue) or (isinstance(action, Migrate | Resize | Save) and job is None):
        # The incarnation that we requeued must be over: its successor has another restart count.
        return job is None
    return None if job is None else _job_shows(action, job)


def _job_shows(action: Action, job: Job) -> bool:
    state = job.lease.state if job.lease else None
    match action:
        case Suspend() | Unsuspend():
            return (job.state == "SUSPENDED") == isinstance(action, Suspend)
        case Size(cpus=cpus):
            return job.state != "PENDING" or job.cpus == cpus
        case Place() | Release():
            return not job.held
        case Yield() | Migrate() | Resize() | Save():
            return state in ("stopping", "yielded", "waiting")
        case Resume():
            return state in ("held", "stopping")
        case _:
            return True
