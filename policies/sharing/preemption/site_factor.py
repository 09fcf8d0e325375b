"""SiteFactor of jobs that made way: their level in Slurm's own priority, beside all factors of the site.

Slurm adds SiteFactor to the factors of the site (priority/multifactor; scontrol(1), SiteFactor). Only jobs that we
requeued have one: a job that Slurm, its owner or an admin requeued comes back as it was submitted.
"""

from __future__ import annotations

from cadenza.policies.core.actions import SetFactor
from cadenza.policies.core.model import Job, SiteRules
from cadenza.policies.ordering.ranking import first_submit_s
from cadenza.policies.sharing.preemption.standing import Standings
from cadenza.policies.sharing.state.sharing_state import SharingState

LOWEST_FACTOR = -(2**30)
"""Slurm keeps the factor in 32 bits, with an offset of 2**31 (NICE_OFFSET of slurm.h)."""
BEHIND_S = 600.0
"""Time for which a job stays behind the one that it made way for, until that one has started."""


def powerless_reason(site: SiteRules) -> str | None:
    """Return why a SiteFactor changes nothing on a site, so that jobs which leave would come back first; else None.

    A priority never falls below 1 (priority_multifactor, ``get_priority_internal``): where all weights are 0, all jobs
    have 1, whatever their factor is, and Slurm starts the one with the lowest id.
    """
    if not site.multifactor:
        return "waits in Slurm's queue; nobody makes way: priority/basic has no SiteFactor (cadenza doctor)"
    if not site.points:
        return "waits in Slurm's queue; nobody makes way: all of the site's priority weights are 0 (cadenza doctor)"
    return None


def level_factor(standings: Standings, job: Job) -> int:
    """Return the SiteFactor of a job by its level, and by the age that its requeue took from it.

    Slurm counts the age of a requeued job anew (job_mgr.c, accrue_time). It has waited and run since its submission, so
    what it had is made up for: a job that can leave waits no longer in the end than one that cannot.
    """
    site, settings = standings.site, standings.state.settings
    points = settings.level_points * site.points * standings.level(job)
    age_s = min(max(job.submit_s - first_submit_s(job), 0.0) / site.max_age_s, 1.0) if site.max_age_s > 0 else 0.0
    return max(int(site.weights.get("age", 0) * age_s - points), LOWEST_FACTOR)


def behind(standings: Standings, job: Job, waiting: Job) -> int:
    """Return the SiteFactor with which a running job comes back behind the one that it makes way for.

    Slurm shows the priority with which a running job started, its age then included; without that age it is less.
    """
    had = standings.state.memory.factors.get(job.key.id, 0)
    rest = job.slurm_priority - had
    least = waiting.slurm_priority - 1 - rest
    return max(min(level_factor(standings, job), least), LOWEST_FACTOR)


def set_factors(state: SharingState) -> None:
    """Give each waiting job that made way the factor of its level, and take it from jobs that others requeued."""
    standings = Standings(state)
    for job in state.all_jobs:
        had = state.memory.factors.get(job.key.id, 0)
        if job.state != "PENDING" or not state.settings.manages(job):
            continue
        move = standings.moves.get(job.key.id)
        ours = move is not None and move.successor == job.key and not move.shares
        if not ours or move is None:
            if had:
                state.factors.append(SetFactor(job.key, 0, "was requeued by others: it waits as it was submitted"))
            continue
        waiting = state.snapshot.by_id.get(move.for_job.id) if move.for_job is not None else None
        since_s = move.phase.since_s
        stays = waiting is not None and waiting.key == move.for_job and waiting.state == "PENDING"
        if stays and state.now_s < since_s + BEHIND_S:
            continue
        factor = level_factor(standings, job)
        if factor != had:
            level = standings.level(job)
            state.factors.append(SetFactor(job.key, factor, f"level {level} of attained GPU time"))
