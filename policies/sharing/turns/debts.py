"""Debts of jobs that have started anew: an earlier start kept its GPUs beyond its slice while others waited.

Agents count virtual time from a job's start, and a newcomer begins with the least of those it meets. So a requeue would
forgive a job what it had too much, and one that refuses stops until it is requeued would gain by it. The next start
therefore counts the last stretch of the one before, and its wait begins once that is paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cadenza.policies.core.decision import Debt
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.turns.contender import Contender


def with_debts(contenders: Sequence[Contender], state: RoundState) -> list[Contender]:
    """Return the contenders with what they owe, and remember what the next start of each would owe."""
    if not (contenders or state.memory.sharing.debts):
        return []
    debts = {debt.id: debt for debt in state.memory.sharing.debts}
    latest = {c.key.id: c for c in sorted(contenders, key=lambda c: c.key)}
    # A job may have no room only because of what the holder keeps: it waits as well.
    barred = {job.key for job in state.jobs.all if job.lease is not None and job.lease.no_room}
    waiting = {gpu for c in contenders if not c.holding and (c.eligible or c.key in barred) for gpu in c.gpus}
    for number, contender in latest.items():
        contested = not waiting.isdisjoint(contender.gpus)
        debts[number] = _updated(debts.get(number), contender, state.settings, contested=contested)
    live = sorted(debts.keys() & state.snapshot.by_id.keys()) if debts else ()
    kept = tuple(debts[number] for number in live if debts[number].owed_s or debts[number].next_s)
    if kept != state.memory.sharing.debts:
        state.remember(debts=kept)
    owed_s = {latest[debt.id].key: debt.owed_s for debt in kept if debt.owed_s and debt.id in latest}
    return [
        replace(
            c,
            vtime_s=c.vtime_s + owed_s[c.key] / c.weight,
            waited_s=c.waited_s if c.started else max(0.0, c.waited_s - owed_s[c.key]),
            in_debt=True,
        )
        if c.key in owed_s
        else c
        for c in contenders
    ]


def _updated(before: Debt | None, job: Contender, settings: SharingSettings, *, contested: bool) -> Debt:
    """Return a job's debt as of this round; ``contested``: others wait for its GPUs."""
    debt = before if before is not None else Debt(job.key.id, job.key.restart)
    if debt.restart != job.key.restart:
        # No more than half of what a starting job waits for its first lease.
        owed_s = min(debt.next_s, settings.lease_wait_s / 2)
        debt = Debt(job.key.id, job.key.restart, owed_s, owed_s)
    if not job.started:
        return debt
    if not job.holding or job.held_s <= settings.slice_s:
        return debt._replace(next_s=0.0)
    return debt._replace(next_s=job.held_s) if contested else debt
