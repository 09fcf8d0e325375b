"""Whether the effect of an action can be seen in a later snapshot (pure)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
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
from cadenza.policies.core.model import ClusterSnapshot, Job, Node

Verdict: TypeAlias = Literal["verified", "failed", "gone"]

SLURM_GRACE_S = 2.0
"""slurmctld answers a job update before every load shows it."""
AGENT_GRACE_S = 120.0
"""An order to a job waits for its step, its copy and, for a resume, for other jobs' GPUs."""


def verdict(action: Action, snapshot: ClusterSnapshot, applied_s: float) -> Verdict | None:
    """Say what the snapshot shows of an action applied at ``applied_s`` (epoch seconds).

    *gone*: the job or node has left, so there is nothing to see. None: not visible, and still in time.
    """
    if isinstance(action, Yield | Resume | Migrate | Resize | Save) and not snapshot.hosts:
        return None  # read without the agents: it shows no leases
    seen = _seen(action, snapshot)
    if seen is None:
        return "gone"
    if seen:
        return "verified"
    grace = AGENT_GRACE_S if isinstance(action, Yield | Resume | Migrate | Resize | Save) else SLURM_GRACE_S
    return "failed" if snapshot.time_s - applied_s > grace else None


def _seen(action: Action, snapshot: ClusterSnapshot) -> bool | None:
    if isinstance(action, DrainNode | OpenNode):
        node = next((node for node in snapshot.nodes if node.name == action.node), None)
        return None if node is None else _node_shows(action, node)
    job = snapshot.job(action.job)
    if isinstance(action, Requeue) or (isinstance(action, Migrate | Resize | Save) and job is None):
        # The incarnation that we requeued must be over: its successor has another restart count.
        return job is None
    return None if job is None else _job_shows(action, job)


def _node_shows(action: DrainNode | OpenNode, node: Node) -> bool:
    return node.drained == isinstance(action, DrainNode)


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
