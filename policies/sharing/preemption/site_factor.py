"""SiteFactor of jobs that made way: their level in Slurm's own priority, added to all factors of the site.

Slurm adds SiteFactor to the factors of the site (priority/multifactor; scontrol(1), SiteFactor). Only jobs that we
requeued have one: a job that Slurm, its owner or an admin requeued comes back as it was submitted.
"""

from __future__ import annotations

from cadenza.policies.core.actions import SetFactor
from cadenza.policies.core.model import Job, SiteRules
from cadenza.policies.core.move import Move
from cadenza.policies.ordering.ranking import first_submit_s
from cadenza.policies.sharing.preemption.standing import LAST_LEVEL, Standings
from cadenza.policies.sharing.state.round_state import RoundState

LOWEST_FACTOR = -(2**30)
"""Slurm keeps the factor in 32 bits, with an offset of 2**31 (NICE_OFFSET of slurm.h); so too above 0."""
GAIN = 0.5
"""Part of the last level's points that a job gains where few can leave."""
GAIN_BELOW = 1 / 3
"""The ``movable_part`` below which it gains some: half of all GPU time belongs to jobs that can leave."""
BEHIND_S = 600.0
"""Time for which a job stays behind the one that it made way for, until that one has started."""


def powerless_reason(site: SiteRules) -> str | None:
    """Return why a SiteFactor changes nothing on a site, so that jobs which leave would come back first; else None.

    A priority never falls below 1 (priority_multifactor, ``get_priority_internal``): where all weights are 0, all jobs
    have 1, whatever their factor is, and Slurm starts the one with the lowest id.
    """
    if site.unread:
        return f"waits in Slurm's queue; nobody makes way until the site's {', '.join(site.unread)} could be read"
    if not site.multifactor:
        return "waits in Slurm's queue; nobody makes way: priority/basic has no SiteFactor (cadenza doctor)"
    if not site.points:
        return "waits in Slurm's queue; nobody makes way: all of the site's priority weights are 0 (cadenza doctor)"
    return None


def behind(standings: Standings, job: Job, waiting: Job) -> int:
    """Return the SiteFactor with which a running job comes back behind the one that it makes way for.

    Slurm shows the priority with which a running job started, its age then included; without that age it is less.
    """
    had = standings.state.memory.factors.get(job.key.id, 0)
    # At equal priorities Slurm takes the lower job id, which may be that of the job that leaves.
    most = waiting.slurm_priority - 1 - (job.slurm_priority - had)
    return max(min(-level_points(standings, job), most), LOWEST_FACTOR)


def level_points(standings: Standings, job: Job) -> int:
    """Return the points that a job loses by its level; below 0, those that it gains.

    The last level costs a part of the site's weights, so fair share and QOS still decide between accounts and classes.
    That is for jobs which make way for each other.
    """
    # Where few can leave, the job that one made way for is soon done, and the GPUs would go to jobs that keep them to
    # their end. So the level counts less, and a job gains points: in Slurm alone it would have its GPUs still.
    part = standings.movable_part
    lost = standings.level(job) / LAST_LEVEL * part
    # One of whole hosts gains none: first in the queue, it would keep hosts idle until they are empty (decision 0010).
    gained = 0.0 if job.gpus >= standings.widest else GAIN * max(1.0 - part / GAIN_BELOW, 0.0)
    return int((lost - gained) * standings.state.settings.level_points * standings.site.points)


def set_factors(state: RoundState) -> None:
    """Give each waiting job that made way the factor of its level, and take it from jobs that others requeued."""
    if not state.jobs.queue:
        return
    standings, factors = Standings(state), state.outcome.factors
    ours = state.memory.factors
    for job in [job for job in state.jobs.queue if job.key.id in standings.moves or job.key.id in ours]:
        had = ours.get(job.key.id, 0)
        move = standings.moves.get(job.key.id)
        if not state.settings.manages(job) or (move is None and not had):
            continue
        # 1. It was requeued by others, or is in the queue for another reason.
        if move is None or move.successor != job.key or move.shares:
            if had:
                factors.append(SetFactor(job.key, 0, "was requeued by others: it waits as it was submitted"))
            continue
        # 2. After a day its level counts no more: only the age is left that the requeue took.
        if standings.starves(job):
            factor = _lost_age(standings, job)
            if factor > had:
                factors.append(SetFactor(job.key, factor, "has waited for a day since it made way"))
            continue
        # 3. It stays behind the job that it made way for until that one runs. Once is enough: Slurm computes priorities
        #    anew every five minutes only (PriorityCalcPeriod), and until then shows the ones before.
        if had != move.factor or _stands_behind(move, state):
            continue
        # 4. It gets the priority with which it started first, with the age since its submission, less its level.
        factor = _settled_factor(standings, job, move, had)
        if factor != had:
            factors.append(SetFactor(job.key, factor, f"level {standings.level(job)} of attained GPU time"))


def _lost_age(standings: Standings, job: Job) -> int:
    """Return the points of age that a job had when it was requeued last; Slurm counts them anew from there."""
    site = standings.site
    had_s = max(job.submit_s - first_submit_s(job), 0.0)
    return int(site.weights.get("age", 0) * min(had_s / site.max_age_s, 1.0)) if site.max_age_s > 0 else 0


def _stands_behind(move: Move, state: RoundState) -> bool:
    waiting = state.snapshot.by_id.get(move.for_job.id) if move.for_job is not None else None
    waits = waiting is not None and waiting.key == move.for_job and waiting.state == "PENDING"
    return waits and state.now_s < move.phase.since_s + BEHIND_S


def _settled_factor(standings: Standings, job: Job, move: Move, had: int) -> int:
    """Return the SiteFactor of a job that made way, once it need not stand behind others."""
    # A requeue takes the job's age (job_mgr.c, accrue_time), and its own run has lowered its user's fair share. A job
    # that cannot leave loses neither: Slurm started it by the priority of that moment, and it runs to its end.
    site = standings.site
    shown = job.slurm_priority - had
    base = shown if move.base is None else move.base
    rest = shown if job.slurm_priority > 1 else base  # Slurm shows no less than 1, however low the sum is
    waited_s = max(standings.now_s - first_submit_s(job), 0.0)
    age = site.weights.get("age", 0) * min(waited_s / site.max_age_s, 1.0) if site.max_age_s > 0 else 0.0
    factor = int(base + age - level_points(standings, job) - rest)
    return min(max(factor, LOWEST_FACTOR), -LOWEST_FACTOR) or -1  # 0 would mean that it is not ours
