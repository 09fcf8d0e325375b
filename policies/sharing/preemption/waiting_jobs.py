"""The jobs of Slurm's queue that wait for resources, in Slurm's own order (pure).

Slurm sorts its queue by PriorityTier of the partition, then by priority, then by job id (slurm.conf(5), PriorityTier;
the main scheduler's sort in job_scheduler.c), and names what each pending job waits for (squeue(1), JOB REASON CODES).
Only the reason tells: a job that waits for a limit, a license, a dependency, its begin time or a hold has a priority,
too.
"""

from __future__ import annotations

from cadenza.policies.core.idle_gpus import queues_for_gpus
from cadenza.policies.core.model import ClusterSnapshot, Job
from cadenza.policies.sharing.state.site_limits import Limits

MAX_TESTED = 100
"""Waiting jobs that are looked at in one round. Slurm's backfill looks at 500 (bf_max_job_test); in samples with up to
50 jobs in the queue no decision differed, and the pass that proves a way takes time for each job before it."""
PRIORITY_BITS = 32
"""Bits of a priority in Slurm."""


def waiting_jobs(snapshot: ClusterSnapshot, most: int = MAX_TESTED) -> list[Job]:
    """Return the first jobs of Slurm's queue that wait for GPUs only, whoever's they are, in Slurm's order."""
    pending = [job for job in snapshot.jobs if job.state == "PENDING"]
    limits, now_s, site = Limits(pending), snapshot.time_s, snapshot.site
    any_met = limits.any_met
    waiting = [
        job
        for job in pending
        if queues_for_gpus(job.state, job.gpus, job.slurm_priority, job.state_reason)
        # Slurm starts no job before that, as in the delay after a requeue, whatever reason it still shows.
        and (job.eligible_s or 0.0) <= now_s
        and not (any_met and limits.reason(job))
    ]
    tiers = {name: site.tier(name) << PRIORITY_BITS for name in {job.partition for job in waiting}}
    places = [tiers[job.partition] + job.slurm_priority for job in waiting]
    last = sorted(places, reverse=True)[most - 1] if len(places) > most else 0
    first = [(-place, job.key, job) for place, job in zip(places, waiting, strict=True) if place >= last]
    return [job for *_, job in sorted(first)[:most]]
