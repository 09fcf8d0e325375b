"""Figures of a replay's records: completion times, first starts, RPCs, load. Pure: texts in, figures out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from statistics import fmean, median
from typing import Any

SACCT = "JobID,State,Submit,Start,End,NodeList"
"""Fields of sacct that ``read_sacct`` takes, with times in seconds since the epoch."""
RPC = re.compile(r"\s+(\S+)\s+\(\s*\d+\)\s+count:(\d+)\s+ave_time:(\d+)\s+total_time:(\d+)")

MOVED = ("saved", "runs")


@dataclass(frozen=True)
class Record:
    """One job in Slurm's accounting, all its incarnations together; None: not yet."""

    state: str
    submit_s: float
    start_s: float | None
    end_s: float | None
    restarts: int
    nodes: str = ""
    """Nodes of the last incarnation, as Slurm writes them."""
    runs: tuple[tuple[float, float], ...] = ()
    """Start and end of each incarnation that has ended."""

    @property
    def completed(self) -> bool:
        """Return whether it ended well."""
        return self.state == "COMPLETED" and self.end_s is not None


@dataclass(frozen=True)
class Figures:
    """One side's figures; seconds."""

    jobs: int
    lost: tuple[str, ...]
    """Jobs that were not submitted, did not complete, or completed without all their iterations."""
    mean_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    mean_first_s: float
    """From submission until the job first ran."""
    makespan_s: float
    restarts: int
    yields: int
    start_up_s: float
    """From Slurm's first start of a job until it ran."""
    move_s: float
    """From a checkpoint until the same job ran again after a requeue; nan without any."""
    jct_s: Mapping[str, float] = field(repr=False)


def read_sacct(text: str, names: Mapping[str, str]) -> dict[str, Record]:
    """Return the jobs of ``sacct -DXPn`` by the names that their ids have in the plan, and no others.

    A requeued job has a record for each incarnation, and each says when it was requeued as its submission: the first
    submission and the last end count.
    """
    lines: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        lines.setdefault(fields[0], []).append(fields)
    return {names[number]: _record(found) for number, found in lines.items() if number in names}


def _record(lines: Sequence[Sequence[str]]) -> Record:
    last = max(lines, key=lambda fields: float(fields[2]))
    times = [(_epoch(fields[3]), _epoch(fields[4])) for fields in lines]
    return Record(
        last[1].split()[0],
        min(float(fields[2]) for fields in lines),
        min((start for start, _ in times if start is not None), default=None),
        _epoch(last[4]),
        len(lines) - 1,
        last[5],
        tuple((start, end) for start, end in times if start is not None and end is not None),
    )


def _epoch(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def figures(
    planned: Sequence[str],
    records: Mapping[str, Record],
    events: Mapping[str, Sequence[Mapping[str, Any]]],
    began: float,
) -> Figures:
    """Return one side's figures; ``began``: the first submission, seconds since the epoch."""
    good = [name for name in planned if name in records and records[name].completed and _ended(events.get(name, ()))]
    jct = {name: (records[name].end_s or 0.0) - records[name].submit_s for name in good}
    ran = {name: next(event["at"] for event in events[name] if event["what"] == "runs") for name in good}
    ordered = sorted(jct.values()) or [nan]
    kept = [[event for event in found if event["what"] in MOVED] for found in events.values()]
    moves = [
        new["at"] - old["at"] for found in kept for old, new in pairwise(found) if (old["what"], new["what"]) == MOVED
    ]
    return Figures(
        jobs=len(planned),
        lost=tuple(sorted(set(planned) - set(good))),
        mean_jct_s=fmean(ordered),
        p50_jct_s=median(ordered),
        p99_jct_s=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        mean_first_s=fmean([ran[name] - records[name].submit_s for name in good] or [nan]),
        makespan_s=max((records[name].end_s or 0.0 for name in good), default=began) - began,
        restarts=sum(record.restarts for record in records.values()),
        yields=sum(event["what"] == "waits" for found in events.values() for event in found),
        start_up_s=fmean([ran[name] - (records[name].start_s or 0.0) for name in good] or [nan]),
        move_s=fmean(moves or [nan]),
        jct_s=jct,
    )


def gpu_parts(
    records: Mapping[str, Record], jobs: Iterable[tuple[str, str, int]], window: tuple[float, float]
) -> dict[str, float]:
    """Return each account's part of the GPU time in a window of the epoch; ``jobs``: name, account and GPUs."""
    begin, end = window
    used: dict[str, float] = {}
    for name, account, gpus in jobs:
        runs = records[name].runs if name in records else ()
        seconds = sum(max(min(until, end) - max(start, begin), 0.0) for start, until in runs)
        used[account] = used.get(account, 0.0) + gpus * seconds
    whole = sum(used.values())
    return {account: seconds / whole if whole else nan for account, seconds in sorted(used.items())}


def _ended(events: Sequence[Mapping[str, Any]]) -> bool:
    return any(event["what"] == "ended" for event in events)


@dataclass(frozen=True)
class Rpcs:
    """Counts of sdiag: RPCs by type, and microseconds that slurmctld spent on each."""

    count: Mapping[str, int]
    spent_us: Mapping[str, int]
    cycles: Mapping[str, float]
    """Mean and most microseconds of a scheduling cycle, main and backfill."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.count.values())

    def most(self, how_many: int) -> list[tuple[str, int, float]]:
        """Return the most frequent types with their counts and mean milliseconds."""
        names = sorted(self.count, key=lambda name: -self.count[name])[:how_many]
        return [(name, self.count[name], self.spent_us[name] / max(self.count[name], 1) / 1000) for name in names]


def read_sdiag(text: str) -> Rpcs:
    """Return the counts of ``sdiag``: the part by type, and the cycles of both schedulers."""
    by_type = text.partition("by message type")[2].partition("by user")[0]
    found = [match.groups() for line in by_type.splitlines() if (match := RPC.match(line))]
    main, _, backfill = text.partition("Backfilling stats")
    cycles = {
        f"{name}_{key}_us": float(match[1])
        for name, part in (("main", main), ("backfill", backfill.partition("Remote Procedure")[0]))
        for key, label in (("mean", "Mean cycle"), ("max", "Max cycle"))
        if (match := re.search(rf"{label}:\s+(\d+)", part))
    }
    counts = {name: int(count) for name, count, _, _ in found}
    return Rpcs(counts, {name: int(total) for name, _, _, total in found}, cycles)


@dataclass(frozen=True)
class Load:
    """Use of the daemons of one name on all containers together."""

    processes: int
    cpus: float
    """CPU seconds a second."""
    memory_mb: float


def loads(
    before: Sequence[Mapping[str, Sequence[float]]], after: Sequence[Mapping[str, Sequence[float]]], seconds: float
) -> dict[str, Load]:
    """Return the load between two looks at all containers; processes that ended in between do not count."""
    names = sorted({name for found in after for name in found})
    return {
        name: Load(
            int(_sum(after, name, 0)),
            max(0.0, _sum(after, name, 1) - _sum(before, name, 1)) / seconds,
            _sum(after, name, 2),
        )
        for name in names
    }


def _sum(looks: Sequence[Mapping[str, Sequence[float]]], name: str, index: int) -> float:
    return sum(found[name][index] for found in looks if name in found)
