"""Requeues of managed jobs that are not ours, as by Slurm's preemption, with the job that got their nodes (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey
from cadenza.slurm_plugin.service.agents.agent_registry import Event

NAMED_WITHIN_S = 120.0
"""Longest wait for the start of the job that gets the nodes: the preempted one has KillWait or GraceTime to end."""
TICK_S = 1.0
"""Slurm's times are whole seconds, rounded down."""


@dataclass
class SlurmRequeues:
    """Follows the rounds' snapshots; each requeue gives one event."""

    before: ClusterSnapshot | None = None
    _unnamed: dict[JobKey, tuple[float, float, tuple[str, ...]]] = field(default_factory=dict)
    """New incarnations for whose nodes no job has started yet, with the time, the time of the
    round before it, and those nodes."""

    def observe(self, snapshot: ClusterSnapshot, memory: Memory) -> tuple[Event, ...]:
        """Return the events since the last snapshot; ``memory`` has the requeues that we ordered."""
        before, self.before = self.before, snapshot
        if before is None:
            return ()
        # 1. Incarnations that replaced one that ran, without an order of ours: a requeue keeps the job's id and raises
        #    its restart count, and Slurm does not say who asked for it.
        for job in snapshot.jobs:
            old = before.by_id.get(job.key.id)
            if old is None or not job.opted_in or not old.nodes or job.key.restart <= old.key.restart:
                continue
            if old.key not in memory.requeued:
                self._unnamed[job.key] = snapshot.time_s, before.time_s - TICK_S, old.nodes
        # 2. The first job that has started on their nodes since, as Slurm keeps no record of the job for which it
        #    preempted another one.
        events = []
        for key, (at_s, since_s, nodes) in tuple(self._unnamed.items()):
            others = [
                other
                for other in snapshot.jobs
                if other.key.id != key.id
                and other.start_s is not None
                and other.start_s >= since_s
                and not set(nodes).isdisjoint(other.nodes)
            ]
            if not others and snapshot.time_s - at_s < NAMED_WITHIN_S:
                continue
            del self._unnamed[key]
            first = min(others, key=lambda other: (other.start_s, other.key), default=None)
            events.append(Event(at_s, "requeued", nodes[0], *key, _sentence(first)))
        return tuple(events)


def _sentence(other: Job | None) -> str:
    if other is None:
        return "not by Cadenza: by Slurm, its owner or an admin"
    return f"not by Cadenza; job {other.key} (QOS {other.qos}, partition {other.partition}) then started on its nodes"
