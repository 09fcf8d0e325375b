"""What the agents last said: reports with their arrival, who is alive, and what changed since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cadenza.sidecar.orders import JobFacts, LeaseReport, Report
from cadenza.slurm_plugin.service.agents.agent_events import Event, changes

NEWBORN_MARGIN_S = 5.0
"""A job that registered this long before a snapshot may still be missing in it."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One host's agent as the service sees it; ``silent_s`` is the age of its last report."""

    report: Report
    alive: bool
    silent_s: float


@dataclass
class _Entry:
    report: Report
    heard_s: float
    up: bool = True
    first_seen_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Epoch time at which each lease was first reported to this service."""


class AgentBook:
    """All agents' last reports. Not thread-safe: the hub's thread owns it and hands out copies."""

    def __init__(self, alive_s: float) -> None:
        """``alive_s``: an agent that was silent for longer, seconds, does not count as alive."""
        self._alive_s = alive_s
        self._entries: dict[str, _Entry] = {}

    def hear(self, report: Report, epoch_s: float, monotonic_s: float) -> tuple[Event, ...]:
        """Take a report in and return what it changes."""
        old = self._entries.get(report.host)
        found = changes(old.report if old else None, report, epoch_s)
        known = old.first_seen_s if old else {}
        seen = {key: known.get(key, epoch_s) for key in ((one.job, one.restart) for one in report.leases)}
        self._entries[report.host] = _Entry(report, monotonic_s, first_seen_s=seen)
        if old is None or not old.up:
            found = (Event(epoch_s, "agent-up", report.host, detail=report.version), *found)
        return found

    def silence(self, epoch_s: float, monotonic_s: float) -> tuple[Event, ...]:
        """Return an event for each agent that has fallen silent since the last call."""
        fallen = []
        for host, entry in self._entries.items():
            if entry.up and monotonic_s - entry.heard_s > self._alive_s:
                entry.up = False
                detail = f"silent for {monotonic_s - entry.heard_s:.0f} s"
                fallen.append(Event(epoch_s, "agent-down", host, detail=detail))
        return tuple(fallen)

    def agents(self, monotonic_s: float) -> Mapping[str, Agent]:
        """Return every agent that ever reported, by host."""
        return {
            host: Agent(entry.report, monotonic_s - entry.heard_s <= self._alive_s, monotonic_s - entry.heard_s)
            for host, entry in self._entries.items()
        }

    def newborn(self, host: str, known: frozenset[tuple[int, int]], snapshot_s: float) -> tuple[JobFacts, ...]:
        """Return facts on jobs that a snapshot of ``snapshot_s`` could not know yet."""
        entry = self._entries.get(host)
        if entry is None:
            return ()
        return tuple(
            _facts(lease)
            for lease in entry.report.leases
            if (lease.job, lease.restart) not in known
            and entry.first_seen_s[lease.job, lease.restart] > snapshot_s - NEWBORN_MARGIN_S
        )


def _facts(lease: LeaseReport) -> JobFacts:
    return JobFacts(lease.job, lease.restart, lease.managed, 1.0, 0, "", lease.hosts)
