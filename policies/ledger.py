"""Ledger of the actions that left: the policy's memory, kept true to the snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    Migrate,
    OpenNode,
    Pack,
    Place,
    Release,
    Requeue,
    Resize,
    SetFactor,
    Size,
    Suspend,
    Unsuspend,
    Yield,
)  # fmt: skip
from cadenza.policies.core.decision import Memory, SharingMemory, remembered
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.relocation.arrivals import noted_arrivals
from cadenza.policies.relocation.phases import HOLD_S, MAX_LEAVE_S
from cadenza.policies.relocation.phases import acted as moves_after
from cadenza.policies.sharing.elastic.feedback import noted
from cadenza.policies.sharing.state.groups import after
from cadenza.policies.sharing.state.settings import REQUEUE_HOLD
from cadenza.policies.sharing.turns.repair import shows

FORGETS_S = 60.0
"""A killed slurmctld forgets what it had not saved, which is a few seconds (SaveInterval of its own)."""


def remember(memory: Memory, actions: Iterable[Action], snapshot: ClusterSnapshot) -> Memory:
    """Return ``memory`` with this round's allowed actions added and everything that is over dropped."""
    acted = tuple(actions)
    alive = snapshot.by_key
    sizes = {action.job for action in acted if isinstance(action, Size)} & alive.keys()
    by_id: dict[int, list[Job]] = {}
    for job in snapshot.jobs if memory.suspended or memory.held else ():
        by_id.setdefault(job.key.id, []).append(job)
    # A suspend that never took effect, or that an admin undid, is forgotten: the snapshot does not show it. So no
    # action needs to be undone here when it fails.
    suspended = {key for key in memory.suspended if any(_still_ours(key, job) for job in by_id.get(key.id, ()))}
    suspended |= {job.key for job in snapshot.jobs if _resume_forgotten(job, memory)} if memory.resumed else set()
    held = {
        key: at_s
        for key, at_s in memory.held.items()
        if any(_still_held(key, snapshot.time_s - at_s, job) for job in by_id.get(key.id, ()))
    }
    ours = bool(memory.placed or memory.departed)
    held |= {
        job.key: snapshot.time_s for job in snapshot.jobs if job.held_at_restart or (ours and _forgotten(job, memory))
    }
    requeues = [action for action in acted if isinstance(action, Requeue)]
    # A suspended job has priority 0, and Slurm requeues it with that: it comes back held (JobHeldAdmin).
    into_hold = [one.job for one in requeues if one.hold or (one.job in alive and alive[one.job].state == "SUSPENDED")]
    ways = [action for action in acted if isinstance(action, MakeWay)]
    # Once an admin has opened a node, a later drain of it is not ours.
    drained = {node.name for node in snapshot.nodes if node.drained} & memory.drained
    opened = {action.node for action in acted if isinstance(action, OpenNode)}
    yields = {action.job: snapshot.time_s for action in acted if isinstance(action, Yield)}
    memory = noted_arrivals(memory, snapshot)
    return remembered(
        memory,
        suspended=frozenset(suspended | {action.job for action in acted if isinstance(action, Suspend)}),
        placed=frozenset(
            {key for key in memory.placed if key in alive}
            | {action.job for action in acted if isinstance(action, Place | Release)}
        ),
        departed={
            **{
                key: at_s
                for key, at_s in memory.departed.items()
                if key not in alive and snapshot.time_s - at_s <= FORGETS_S
            },
            **{key: snapshot.time_s for key in memory.placed if key not in alive},
        },
        resumed={key: at_s for key, at_s in memory.resumed.items() if key in alive}
        | {action.job: snapshot.time_s for action in acted if isinstance(action, Unsuspend)},
        repairs=_repairs(memory, acted, snapshot),
        held={
            **held,
            # A requeue raises the restart count, and the hold is that of the next start.
            **{JobKey(key.id, key.restart + 1): snapshot.time_s for key in into_hold},
        },
        requeued={
            **{
                key: at_s
                for key, at_s in memory.requeued.items()
                if key.id in snapshot.by_id and snapshot.time_s - at_s <= MAX_LEAVE_S
            },
            **{one.job: snapshot.time_s for one in requeues},
            **{key: snapshot.time_s for way in ways for key in way.jobs},
        },
        factors=_factors(memory, acted, snapshot),
        # From now on Slurm shows the changed request: only this record has the user's own.
        sized={
            **{key: (alive[key].cpus, alive[key].memory_mb) for key in sizes},
            **{key: asked for key, asked in memory.sized.items() if key in alive},
        },
        drained=frozenset((drained | {action.node for action in acted if isinstance(action, DrainNode)}) - opened),
        moves=moves_after(memory.moves, acted, snapshot.time_s),
        sharing=_remember_sharing(memory.sharing, acted, snapshot),
        last_yield_s={key: at for key, at in (*memory.last_yield_s.items(), *yields.items()) if key in alive},
    )


