"""Messages for the record count only of jobs that Slurm has, or had a while ago, on the sender's host (pure)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cadenza.policies.core.model import ClusterSnapshot, JobKey
from cadenza.sidecar.orders import Facts, LeaseLog, Switched
from cadenza.slurm_plugin.service.agents.agent_registry import NEW_JOB_MARGIN_S, Event

ForRecord: TypeAlias = Switched | LeaseLog | Event

REMEMBERED_S = 3600.0
"""Time for which a host may still speak of a job that has ended there."""
MAX_WAITING = 256
"""Messages of one host that wait for the facts about their jobs; the oldest are dropped."""


@dataclass
class Attribution:
    """The jobs of each host by Slurm's word; the hub's thread owns it. Times in seconds since the epoch."""

    _seen_s: dict[str, dict[JobKey, float]] = field(default_factory=dict)
    _waiting: defaultdict[str, deque[tuple[float, ForRecord]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_WAITING))
    )

    def knows(self, host: str, key: JobKey) -> bool:
        """Return whether Slurm has or lately had a job on a host."""
        return key in self._seen_s.get(host, ())

    def recall(self, snapshot: ClusterSnapshot) -> None:
        """Take in the jobs of the last recorded snapshot: agents may still speak of those that have ended since."""
        host_of = snapshot.host_of
        for job in snapshot.jobs:
            for node in job.nodes:
                self._seen_s.setdefault(host_of.get(node, node), {}).setdefault(job.key, snapshot.time_s)

    def take(self, message: ForRecord, now_s: float) -> list[ForRecord]:
        """Return a message if it counts; a message on a job that Slurm may have started since the facts must wait."""
        if message.job is None or message.restart is None:
            return [message]
        if self.knows(message.host, JobKey(message.job, message.restart)):
            return [message]
        self._waiting[message.host].append((now_s, message))
        return []

    def update(self, facts: Mapping[str, Facts], at_s: float) -> list[ForRecord]:
        """Take in the jobs of all hosts as of ``at_s``; return the messages that have waited for them."""
        for host in self._seen_s.keys() | facts.keys():
            known = self._seen_s.get(host, {})
            recent = {key: seen_s for key, seen_s in known.items() if at_s - seen_s < REMEMBERED_S}
            told = facts[host].jobs if host in facts else ()
            self._seen_s[host] = recent | {JobKey(job.job, job.restart): at_s for job in told}
        confirmed: list[ForRecord] = []
        for host, waiting in list(self._waiting.items()):
            del self._waiting[host]
            for arrived_s, message in waiting:
                if self.knows(host, JobKey(message.job or 0, message.restart or 0)):
                    confirmed.append(message)
                elif arrived_s > at_s - NEW_JOB_MARGIN_S:
                    self._waiting[host].append((arrived_s, message))
        return confirmed
