"""Starvation bound of preemption: a job that had no turn for a day comes first for an hour."""

from __future__ import annotations

from cadenza.policies.core.model import Job, Progress
from cadenza.policies.ordering.ranking import progress_of
from cadenza.policies.sharing.state.sharing_state import SharingState

STARVING_S = 24 * 3600.0
"""Wait since its last turn, or its submission, after which a job is owed one, in seconds."""
OWED_TURN_S = 3600.0
"""Turn that it is owed then, in seconds with its GPUs."""


def waits_since(job: Job, progress: Progress) -> float:
    """Return when a job that does not run began to wait, seconds since the epoch."""
    return progress.ran_s if progress.ran_s is not None else job.submit_s


def owed_turns(state: SharingState) -> dict[int, int]:
    """Return the places of the jobs that come before all others of their priority, by id, 0 first.

    Of those who are owed a turn, the one that waits longest comes first, and keeps its place until the turn is over.
    Then it is behind all that wait, so a job waits for a day and at most one turn of each job that waited longer,
    however many there are. The turn of such a job begins when it has its GPUs; the memory keeps when that was, in order
    of the places.
    """
    now_s, began = state.now_s, dict(state.memory.sharing.owed_s)
    live = {job.key.id: job for job in state.all_jobs}
    # 1. Jobs whose wait has become too long.
    waits = [
        (waits_since(job, job.progress), job.key)
        for job in (*state.jobs.values(), *state.pending)
        if job.progress is not None and not job.progress.running and job.key.id not in began
    ]
    began.update((key.id, None) for since_s, key in sorted(waits) if now_s >= since_s + STARVING_S)
    # 2. Turns that have not begun, or are not over.
    kept = {
        number: min(began_s or now_s, now_s) if progress_of(live[number]).running else began_s
        for number, began_s in began.items()
        if number in live and (began_s is None or now_s < began_s + OWED_TURN_S)
    }
    if tuple(kept.items()) != state.memory.sharing.owed_s:
        state.remember(owed_s=tuple(kept.items()))
    return {number: place for place, number in enumerate(kept)}
