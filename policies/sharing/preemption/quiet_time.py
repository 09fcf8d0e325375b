"""Time until which a preemptive decision stands if nothing happens: rounds before it may be left out."""

from __future__ import annotations

from cadenza.policies.core.model import Job
from cadenza.policies.ordering.levels import leaves_level_s
from cadenza.policies.ordering.ranking import progress_of
from cadenza.policies.sharing.preemption import starvation
from cadenza.policies.sharing.preemption.host_emptying import ROOM_SLICES
from cadenza.policies.sharing.preemption.reservation import RESERVED_AFTER_S, can_leave
from cadenza.policies.sharing.state.sharing_state import SharingState


def note_quiet_time(state: SharingState) -> None:
    """Note when time alone can next change the decision: a level is left, a wait is long, a job may move again.

    While a job is on its way, starts, stops or is not ours, each round has to look.
    """
    jobs = [job for job in state.all_jobs if job.gpus]
    if state.giving_back or not all(_settled(state, job) for job in jobs):
        return
    now_s, sharing = state.now_s, state.memory.sharing
    ends = [
        starvation.waits_since(job, progress) + starvation.STARVING_S
        for job in jobs
        if not (progress := progress_of(job)).running
    ]
    ends += [job.submit_s + RESERVED_AFTER_S for job in jobs if job.state == "PENDING" and not can_leave(job)]
    ends += [began_s + starvation.OWED_TURN_S for _, began_s in sharing.owed_s if began_s is not None]
    ends += [moved_s + ROOM_SLICES * state.settings.slice_s for _, moved_s in sharing.moved_s]
    levels = [leaves_level_s(job, now_s) for job in jobs]  # by rounding it may be now, and the level still the old one
    state.quiet_until_s = min([*levels, *(end_s for end_s in ends if end_s > now_s)], default=0.0)


def _settled(state: SharingState, job: Job) -> bool:
    """Return True for a job of ours that waits in our hold, runs and can be stopped, or has yielded for good."""
    if job.relocating is not None or not state.settings.manages(job):
        return False
    if job.state == "PENDING":
        return job.held
    lease = job.lease
    if lease is None or lease.exclusive or lease.lost:
        return False
    if lease.state == "held":
        return lease.ready and job.state == "RUNNING"
    return lease.state == "yielded" and (job.state == "SUSPENDED" or not state.settings.suspend)
