"""The agents' last reports with their arrival, the agents that are alive, and the changes since the report before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from cadenza.sidecar.orders import VERSION, JobFacts, LeaseReport, Report

NEW_JOB_MARGIN_S = 5.0
"""A job that registered this long before a snapshot may still be missing in it."""
CLOCK_TOLERANCE_S = 2.0
"""Clocks of hosts that differ by less count as equal: what they date is not more exact."""
CLOCK_WINDOW_S = 10.0
"""Reports that came in the last seconds show a host's clock."""
BACKLOG_S = 4.0
"""Reports that waited for the service come late, all at once; a clock that is behind shows for longer."""
MAX_CLOCK_REPORTS = 100


class Event(msgspec.Struct, frozen=True):
    """One change on a host. It starts a round early and goes on record.

    ``kind`` is registered, finished, state, ready, saved, lost, amiss, no room, note, prefetched, agent-up,
    agent-down, or requeued: the one that Slurm's jobs show and no report.
    """

    at_s: float
    kind: str
    host: str
    job: int | None = None
    restart: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Agent:
    """One host's agent as the service sees it; ``silent_s`` is the age of its last report.

    ``ahead_s``: seconds by which the host's clock is ahead of the service's. ``refused``: a predicate, empty unless
    the agent speaks another wire version, so that it does not count as alive.
    """

    report: Report
    alive: bool
    silent_s: float
    ahead_s: float = 0.0
    refused: str = ""


@dataclass
class _Entry:
    report: Report
    arrived_s: float
    aheads_s: deque[tuple[float, float]]
    """Arrival (monotonic) of each of the last reports, and its time by the host's clock less that of the arrival."""
    up: bool = True
    first_seen_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Epoch time at which each lease was first reported to this service."""
    refused: str = ""


class AgentRegistry:
    """All agents' last reports. Not thread-safe: the hub's thread owns it and hands out copies."""

    def __init__(self, alive_s: float) -> None:
        """``alive_s``: an agent that was silent for longer, seconds, does not count as alive."""
        self._alive_s = alive_s
        self._entries: dict[str, _Entry] = {}

    def update(self, report: Report, epoch_s: float, monotonic_s: float) -> tuple[Event, ...]:
        """Take a report in and return its changes."""
        old = self._entries.get(report.host)
        events = changes(old.report if old else None, report, epoch_s)
        before = old.first_seen_s if old else {}
        first_seen_s = {key: before.get(key, epoch_s) for key in ((one.job, one.restart) for one in report.leases)}
        aheads_s = old.aheads_s if old else deque(maxlen=MAX_CLOCK_REPORTS)
        aheads_s.append((monotonic_s, report.at_s - epoch_s))
        while aheads_s[0][0] < monotonic_s - CLOCK_WINDOW_S:
            aheads_s.popleft()
        self._entries[report.host] = _Entry(report, monotonic_s, aheads_s, first_seen_s=first_seen_s)
        if old is None or not old.up:
            events = (Event(epoch_s, "agent-up", report.host, detail=report.version), *events)
        return events

    def refuse(self, host: str, version: int, epoch_s: float, monotonic_s: float) -> tuple[Event, ...]:
        """Note that a host's agent speaks another wire version, until its next report; return an event if it is new."""
        unread = Report(VERSION, host, "", 0, 0, rotating=True, at_s=epoch_s, leases=())
        entry = self._entries.setdefault(host, _Entry(unread, monotonic_s, deque([(monotonic_s, 0.0)]), up=False))
        before, entry.refused = entry.refused, f"speaks wire version {version}, the service {VERSION}"
        entry.up = False
        return () if entry.refused == before else (Event(epoch_s, "agent-down", host, detail=entry.refused),)

    def newly_silent(self, epoch_s: float, monotonic_s: float) -> tuple[Event, ...]:
        """Return an event for each agent that has fallen silent since the last call."""
        events = []
        for host, entry in self._entries.items():
            if entry.up and monotonic_s - entry.arrived_s > self._alive_s:
                entry.up = False
                detail = f"silent for {monotonic_s - entry.arrived_s:.0f} s"
                events.append(Event(epoch_s, "agent-down", host, detail=detail))
        return tuple(events)

    def agents(self, monotonic_s: float, hosts: Iterable[str] | None = None) -> Mapping[str, Agent]:
        """Return every agent that ever reported, or those of some hosts, by host."""
        found = {}
        for host in self._entries if hosts is None else self._entries.keys() & set(hosts):
            entry = self._entries[host]
            silent_s = monotonic_s - entry.arrived_s
            alive = silent_s <= self._alive_s and not entry.refused
            found[host] = Agent(entry.report, alive, silent_s, self.ahead_s(host), entry.refused)
        return found

    def ahead_s(self, host: str) -> float:
        """Return the seconds by which a host's clock is ahead of the service's; 0 if it is about right, or unknown."""
        entry = self._entries.get(host)
        if entry is None:
            return 0.0
        # A report may come late, never early: the one that was under way for the shortest time shows the clock.
        ahead_s = max(ahead_s for _, ahead_s in entry.aheads_s)
        may_be_late = entry.aheads_s[-1][0] - entry.aheads_s[0][0] < BACKLOG_S
        if abs(ahead_s) < CLOCK_TOLERANCE_S or (ahead_s < 0 and may_be_late):
            return 0.0
        return ahead_s

    def new_jobs(self, host: str, in_facts: frozenset[tuple[int, int]], snapshot_s: float) -> tuple[JobFacts, ...]:
        """Return facts on a host's jobs that are too new for a snapshot of ``snapshot_s``."""
        entry = self._entries.get(host)
        if entry is None:
            return ()
        return tuple(
            JobFacts(lease.job, lease.restart, lease.managed, 1.0, 0, "", lease.hosts, new=True)
            for lease in entry.report.leases
            if (lease.job, lease.restart) not in in_facts
            and entry.first_seen_s[lease.job, lease.restart] > snapshot_s - NEW_JOB_MARGIN_S
        )


