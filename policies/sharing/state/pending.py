"""Pending jobs: the demand that growing and shrinking follow.

A job waits for GPUs when

- it is held for us to place (held admission), or
- it is pending in Slurm for lack of free resources only (reason Resources or Priority, or none yet) and asks for
  GPUs of managed hosts, whether it is ours or not, or
- Slurm has started it, as it does on a further lane when lane 0 is full, and it stands without a lease because
  another job has its GPUs: it never had one, or it waits for its next turn.

A job that is being moved does not wait: its new place is kept for it. Nor does one that Slurm is about to start where
we have placed it, unless that node takes no jobs any more or has others on its GPUs: then it is placed anew.
"""

from __future__ import annotations

from collections import Counter

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.relocation.phases import MAX_START_S
from cadenza.policies.sharing.state.host import Resident, ResourceRequest
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.state.sharing_state import WAITING_REASONS, SharingState

OTHERS = "has been given to other jobs by Slurm"
BARRED = "is reserved or does not meet its constraint any more"
NODE_TAKEN = "ReqNodeNotAvail"
"""Beginning of Slurm's reason of a job whose required nodes are promised to an earlier job, or are away."""


def queued(snapshot: ClusterSnapshot, settings: SharingSettings) -> list[Job]:
    """Return the jobs that wait in Slurm's queue for GPUs of managed hosts, by priority, submission and key."""
    hosts = (node.partitions for node in snapshot.nodes if not settings.partitions.isdisjoint(node.partitions))
    shared = frozenset().union(*hosts)
    pending = (job for job in snapshot.jobs if job.state == "PENDING" and not job.held and job.gpus > 0)
    waiting = [job for job in pending if job.partition in shared and job.state_reason in WAITING_REASONS]
    return sorted(waiting, key=lambda job: (-job.slurm_priority, job.submit_s, job.key))


def starts(job: Job, state: SharingState) -> bool:
    """Return True if Slurm starts a job as soon as the nodes that it requires have its GPUs for it.

    The memory of our placements may be lost: where the service places jobs, one that is not held and requires nodes has
    been placed. A job that waits for something else than these nodes has no claim on them.
    """
    if job.state != "PENDING" or job.held or not job.required_nodes:
        return False
    if job.key in state.memory.placed:
        return True
    reason, settings = job.state_reason, state.settings
    soon = (job.eligible_s or 0.0) <= state.now_s + MAX_START_S
    lacks_nodes = reason in WAITING_REASONS or reason.startswith(NODE_TAKEN) or (reason == "BeginTime" and soon)
    return settings.places and settings.manages(job) and lacks_nodes


def stranded(state: SharingState) -> dict[JobKey, str]:
    """Return the jobs that Slurm cannot start where we have placed them, each with the reason.

    The nodes take no jobs any more, or not this one, or Slurm has given their GPUs to jobs that we did not hold, and
    that stay there.
    """
    nodes = {node.name: node for node in state.snapshot.nodes}
    given: Counter[str] = Counter()
    for job in state.all_jobs if state.settings.places else ():
        if job.state in ("RUNNING", "SUSPENDED") and job.key.id not in state.relocating:
            given.update(dict.fromkeys(job.nodes, job.gpus // max(len(job.nodes), 1)))
    found: dict[JobKey, str] = {}
    for job in state.all_jobs if state.settings.places else ():
        ours = job.key in state.memory.placed and job.key.id not in state.relocating and state.settings.manages(job)
        if ours and starts(job, state):
            pins = [nodes[name] for name in job.required_nodes if name in nodes]
            gone = [(node.name, node.closed_reason) for node in pins if node.closed_reason]
            gone += [(node.name, BARRED) for node in pins if node.name in job.barred]
            gone += [(node.name, OTHERS) for node in pins if given[node.name] + job.gpus // job.num_nodes > node.gpus]
            if gone:
                found[job.key] = f"{gone[0][0]}, where it was placed, {gone[0][1]}"
    return found


def lacks_lease(resident: Resident) -> bool:
    """Return True if a job stands without a lease where Slurm started it."""
    lease = resident.job.lease
    return lease is not None and lease.state in ("waiting", "yielded") and not lease.late


def sized(request: ResourceRequest, gpus: int) -> ResourceRequest:
    """Return a job's needs on one node with another number of GPUs there: as much more as it has more of those."""
    had = max(request.gpus, 1)
    return request._replace(
        gpus=gpus,
        cpus=max(request.cpus * gpus // had, 1),
        memory_mb=request.memory_mb * gpus // had,
        state_mb=request.state_mb * gpus // had,
    )
