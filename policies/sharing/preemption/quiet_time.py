"""Time until which a preemptive decision stands if nothing happens: rounds before it may be left out."""

from __future__ import annotations

from cadenza.policies.core.model import Job
from cadenza.policies.ordering.levels import leaves_level_s
from cadenza.policies.sharing.preemption.join_idle import JOIN_AFTER_S
from cadenza.policies.sharing.preemption.make_way import AGAIN_S
from cadenza.policies.sharing.preemption.site_factor import BEHIND_S
from cadenza.policies.sharing.preemption.standing import COST_S, NEWS_S, QUANTUM_COSTS, Standings
from cadenza.policies.sharing.state.round_state import RoundState

CALC_PERIOD_S = 300.0
"""Slurm computes all priorities anew after this time (slurm.conf(5), PriorityCalcPeriod)."""


def note_quiet_time(state: RoundState) -> None:
    """Note when time alone can next change the decision: a level is left, a quantum ends, priorities are new.

    While a job is on its way, starts, stops or is not ours, each round has to look. While no job waits, nothing is
    decided, and all that a round notes is which jobs keep checkpoints.
    """
    if state.who.giving_back or state.where.relocating or state.where.making_way:
        return
    jobs = [job for job in state.jobs.started if job.gpus]
    for job in jobs:
        if not _settled(state, job):
            return
    now_s, running = state.now_s, [job for job in jobs if job.state == "RUNNING"]
    if not state.jobs.queue and len(running) == len(jobs) and state.who.holders.issuperset(state.jobs.ours):
        state.outcome.quiet_until_s = now_s + NEWS_S
        return
    ends, standings = [now_s + CALC_PERIOD_S], Standings(state)
    costs_s = [(move.cost_s or COST_S) + move.lost_s for move in state.memory.moves]
    longest_s = QUANTUM_COSTS * max(COST_S, *costs_s, 0.0)  # most jobs have had their GPUs for longer
    for job in running:
        had_s = standings.had_s(job)
        ends.append(leaves_level_s(job, now_s))
        if had_s <= JOIN_AFTER_S:
            ends.append(now_s + JOIN_AFTER_S - had_s)
        if had_s <= longest_s:
            ends.append(now_s + standings.quantum_left_s(job))
    ends += [at_s + AGAIN_S for at_s in state.memory.made_way.values()]
    ends += [move.phase.since_s + BEHIND_S for move in state.memory.moves if move.over]
    # A level may be left now by rounding, and the job be still in the old one.
    state.outcome.quiet_until_s = min(end_s for end_s in ends if end_s > now_s)


def _settled(state: RoundState, job: Job) -> bool:
    """Return True for a started job that is not ours, runs and can be stopped, or has yielded for good."""
    if not state.settings.manages(job):
        return job.state != "OTHER"
    lease = job.lease
    if lease is None or lease.exclusive or lease.lost:
        return False
    if lease.state == "held":
        return lease.ready and job.state == "RUNNING"
    return lease.state == "yielded" and (job.state == "SUSPENDED" or not state.settings.suspend)
