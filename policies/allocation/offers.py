"""What each job of a case can be given on each kind of node; what a profile says once is not worked out again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cadenza.policies.allocation.pareto import Kind, Options, derive, unmeasured
from cadenza.policies.core.model import Job
from cadenza.policies.core.profile import Profile

Row: TypeAlias = list[Options | None]
"""By kind; None where the job has too many GPUs for one such node."""


def offers(jobs: Sequence[Job], kinds: Sequence[Kind], margin: float) -> list[Row]:
    """Return the options of each job, all its GPUs on one node; jobs that are alike share a row."""
    every = tuple(kinds)
    keys = {gpus: repr((every, gpus, margin)) for gpus in {job.gpus for job in jobs}}  # a string keeps its hash
    rows = {gpus: [_unmeasured(kind, gpus) for kind in kinds] for gpus in keys}
    missing: dict[int, dict[Profile, None]] = {}
    for job in jobs:
        if job.profile is not None and keys[job.gpus] not in job.profile.derived:
            missing.setdefault(job.gpus, {})[job.profile] = None
    for gpus, profiles in missing.items():
        _derive_rows(list(profiles), every, gpus, margin, keys[gpus])
    return [rows[job.gpus] if job.profile is None else job.profile.derived[keys[job.gpus]] for job in jobs]


def _derive_rows(profiles: Sequence[Profile], kinds: Sequence[Kind], gpus: int, margin: float, name: str) -> None:
    keys = [derive(profiles, kind, gpus, margin) if gpus <= kind.gpus else None for kind in kinds]
    for profile in profiles:
        derived = profile.derived
        derived[name] = [None if key is None else derived[key] for key in keys]


def part(profile: Profile | None, kind: Kind, gpus: int, margin: float) -> Options:
    """Return the options of so many of a job's GPUs on one kind of node."""
    if profile is None:
        return unmeasured(kind, gpus)
    derive((profile,), kind, gpus, margin)
    found: Options = profile.derived[kind, gpus, margin]
    return found


def _unmeasured(kind: Kind, gpus: int) -> Options | None:
    return unmeasured(kind, gpus) if gpus <= kind.gpus else None
