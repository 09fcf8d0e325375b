"""Groups of packed jobs, as the memory keeps them and as a round's actions change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from cadenza.policies.core.actions import Action, Migrate, Pack, Resize, Unpack
from cadenza.policies.core.model import Job, JobKey

Group: TypeAlias = tuple[JobKey, ...]
"""Packed jobs; who joined last comes first."""


def standing(packs: Iterable[Group], jobs: Mapping[JobKey, Job]) -> tuple[Group, ...]:
    """Return the packs as they are now: without those who left or moved, in order of their least keys."""
    groups = []
    for pack in packs:
        there = [key for key in pack if key in jobs and jobs[key].lease is not None]
        last = set(jobs[there[-1]].leased_gpus) if there else None
        group = tuple(key for key in there if set(jobs[key].leased_gpus) == last)
        if len(group) > 1:
            groups.append(group)
    return tuple(sorted(groups, key=min))


def partners(packs: Iterable[Group]) -> dict[JobKey, frozenset[JobKey]]:
    """Return the partners of each packed job."""
    return {key: frozenset(group) - {key} for group in packs for key in group}


def group_keys(packs: Iterable[Group]) -> dict[JobKey, JobKey]:
    """Return for each packed job the least key of its pack."""
    return {key: min(group) for group in packs for key in group}


def after(packs: Iterable[Group], actions: Iterable[Action]) -> tuple[Group, ...]:
    """Return the packs once these actions are done."""
    groups = list(packs)
    for action in actions:
        if isinstance(action, Pack):
            joined = set(action.jobs)
            groups = [*(group for group in groups if joined.isdisjoint(group)), action.jobs]
        elif isinstance(action, Unpack | Migrate | Resize):
            groups = [tuple(key for key in group if key != action.job) for group in groups]
    return tuple(sorted((group for group in groups if len(group) > 1), key=min))