def _factors(memory: Memory, actions: Sequence[Action], snapshot: ClusterSnapshot) -> Mapping[int, int]:
    """Return the SiteFactors that live jobs have of us; Slurm keeps a job's factor through its requeues."""
    if not actions and memory.factors.keys() <= snapshot.by_id.keys():
        return memory.factors
    factors = {number: factor for number, factor in memory.factors.items() if number in snapshot.by_id}
    for action in actions:
        if isinstance(action, SetFactor):
            factors[action.job.id] = action.factor
        elif isinstance(action, MakeWay):
            factors.update({key.id: factor for key, factor in zip(action.jobs, action.factors, strict=True)})
    return {number: factor for number, factor in sorted(factors.items()) if factor}


def _repairs(memory: Memory, actions: Iterable[Action], snapshot: ClusterSnapshot) -> dict[JobKey, int]:
    """Return the repairs tried on each job that has not run as it should since."""
    tried = {
        key: count
        for key, count in memory.repairs.items()
        if (job := snapshot.job(key)) is not None and not (job.state == "RUNNING" and shows(job, "running"))
    }
    for action in actions:
        if isinstance(action, Suspend | Unsuspend | Requeue) and action.repair:
            tried[action.job] = tried.get(action.job, 0) + 1
    return tried


def _forgotten(job: Job, memory: Memory) -> bool:
    """Return True if slurmctld shows the hold of a requeue that we have released: it has forgotten that.

    It may have forgotten the job's start, and its end or next requeue, as well.
    """
    released = job.key in memory.placed or job.key in memory.departed
    return released and job.held and job.state_reason == REQUEUE_HOLD


def _resume_forgotten(job: Job, memory: Memory) -> bool:
    """Return True if Slurm calls a job suspended since before we resumed it; its times are whole seconds."""
    resumed_s = memory.resumed.get(job.key)
    if job.state != "SUSPENDED" or job.suspended_s is None or resumed_s is None:
        return False
    return job.suspended_s + 1.0 <= resumed_s


def _still_ours(key: JobKey, job: Job) -> bool:
    """Return True if a suspend of ours still matters to a job.

    Slurm requeues a suspended job into a hold, so it matters until that incarnation has been released as well.
    """
    if job.key == key and job.state == "SUSPENDED":
        return True
    later = job.key.id == key.id and job.key.restart - key.restart in (0, 1)
    return later and (job.state == "OTHER" or job.held)


def _still_held(key: JobKey, age_s: float, job: Job) -> bool:
    """Return True while the incarnation that a requeue of ours makes may be held for us, ``age_s`` after the requeue.

    The old incarnation may still be leaving its nodes, and Slurm shows the new one before its hold.
    """
    if job.key.restart < key.restart:
        return age_s <= MAX_LEAVE_S
    return job.key == key and (job.held or job.state == "OTHER" or age_s <= HOLD_S)


def _remember_sharing(memory: SharingMemory, actions: Sequence[Action], snapshot: ClusterSnapshot) -> SharingMemory:
    """Return the memory with a round's packs and moves added and everything of jobs that are gone dropped."""
    jobs = snapshot.by_key
    moves = [a for a in actions if isinstance(a, Migrate | Resize) and a.job in jobs and jobs[a.job].lease is not None]
    ids = snapshot.by_id.keys()
    gone = any(number not in ids for number, _ in (*memory.moved_s, *memory.asked_gpus, *memory.asked_nodes))
    packs = memory.packs or memory.lost or memory.alone or memory.loans or memory.growths
    if not (moves or gone or packs or any(isinstance(action, Pack) for action in actions)):
        return memory
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
