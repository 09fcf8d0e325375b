"""Stops of multi-node jobs: one stop step for all hosts, found from the reports of their agents (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.orders import (
    VERSION,
    CancelOrder,
    CheckpointOrder,
    CommitOrder,
    Steps,
    StopAt,
    Switched,
    ToAgent,
    YieldOrder,
)
from cadenza.sidecar.stop_step import Cancel, Commit, Plan, Progress, Raise, Wait, plan_stop

Orders: TypeAlias = list[tuple[str, ToAgent]]


@dataclass
class _Stop:
    hosts: tuple[str, ...]
    began_s: float
    timeout_s: float
    changed_s: float
    step: int = 0
    progress: dict[str, Progress] = field(default_factory=dict)

    def plan(self, now_s: float) -> Plan:
        """Plan with hosts in place of ranks; before all have reported only a refusal or the time-out counts."""
        waited_s, quiet_s = now_s - self.began_s, now_s - self.changed_s
        missing = [host for host in self.hosts if host not in self.progress]
        if not missing:
            ranks = [self.progress[host] for host in self.hosts]
            return plan_stop(ranks, stop=self.step, waited_s=waited_s, timeout_s=self.timeout_s, quiet_s=quiet_s)
        refused = next((one.refused for one in self.progress.values() if one.refused), "")
        if refused:
            return Cancel("refused", refused)
        if waited_s >= self.timeout_s:
            return Cancel("timeout", f"no progress from {', '.join(missing)} after {waited_s:.1f} s")
        return Wait()


class StopBarrier:
    """All multi-node stops under way; times are monotonic seconds."""

    def __init__(self) -> None:
        self._stops: dict[JobKey, _Stop] = {}

    @property
    def active(self) -> bool:
        """True if :meth:`tick` has a stop to watch."""
        return bool(self._stops)

    def begin(self, key: JobKey, hosts: Iterable[str], now_s: float, order: YieldOrder | CheckpointOrder) -> Orders:
        """Return the orders that start a stop on all hosts of a job; none while one is under way."""
        if key in self._stops:
            return []
        stop = self._stops[key] = _Stop(tuple(sorted(hosts)), now_s, order.timeout_s, now_s)
        return _all(stop.hosts, order)

    def on_steps(self, steps: Steps, now_s: float) -> Orders:
        """Take in a host's progress and return the orders that follow from it."""
        key = JobKey(steps.job, steps.restart)
        stop = self._stops.get(key)
        if stop is None or steps.host not in stop.hosts:
            return []
        progress = Progress(steps.highest, steps.arrived, refused=steps.refused)
        if stop.progress.get(steps.host) != progress:
            stop.progress[steps.host] = progress
            stop.changed_s = now_s
        return self._follow(key, stop, now_s)

    def on_switched(self, done: Switched) -> Orders:
        """Take in the end of a stop on one host, which ends it; return the orders that cancel it if it failed there."""
        key = JobKey(done.job, done.restart)
        stop = self._stops.get(key)
        if stop is None or done.kind == "resume" or done.host not in stop.hosts:
            return []
        # A round may have begun a stop, by older reports, of a job that has yielded since. That stop would block the
        # next one until its time-out.
        del self._stops[key]
        if done.kind in ("yield", "checkpoint"):
            return []
        return _all(stop.hosts, CancelOrder(VERSION, *key, f"{done.kind} on {done.host}: {done.note}"))

    def tick(self, now_s: float) -> Orders:
        """Return the orders that follow from the passing of time."""
        return [order for key, stop in list(self._stops.items()) for order in self._follow(key, stop, now_s)]

    def _follow(self, key: JobKey, stop: _Stop, now_s: float) -> Orders:
        plan = stop.plan(now_s)
        if isinstance(plan, Raise):
            stop.step, stop.changed_s = plan.step, now_s
            return _all(stop.hosts, StopAt(VERSION, *key, plan.step))
        if isinstance(plan, Commit):
            del self._stops[key]
            return _all(stop.hosts, CommitOrder(VERSION, *key))
        if isinstance(plan, Cancel):
            del self._stops[key]
            return _all(stop.hosts, CancelOrder(VERSION, *key, f"{plan.kind}: {plan.reason}"))
        return []


def _all(hosts: Sequence[str], order: ToAgent) -> Orders:
    return [(host, order) for host in hosts]
