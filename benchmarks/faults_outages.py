"""Outages of a fault run: which ones, the jobs during each, and what a site must be told of it (pure)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from faults_schedule import Schedule, workload
from faults_verdict import Finding

KINDS = ("network", "host", "disk-store", "disk-agents", "clock", "slurmctld")
LEAD_S = 15.0
"""Time from the first job until the outage begins."""
MOST_SUBMITTED_S = 75.0
"""Jobs are submitted for at most this long, so that the longest outage does not end with a queue of its length."""
LOAD = 1.1
"""GPU seconds of the jobs over those of the hosts while they are submitted: more than fit, so that jobs take turns."""
SLURMD_TIMEOUT_S = 30
"""Slurm's patience with a silent slurmd: one network cut is shorter; the other and the lost host are longer."""
CLOCK_STEPS = ("+3600", "-3600", "+0")
"""Seconds by which the clock of one host's daemons is off, each for an equal part of the outage."""
COLUMNS = ("fault", "where", "length", "all well after", "all jobs ended after", "jobs", "findings")


class Outage(NamedTuple):
    """One fault: what fails, where, for how long (seconds), and the words by which a site must be told.

    ``words`` is a pattern that ``cadenza top``, ``why`` or ``doctor`` must match while the fault holds.
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
    def unreachable(self) -> str:
        """What Slurm cannot reach, as the journal of kills names it; empty if Slurm itself is not affected."""
        if self.kind.startswith("disk"):
            return ""
        return "ctl:slurmctld" if self.target == "ctl" else f"{self.target}:slurmd"


def outages(only: Collection[str] = KINDS, slurmctld_s: float = 300.0) -> tuple[Outage, ...]:
    """Return the outages of these kinds, in order; slurmctld is away for ``slurmctld_s`` seconds."""
    silent = r"agent (of|on) {}\b.*(silent|does not report)"
    every = (
        Outage("network", "node1", 0.6 * SLURMD_TIMEOUT_S, silent.format("node1")),
        Outage("network", "node1", 3.0 * SLURMD_TIMEOUT_S, silent.format("node1")),
        Outage("network", "ctl", 2.0 * SLURMD_TIMEOUT_S, silent.format("node1") + "|no round for"),
        Outage("host", "node2", 3.0 * SLURMD_TIMEOUT_S, silent.format("node2")),
        Outage("disk-store", "ctl", 45.0, r"(?i)disk of \S+ is full"),
        Outage("disk-agents", "node1", 45.0, r"(?i)node1\b.*no space left"),
        Outage("clock", "node1", 40.0 * len(CLOCK_STEPS), r"node1\b.*\bclock"),
        Outage("slurmctld", "ctl", slurmctld_s, "(?i)slurmctld.*not answer|unable to contact slurm"),
    )
    return tuple(outage for outage in every if outage.kind in only)


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
