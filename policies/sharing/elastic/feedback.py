"""Feedback on growth: a job's throughput with more GPUs against that with fewer before (Gandiva, OSDI'18, §3.4).

A job that is not faster by the margin of packing goes back to its former size, and does not grow beyond it for as long
as a pair of jobs that lost is not packed again. Where each GPU keeps its part of the batch, an iteration with twice the
GPUs does twice the work; else it does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cadenza.policies.core.actions import Action, Resize
from cadenza.policies.core.decision import Growth
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.policies.sharing.state.measurement import Rule
from cadenza.policies.sharing.state.round_state import RoundState


def review_growth(state: RoundState) -> None:
    """Compare jobs that have grown with their speed before."""
    rule = Rule.under(state.settings, state.gandiva)
    growths = Growths(state.memory.sharing.growths, rule, state.now_s, state.gandiva.pack_again_s)
    state.remember(growths=growths.evaluate(state.jobs.ours))


def begun(actions: Sequence[Action], jobs: Mapping[JobKey, Job], now_s: float) -> Iterator[Growth]:
    """Return the growth to evaluate among actions that have left: that of jobs with a known iteration time."""
    for action in (action for action in actions if isinstance(action, Resize)):
        job = jobs.get(action.job)
        if job is None or sum(share.gpus for share in action.shares) <= job.gpus:
            continue
        pace = job.lease.pace if job.lease is not None else None
        if pace is not None and pace.iterations and not pace.co_runners:
            yield Growth(job.key.id, job.gpus, pace.iteration_s, now_s)


def noted(growths: Sequence[Growth], actions: Sequence[Action], snapshot: ClusterSnapshot) -> tuple[Growth, ...]:
    """Return the records of growth once these actions have left, by id, without those of jobs that are gone."""
    rows = {row.id: row for row in growths}
    rows.update((row.id, row) for row in begun(actions, snapshot.by_key, snapshot.time_s))
    there = {key.id for key in snapshot.by_key}
    return tuple(rows[number] for number in sorted(rows.keys() & there))


@dataclass(frozen=True, slots=True)
class Growths:
    """Growth of all jobs so far."""

    rows: tuple[Growth, ...]
    rule: Rule
    now_s: float
    again_s: float
    """Time after which a job may grow again."""

    def evaluate(self, jobs: Mapping[JobKey, Job]) -> tuple[Growth, ...]:
        """Return the rows as of now: those that paid, or have had their time, are dropped."""
        by_id = {key.id: job for key, job in jobs.items()}
        reviewed = (self._judged(row, by_id.get(row.id)) for row in self.rows)
        return tuple(row for row in reviewed if row is not None)

    def _judged(self, row: Growth, job: Job | None) -> Growth | None:
        if self.now_s - row.at_s > self.again_s:
            return None
        pace = job.lease.pace if job is not None and job.lease is not None else None
        if (
            row.vain
            or job is None
            or pace is None
            or job.gpus <= row.gpus
            or pace.co_runners
            or not self.rule.counts(pace)
        ):
            return row
        per_gpu = job.options is not None and job.options.batch == "per-gpu"
        gain = row.iteration_s / pace.iteration_s * (job.gpus / row.gpus if per_gpu else 1.0)
        result = f"with {job.gpus} GPUs it did {gain:.0%} of the work that it did with {row.gpus}"
        return None if self.rule.pays_off(gain) else row._replace(vain=result, at_s=self.now_s)
