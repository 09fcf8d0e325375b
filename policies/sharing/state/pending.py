"""Pending jobs: the demand that growing and shrinking follow.

A job waits for GPUs when

- it is held for us to place (held admission), or
- it is pending in Slurm for lack of free resources only (reason Resources or Priority, or none yet) and asks for
  GPUs of managed hosts, whether it is ours or not, or
- Slurm has started it, as it does on a further lane when lane 0 is full, and it stands without a lease because
  another job has its GPUs: it never had one, or it waits for its next turn.

A job that is being moved does not wait: its new place is kept for it.
"""

from __future__ import annotations

from cadenza.policies.core.model import ClusterSnapshot, Job
from cadenza.policies.sharing.state.host import Resident, ResourceRequest
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.state.sharing_state import WAITING_REASONS


def queued(snapshot: ClusterSnapshot, settings: SharingSettings) -> list[Job]:
    """Return the jobs that wait in Slurm's queue for GPUs of managed hosts, by priority, submission and key."""
    hosts = (node.partitions for node in snapshot.nodes if not settings.partitions.isdisjoint(node.partitions))
    shared = frozenset().union(*hosts)
    pending = (job for job in snapshot.jobs if job.state == "PENDING" and not job.held and job.gpus > 0)
    waiting = [job for job in pending if job.partition in shared and job.state_reason in WAITING_REASONS]
    return sorted(waiting, key=lambda job: (-job.slurm_priority, job.submit_s, job.key))


def lacks_lease(resident: Resident) -> bool:
    """Return True if a job stands without a lease where Slurm started it."""
    lease = resident.job.lease
    return lease is not None and lease.state in ("waiting", "yielded")


def sized(request: ResourceRequest, gpus: int) -> ResourceRequest:
    """Return a job's needs on one node with another number of GPUs there: as much more as it has more of those."""
    had = max(request.gpus, 1)
    return request._replace(
        gpus=gpus,
        cpus=max(request.cpus * gpus // had, 1),
        memory_mb=request.memory_mb * gpus // had,
        state_mb=request.state_mb * gpus // had,
    )
