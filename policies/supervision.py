"""Supervision of each job in a round: a job whose data makes it fail is found and left alone, the others go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Lease, Options
from cadenza.policies.core.text import printable

T = TypeVar("T")

MAX_FAULTS = 24
"""Faults that one round looks for: more than that is no fault of single jobs."""
MAX_FAULTS_OF_USER = 3
"""Faults after which all jobs of their user are left alone, so that many bad jobs cost no more than a few."""


def supervised(
    attempt: Callable[[ClusterSnapshot], T], snapshot: ClusterSnapshot, known: Mapping[JobKey, str]
) -> tuple[T, ClusterSnapshot, dict[JobKey, str]]:
    """Return the result of ``attempt``, the snapshot that it was made with, and the jobs that it leaves alone.

    ``known``: jobs that are left alone from the start, with the reason. An error of ``attempt`` that does not depend on
    the data of single jobs passes through.
    """
    faults = {key: reason for key, reason in known.items() if key in snapshot.by_key}
    found: Counter[str] = Counter()
    while True:
        current = _without(snapshot, faults)
        try:
            return attempt(current), current, faults
        except Exception as error:
            key = _culprit(attempt, snapshot, faults) if found.total() < MAX_FAULTS else None
            if key is None:
                raise
            faults[key] = _reason("it makes a decision fail", error)
            user = snapshot.by_key[key].user
            found[user] += 1
            if found[user] >= MAX_FAULTS_OF_USER:
                others = (job.key for job in snapshot.jobs if job.user == user)
                faults = {**dict.fromkeys(others, f"other jobs of {user} make decisions fail"), **faults}


def each(jobs: Iterable[Job], step: Callable[[Job], Job]) -> tuple[Job, ...]:
    """Return ``step(job)`` of each job; a job whose data makes it fail is left alone."""
    return tuple(_stepped(job, step) for job in jobs)


def _stepped(job: Job, step: Callable[[Job], Job]) -> Job:
    try:
        return step(job)
    except Exception as error:  # noqa: BLE001 - whatever a job's data does to it
        return left_alone(job, _reason("it cannot be observed", error))


def left_alone(job: Job, reason: str) -> Job:
    """Return a job with nothing but what Slurm says of it and the GPUs that it may use; it is not managed."""
    return replace(
        job,
        name="",
        command="",
        options=Options() if job.options is not None else None,
        unmanageable=reason,
        lease=Lease(job.lease.state, job.lease.gpus, exclusive=job.lease.exclusive) if job.lease is not None else None,
        profile=None,
        profile_note="",
        placement=(),
        progress=None,
    )


def _reason(effect: str, error: Exception) -> str:
    return printable(f"because of its data {effect} ({type(error).__name__}: {error})")


def _without(snapshot: ClusterSnapshot, faults: Mapping[JobKey, str]) -> ClusterSnapshot:
    if not faults:
        return snapshot
    jobs = (left_alone(job, faults[job.key]) if job.key in faults else job for job in snapshot.jobs)
    return replace(snapshot, jobs=tuple(jobs))


def _culprit(
    attempt: Callable[[ClusterSnapshot], object], snapshot: ClusterSnapshot, faults: Mapping[JobKey, str]
) -> JobKey | None:
    """Return a job without whose data ``attempt`` gets further; None if it fails without the data of any job.

    Bisection over the jobs in order of keys: with the first ``low`` of them it works, with the first ``high`` it fails.
    """
    suspects = sorted(key for key in snapshot.by_key if key not in faults)
    low, high = 0, len(suspects)
    if high == 0 or _fails(attempt, snapshot, faults, suspects):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fails(attempt, snapshot, faults, suspects[middle:]):
            high = middle
        else:
            low = middle
    return suspects[low]


def _fails(
    attempt: Callable[[ClusterSnapshot], object],
    snapshot: ClusterSnapshot,
    faults: Mapping[JobKey, str],
    suspects: Sequence[JobKey],
) -> bool:
    """Return True if ``attempt`` fails although these jobs are left alone too."""
    try:
        attempt(_without(snapshot, {**dict.fromkeys(suspects, "being looked at"), **faults}))
    except Exception:  # noqa: BLE001 - whatever a job's data does to it
        return True
    return False
