"""Which jobs run packed: groups as the memory keeps them, and what a round's actions make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from cadenza.policies.core.actions import Action, Migrate, Pack, Resize, Unpack
from cadenza.policies.core.decision import SharingMemory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.sharing.elastic.feedback import noted

Group: TypeAlias = tuple[JobKey, ...]
"""Packed jobs; who joined last comes first."""


def standing(packs: Iterable[Group], jobs: Mapping[JobKey, Job]) -> tuple[Group, ...]:
    """Return the packs as they are now: without those who left or moved, in order of their least keys."""
    found = []
    for pack in packs:
        there = [key for key in pack if key in jobs and jobs[key].lease is not None]
        last = _gpus(jobs[there[-1]]) if there else None
        group = tuple(key for key in there if _gpus(jobs[key]) == last)
        if len(group) > 1:
            found.append(group)
    return tuple(sorted(found, key=min))


def _gpus(job: Job) -> frozenset[object]:
    return frozenset(job.lease.gpus) if job.lease is not None else frozenset()


def partners(packs: Iterable[Group]) -> dict[JobKey, frozenset[JobKey]]:
    """Return for each packed job whom it is packed with."""
    return {key: frozenset(group) - {key} for group in packs for key in group}


def units(packs: Iterable[Group]) -> dict[JobKey, JobKey]:
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


def remember_sharing(memory: SharingMemory, actions: Sequence[Action], snapshot: ClusterSnapshot) -> SharingMemory:
    """Return the memory with a round's packs and moves added and everything of jobs that are gone dropped."""
    jobs = snapshot.by_key
    moves = [a for a in actions if isinstance(a, Migrate | Resize) and a.job in jobs and jobs[a.job].lease is not None]
    if memory == _NOTHING and not moves and not any(isinstance(action, Pack) for action in actions):
        return memory
    ids = {key.id for key in jobs}
    moved = dict(memory.moved_s) | {action.job.id: snapshot.time_s for action in moves}
    resized = [jobs[action.job] for action in moves if isinstance(action, Resize)]
    gpus = {job.key.id: job.gpus for job in resized} | dict(memory.asked_gpus)
    nodes = {job.key.id: job.num_nodes for job in resized if job.num_nodes > 1} | dict(memory.asked_nodes)
    return replace(
        memory,
        packs=tuple(group for group in after(memory.packs, actions) if jobs.keys() >= set(group)),
        lost=tuple(pair for pair in memory.lost if (pair.model and pair.other_model) or jobs.keys() >= set(pair[:2])),
        alone=tuple(row for row in memory.alone if row.job in jobs),
        loans=tuple(loan for loan in memory.loans if loan.job in jobs),
        moved_s=tuple(sorted((number, at_s) for number, at_s in moved.items() if number in ids)),
        growths=noted(memory.growths, actions, snapshot),
        asked_gpus=tuple(sorted(row for row in gpus.items() if row[0] in ids)),
        asked_nodes=tuple(sorted(row for row in nodes.items() if row[0] in ids)),
    )


_NOTHING = SharingMemory()
