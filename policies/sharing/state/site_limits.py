"""Limits of a site that pending jobs have met, and the jobs that would meet them next (pure).

Slurm names the limit in the reason of the job that it looked at (squeue(1), JOB REASON CODES). Room that is made for a
job behind it would not be used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from cadenza.policies.core.model import WAITING_REASONS, Job

Scope: TypeAlias = tuple[str, str, str]
"""A kind of limit, and who is bound by it."""

NOT_LOOKED_AT = WAITING_REASONS - {"Resources"}
"""Reasons of jobs that Slurm has not looked at on their own."""
OF_ONE_JOB = ("PerJob", "PerNode", "PerCPU", "MinCpu", "MinGRES", "MinMemory", "TimeLimit", "WallDuration")
"""Parts of the names of limits on what one job may ask for: others are not bound by them."""


class Limits:
    """Accounts, users, QOS, arrays and licenses that are at a limit, because Slurm says so of one of their jobs."""

    def __init__(self, pending: Iterable[Job]) -> None:
        self._at_limit = {
            scope: job.state_reason
            for job in pending
            if job.state_reason not in WAITING_REASONS and (scope := _scope(job, job.state_reason))
        }

    @property
    def any_met(self) -> bool:
        """Return True if any limit has been met."""
        return bool(self._at_limit)

    def reason(self, job: Job) -> str:
        """Return Slurm's reason of the job whose limit this one would meet, "" if it is free to start."""
        # A job that Slurm has not looked at on its own keeps the reason Priority, whatever limit it would meet.
        if not self._at_limit or job.state_reason not in NOT_LOOKED_AT:
            return ""
        scopes = (
            ("account", job.account, ""), ("user", job.account, job.user), ("like", job.user, job.name),
            ("qos", job.qos, ""), ("qos user", job.qos, job.user), ("qos account", job.qos, job.account),
        )  # fmt: skip
        return next((self._at_limit[scope] for scope in scopes if scope in self._at_limit), "")


def _scope(job: Job, reason: str) -> Scope | None:
    """Return the scope of the limit that a reason names, None if it binds its job alone."""
    if any(part in reason for part in OF_ONE_JOB):
        return None
    # The first that matches counts.
    scopes: tuple[tuple[bool, Scope], ...] = (
        # Limits on a group (Grp…) bind an account or a QOS as a whole, others each of its users.
        (reason.startswith("AssocGrp"), ("account", job.account, "")),
        (reason.startswith("Assoc"), ("user", job.account, job.user)),
        (reason.startswith("QOSGrp"), ("qos", job.qos, "")),
        # Slurm writes Max…PerAccount without QOS before it, though it is a limit of the job's QOS.
        ("PerAccount" in reason, ("qos account", job.qos, job.account)),
        (reason.startswith(("QOSMax", "QOSJobLimit", "QOSResourceLimit", "Max")), ("qos user", job.qos, job.user)),
        # Its licenses and array are not in the snapshot: jobs of one name ask alike.
        (reason.startswith(("Licenses", "JobArrayTaskLimit")), ("like", job.user, job.name)),
    )
    return next((scope for matches, scope in scopes if matches), None)
