"""The jobs of Slurm's queue that wait for resources, in Slurm's own order (pure).

Slurm sorts its queue by PriorityTier of the partition, then by priority, then by job id (slurm.conf(5), PriorityTier;
the main scheduler's sort in job_scheduler.c), and names what each pending job waits for (squeue(1), JOB REASON CODES).
Only the reason tells: a job that waits for a limit, a license, a dependency, its begin time or a hold has a priority,
too.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from cadenza.policies.core.model import ClusterSnapshot, Job, SiteRules
from cadenza.policies.sharing.state.sharing_state import WAITING_REASONS

MAX_TESTED = 100
"""Waiting jobs that are looked at in one round; Slurm's backfill looks at 500 (bf_max_job_test)."""
NOT_LOOKED_AT = frozenset({"", "None", "Priority"})
"""Reasons of jobs that Slurm has not looked at on their own: they may meet a limit once it does."""


class Limits:
    """Accounts, users, QOS, arrays and licenses that are at a limit, because Slurm says so of one of their jobs."""

    def __init__(self, pending: Iterable[Job]) -> None:
        self._at_limit: set[tuple[str, ...]] = set()
        for job in pending:
            if scope := _scope(job, job.state_reason):
                self._at_limit.add(scope)

    def reached(self, job: Job) -> bool:
        """Return True if a job that Slurm has not looked at on its own would meet a limit that another one has met."""
        if job.state_reason not in NOT_LOOKED_AT or not self._at_limit:
            return False
        scopes = (
            ("account", job.account), ("user", job.account, job.user), ("qos", job.qos), ("qos", job.qos, job.user),
            ("qos", job.qos, job.account), ("like", job.user, job.name),
        )  # fmt: skip
        return not self._at_limit.isdisjoint(scopes)


def _scope(job: Job, reason: str) -> tuple[str, ...] | None:
    """Return whom a limit of this reason binds, None for a reason that is no limit (squeue(1), slurm.h).

    Assoc… are limits of an association: AssocGrp… of the account, the others of its user. QOSGrp… bind the QOS, the
    other QOS… its users or accounts.
    """
    if reason.startswith("AssocGrp"):
        return "account", job.account
    if reason.startswith(("Assoc", "AssociationJobLimit", "MaxTRESPerUser")):
        return "user", job.account, job.user
    if reason.startswith("QOSGrp"):
        return "qos", job.qos
    if reason.startswith("QOS"):
        return ("qos", job.qos, job.account) if "PerAccount" in reason else ("qos", job.qos, job.user)
    if reason.startswith(("Licenses", "JobArrayTaskLimit")):
        return "like", job.user, job.name  # its licenses are not in the snapshot: jobs of the same name ask alike
    return None


def waiting_jobs(snapshot: ClusterSnapshot, most: int = MAX_TESTED) -> list[Job]:
    """Return the first jobs of Slurm's queue that wait for GPUs only, whoever's they are, in Slurm's order."""
    pending = [job for job in snapshot.jobs if job.state == "PENDING"]
    limits = Limits(pending)
    waiting = (
        job
        for job in pending
        if job.gpus > 0
        and not job.held
        and job.state_reason in WAITING_REASONS
        and (job.eligible_s or 0.0) <= snapshot.time_s
        and not limits.reached(job)
    )
    return nsmallest(most, waiting, key=lambda job: place_in_queue(job, snapshot.site))


def place_in_queue(job: Job, site: SiteRules) -> tuple[int, int, int]:
    """Return the sort key of Slurm's queue."""
    return -site.tier(job.partition), -job.slurm_priority, job.key.id
