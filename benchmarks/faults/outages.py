"""Outages of a fault run: which ones, the jobs during each, and what a site must be told of it (pure)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from schedule import Schedule, workload
from verdict import Finding

KINDS = (
    "network", "host", "reboot", "disk-store", "disk-agents", "disk-slurm", "disk-shm", "saves", "clock", "slurmctld",
    "stop-slurmctld", "stop-slurmdbd", "stop-slurmd-lane0", "stop-cadenzad", "stop-cadenza-agent",
)  # fmt: skip
IN_REACH = ("disk-", "saves", "stop-slurmdbd", "stop-cadenza")
"""Beginnings of kinds under which Slurm reaches its nodes."""
LEAD_S = 15.0
"""Time from the first job until the outage begins."""
MOST_SUBMITTED_S = 75.0
"""Jobs are submitted for at most this long, so that the longest outage does not end with a queue of its length."""
LOAD = 1.1
"""GPU seconds of the jobs over those of the hosts while they are submitted: more than fit, so that jobs take turns."""
TOLD_AFTER = 0.6
"""Part of an outage after which it is looked at what a site is told."""
SLURMD_TIMEOUT_S = 30
"""Slurm's patience with a silent slurmd: one network cut is shorter; the other and the lost host are longer."""
STOPPED_S = 75.0
"""For this long a daemon has SIGSTOP, and no checkpoint is done."""
CLOCK_STEPS = {"node1": ("+3600", "-3600", "+0"), "ctl": ("+90", "-90", "+0")}
"""Seconds by which the clock of one host's daemons is off, each for an equal part of the outage.

On the controller more than the minute for which Slurm's time is trusted, and not an hour: a job that Slurm requeues may
start at a time of its clock, and waits for that time when the clock goes back.
"""
COLUMNS = ("fault", "where", "length", "all well after", "all jobs ended after", "jobs", "findings")


class Outage(NamedTuple):
    """One fault: what fails, where, for how long (seconds), and the words by which a site must be told.

    ``words`` is a pattern that ``cadenza top``, ``why`` or ``doctor`` must match while the fault holds; empty where
    nothing of Cadenza needs what fails.
    """

    kind: str
    target: str
    length_s: float
    words: str

    @property
    def name(self) -> str:
        """Name of the outage, also of its folder."""
        return f"{self.kind}-{self.target}-{self.length_s:.0f}s"

    @property
    def away(self) -> str:
        """What is away, as the journal of kills names it: a part of Slurm, or an agent; empty if neither is."""
        if self.kind == "stop-cadenza-agent":
            return f"{self.target}:cadenza-agent"
        if self.kind.startswith(IN_REACH):
            return ""
        return "ctl:slurmctld" if self.target == "ctl" else f"{self.target}:slurmd"


def outages(only: Collection[str] = KINDS, slurmctld_s: float = 300.0) -> tuple[Outage, ...]:
    """Return the outages of these kinds, in order; slurmctld is away for ``slurmctld_s`` seconds."""
    silent, away = r"agent (of|on) {}\b.*(silent|does not report)", "(?i)slurmctld.*not answer|unable to contact slurm"
    every = (
        Outage("network", "node1", 0.6 * SLURMD_TIMEOUT_S, silent.format("node1")),
        Outage("network", "node1", 3.0 * SLURMD_TIMEOUT_S, silent.format("node1")),
        Outage("network", "ctl", 2.0 * SLURMD_TIMEOUT_S, silent.format("node1") + "|no round for"),
        Outage("host", "node2", 3.0 * SLURMD_TIMEOUT_S, silent.format("node2")),
        Outage("reboot", "node1", 20.0, silent.format("node1")),
        Outage("disk-store", "ctl", 45.0, r"(?i)disk of \S+ is full"),
        Outage("disk-agents", "node1", 45.0, r"(?i)node1\b.*no space left"),
        Outage("disk-slurm", "ctl", 45.0, "(?i)StateSaveLocation.* full"),
        Outage("disk-shm", "node1", 45.0, ""),
        Outage("saves", "hosts", STOPPED_S, "not arrived after|checkpoint.*overdue"),
        *(Outage("clock", host, 40.0 * len(steps), r"node1\b.*\bclock") for host, steps in CLOCK_STEPS.items()),
        Outage("slurmctld", "ctl", slurmctld_s, away),
        Outage("stop-slurmctld", "ctl", STOPPED_S, away),
        Outage("stop-slurmdbd", "ctl", STOPPED_S, ""),
        Outage("stop-slurmd-lane0", "node1", STOPPED_S, "node1.*(?i:down|not respond)"),
        Outage("stop-cadenzad", "ctl", STOPPED_S, "no round for"),
        Outage("stop-cadenza-agent", "node1", STOPPED_S, silent.format("node1")),
    )
    return tuple(outage for outage in every if outage.kind in only)


def acts(outage: Outage) -> list[tuple[float, str]]:
    """Return what is done while an outage holds, in order, each with its time after the outage's begin, seconds.

    Each is a further step of the clock, or "" for the look at what a site is told.
    """
    steps = CLOCK_STEPS[outage.target] if outage.kind == "clock" else ()
    jumps = [(outage.length_s * number / len(steps), step) for number, step in enumerate(steps) if number]
    return sorted([(TOLD_AFTER * outage.length_s, ""), *jumps])


def plan_outage(seed: int, outage: Outage, hosts: int, gpus: int) -> Schedule:
    """Return the jobs of an outage and the acts of their owners; ``kills_until_s`` is the time of the outage's end."""
    until_s = min(LEAD_S + outage.length_s, MOST_SUBMITTED_S)
    jobs, events = workload(Random(f"{seed} {outage.name}"), until_s, hosts, gpus, LOAD)
    events.sort(key=lambda event: (event.at_s, event.kind, event.target))
    return Schedule(jobs, tuple(events), LEAD_S + outage.length_s)


def untold(outage: Outage, told: str, at_s: float) -> Iterator[Finding]:
    """Yield a finding if nothing of what a site reads names the fault."""
    if not re.search(outage.words, told):
        yield Finding(at_s, "not told", f"neither top, why nor doctor says anything like {outage.words}")


def unwell(outage: Outage, seen: Mapping[str, Any], at_s: float) -> Iterator[Finding]:
    """Yield a finding if all was not well again, or if jobs did not end."""
    for name, goal in (("well_s", "well"), ("settled_s", "at its end")):
        if seen[name] is None:
            yield Finding(at_s, "not over", f"after {outage.name} not everything is {goal}: {seen['ill']}")


def table(rows: Sequence[tuple[Outage, Mapping[str, Any], Sequence[Finding]]]) -> str:
    """Return the outages as a table in Markdown, a row each."""
    cells = [COLUMNS, tuple("---" for _ in COLUMNS)]
    for outage, seen, findings in rows:
        after = [f"{seen[name]:.0f} s" if seen[name] is not None else "never" for name in ("well_s", "settled_s")]
        rules = ", ".join(sorted({finding.rule for finding in findings}))
        found = f"{len(findings)}: {rules}" if findings else "none"
        cells.append((outage.kind, outage.target, f"{outage.length_s:.0f} s", *after, str(seen["jobs"]), found))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
