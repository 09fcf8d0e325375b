"""Starvation bound of preemption: a job that had no turn for a day comes first for an hour."""

from __future__ import annotations

from math import inf

from cadenza.policies.core.model import Job, Progress
from cadenza.policies.sharing.state.sharing_state import SharingState

STARVING_S = 24 * 3600.0
"""Wait since its last turn, or its submission, after which a job is owed one, in seconds."""
OWED_TURN_S = 3600.0
"""Turn that it is owed then, in seconds with its GPUs."""


def waits_since(job: Job, progress: Progress) -> float:
    """Return when a job that does not run began to wait, seconds since the epoch."""
    return progress.ran_s if progress.ran_s is not None else job.submit_s


def owed_turns(state: SharingState) -> dict[int, float]:
    """Return the jobs that come before all others of their priority, by id, each with its submission.

    Of those who are owed a turn, the first submitted comes first: as long as all that are owed have their turns within
    a day, a job waits for a day and one turn of each other. The turn of such a job begins when it has its GPUs, and the
    memory keeps when that was.
    """
    now_s, began = state.now_s, dict(state.memory.sharing.owed_s)
    owed: dict[int, float] = {}
    kept: dict[int, float] = {}
    jobs = [*state.jobs.values(), *state.pending]
    for job in jobs:
        number, progress = job.key.id, job.progress
        if progress is None:
            continue
        runs = progress.running
        if not runs and now_s >= waits_since(job, progress) + STARVING_S and number not in began:
            began[number] = inf
        if number not in began:
            continue
        since_s = min(began[number], now_s) if runs else began[number]
        if now_s < since_s + OWED_TURN_S:  # true of a turn that has not begun
            kept[number] = since_s
            owed[number] = job.submit_s
    if kept != dict(state.memory.sharing.owed_s):
        state.remember(owed_s=tuple(sorted(kept.items())))
    return owed