def changes(before: Report | None, after: Report, at_s: float) -> tuple[Event, ...]:
    """Return the differences between two reports of one host; counters and times alone are no event."""
    host, events = after.host, []
    old = {(lease.job, lease.restart): lease for lease in before.leases} if before else {}
    new = {(lease.job, lease.restart): lease for lease in after.leases}
    for key, lease in old.items():
        if key not in new:
            events.append(Event(at_s, "finished", host, *key, f"was {lease.state}"))
    for key, lease in new.items():
        events += _lease_changes(host, old.get(key), lease, at_s)
    for one in after.prefetched:
        if before is None or one not in before.prefetched:
            read = f"{one.files} files, {one.bytes >> 20} MB in {one.seconds:.1f} s"
            events.append(Event(at_s, "prefetched", host, one.job, one.restart, one.note or read))
    return tuple(events)


def _lease_changes(host: str, old: LeaseReport | None, new: LeaseReport, at_s: float) -> list[Event]:
    if old is None:
        return [Event(at_s, "registered", host, new.job, new.restart, new.state)]
    differences = []
    if old.state != new.state:
        differences.append(("state", f"{old.state} -> {new.state}"))
    if old.ready != new.ready:
        differences.append(("ready", new.why_not_ready))
    if new.saved and not old.saved:
        differences.append(("saved", new.note))
    if new.lost and not old.lost:
        differences.append(("lost", new.lost))
    if old.amiss != new.amiss:
        differences.append(("amiss", new.amiss))
    if new.no_room and old.no_room != new.no_room:
        differences.append(("no room", new.no_room))
    if new.note and old.note != new.note:
        differences.append(("note", new.note))
    return [Event(at_s, kind, host, new.job, new.restart, detail) for kind, detail in differences]
