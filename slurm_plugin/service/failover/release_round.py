"""Release of our holds, suspends and pins: at the end of the service, and on an admin's request."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    Outcome,
    Place,
    Release,
    Requeue,
    SetFactor,
    Suspend,
    Unsuspend,
)
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.policies.guard import Guarded
from cadenza.policies.ledger import remember
from cadenza.policies.round import Clock, Gateway, RoundReport
from cadenza.policies.sharing.state.settings import REQUEUE_HOLD
from cadenza.policies.sharing.turns.lanes import drained_by_us
from cadenza.policies.sharing.turns.slurm_sync import release_plan
from cadenza.slurm_plugin.service.store.writer import SqliteStore

UNKNOWN_FACTOR = -1
"""Stands for the SiteFactor of a job of which no record tells it."""
IN_TRANSIT_S = 300.0
"""A job that was requeued into a hold this short a time before the service of another host went may be on a move of
that service's, whose record is lost with the host."""


def adopted(snapshot: ClusterSnapshot, partitions: Collection[str]) -> Memory:
    """Return the memory of the suspends, drains and SiteFactors that must be ours, for a service whose store was lost.

    Jobs of other partitions may have a SiteFactor of another service.
    """
    return Memory(
        # Slurm shows SiteFactors of waiting jobs only (sprio(1)): each that may have made way counts as having one.
        factors={
            job.key.id: UNKNOWN_FACTOR
            for job in snapshot.jobs
            if job.opted_in and job.requeueable and job.partition in partitions
        },
        # Only the service suspends a job whose agents report that it has yielded.
        suspended=frozenset(
            job.key
            for job in snapshot.jobs
            if job.state == "SUSPENDED" and job.opted_in and job.lease is not None
            if job.lease.state in ("yielded", "waiting")
        ),
        drained=frozenset(
            node.name for node in snapshot.nodes if node.drained and node.lane > 0 and drained_by_us(node, Memory())
        ),
    )


def taken_over(memory: Memory, snapshot: ClusterSnapshot, partitions: Collection[str], *, stale: bool) -> Memory:
    """Return the memory of a service that acts after the one of another host, whose record it does not have.

    ``stale``: this one has not acted for so long that SiteFactors of its own record may have changed since.
    """
    theirs = adopted(snapshot, partitions)
    held = {
        job.key: snapshot.time_s
        for job in snapshot.jobs
        if job.held and job.opted_in and job.partition in partitions and job.state_reason == REQUEUE_HOLD
        if snapshot.time_s - job.submit_s <= IN_TRANSIT_S  # a requeue submits it anew
    }
    return replace(
        memory,
        suspended=memory.suspended | theirs.suspended,
        drained=memory.drained | theirs.drained,
        held={**held, **memory.held},
        factors=theirs.factors if stale else memory.factors,
    )


def release_round(gateway: Gateway, clock: Clock, store: SqliteStore, reason: str) -> RoundReport:
    """Release everything that is ours, past the guard, as a round on record, for the audit and the next service.

    Twice does no harm. Errors of ``gateway.read`` pass through. The memory forgets a job only after its release: the
    next service continues a release that dies half-way.
    """
    started = clock.now()
    snapshot, before = gateway.read(), store.memory()
    actions = release_plan(snapshot, before, reason)
    guarded = tuple(Guarded(action, allowed=True, reason="release") for action in actions)
    memory = remember(before, actions, snapshot)
    decision = Decision(actions, memory)
    number = store.begin(snapshot, decision, guarded, memory)
    outcomes = tuple((action, gateway.apply(action)) for action in actions)
    store.finish(number, outcomes, clock.now() - started)
    store.amend(number, settled(memory, before, outcomes))
    return RoundReport(number, snapshot, decision, guarded, outcomes)


def release_unrecorded(
    gateway: Gateway, memory: Memory, reason: str, snapshot: ClusterSnapshot | None = None
) -> tuple[tuple[Action, Outcome], ...]:
    """Release everything that is ours by ``memory`` where no round can be written down, as on a full disk.

    The record of what is ours stays as it is: the next service sees in Slurm what is left of it. ``snapshot``: as
    Slurm was read already.
    """
    actions = release_plan(snapshot or gateway.read(), memory, reason)
    return tuple((action, gateway.apply(action)) for action in actions)


def settled(memory: Memory, before: Memory, outcomes: Iterable[tuple[Action, Outcome]]) -> Memory:
    """Return a round's memory corrected by its outcomes (pure).

    The ledger writes everything down before it happens.
    """
    suspended, placed, drained = set(memory.suspended), set(memory.placed), set(memory.drained)
    held, requeued, factors = dict(memory.held), dict(memory.requeued), dict(memory.factors)
    for action, outcome in outcomes:
        if (isinstance(action, SetFactor) and not outcome.ok) or (isinstance(action, MakeWay) and not outcome.left):
            keys = action.jobs if isinstance(action, MakeWay) else (action.job,)
            for number in (key.id for key in keys):
                factors.pop(number, None)
                factors |= {number: before.factors[number]} if number in before.factors else {}
        # A suspend that failed may have happened all the same, which the next snapshot shows; one that never left is
        # not ours.
        elif isinstance(action, Suspend) and not outcome.left and action.job not in before.suspended:
            suspended.discard(action.job)
        elif isinstance(action, Requeue) and not outcome.left:
            successor = JobKey(action.job.id, action.job.restart + 1)  # the hold is that of the next start
            for times_s, earlier, key in ((held, before.held, successor), (requeued, before.requeued, action.job)):
                times_s.pop(key, None)
                times_s.update({key: earlier[key]} if key in earlier else {})
        elif isinstance(action, DrainNode) and not outcome.left and action.node not in before.drained:
            drained.discard(action.node)
        elif isinstance(action, Unsuspend) and outcome.ok:
            suspended.discard(action.job)
        # Else the job's hold would look like a later one of its owner, and stay for ever.
        elif isinstance(action, Place | Release) and not outcome.ok and action.job not in before.placed:
            placed.discard(action.job)
    return replace(
        memory,
        suspended=frozenset(suspended),
        placed=frozenset(placed),
        held=held,
        requeued=requeued,
        factors=factors,
        drained=frozenset(drained),
    )
