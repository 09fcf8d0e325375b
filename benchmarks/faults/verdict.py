"""Verdict on a fault run by what root saw on the hosts, what Slurm showed and what the jobs left."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from digest_job import digest_after
from journals import samples
from schedule import PlannedJob

UP_S = 30.0
"""A GPU's idle time counts once slurmctld and the host's slurmd have been up for this long."""
IDLE_S = 30.0
"""Longest time that a GPU may be idle while a job that could use it waits."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
STOPPED_AGENT_S = 40.0
"""The same while an agent is stopped: the first step of a job on its host waits 30 s for its word (``wait=`` of the
plugin, after which a job of another lane would have left), a further one 5 s, and Slurm takes some seconds."""
HELD_S = 30.0
"""Longest time that a job may be held while slurmctld answers: a move holds it for a second, a killed slurmctld too."""
NOT_FOR_GPUS = ("JobHeld", "Dependency", "BeginTime")
"""Beginnings of Slurm's reasons of a pending job that waits for something else."""
NO_MEMORY = "host memory: "
"""Part of the service's reason of a job that waits for host memory before its first lease, and so for no GPU."""
_AWAY = re.compile("DOWN|NOT_RESPONDING|UNKNOWN")
"""States of a node that Slurm cannot reach."""
Sample = Mapping[str, Any]
Gpu = tuple[str, int]


class Finding(NamedTuple):
    """One violation: when it was seen (seconds since the epoch), which rule, and what."""

    at_s: float
    rule: str
    text: str


@dataclass(frozen=True)
class Record:
    """Everything that a run left."""

    jobs: Mapping[str, PlannedJob]
    ids: Mapping[str, int]
    cancelled: frozenset[str]
    results: Mapping[str, Mapping[str, Any]]
    hosts: Mapping[str, Sequence[Sample]]
    """What root saw on each host, by its name."""
    slurm: Sequence[Sample]
    journal: Sequence[Mapping[str, Any]]
    leases: Mapping[str, Sequence[Mapping[str, Any]]]
    """The leases of each host's agent at the end."""
    known: frozenset[int] | None
    """The service's jobs at the end; None: it did not answer."""
    factors: frozenset[int] | None
    """Jobs whose SiteFactor the service has on record at the end; None: the record could not be read."""
    ways: Sequence[int] = ()
    """Each time that jobs made way for one: how many left."""

    @property
    def end_s(self) -> float:
        """Time of the last event, seconds since the epoch."""
        return float(self.journal[-1]["t"]) if self.journal else 0.0


def load(folder: Path, jobs: Mapping[str, PlannedJob], hosts: Sequence[str]) -> Record:
    """Return the record of the run whose files are in ``folder``."""
    books = json.loads((folder / "books.json").read_text())
    top = json.loads(books["top"]) if books["top"].startswith("{") else None
    leases = {host: json.loads(books[host])["leases"] if books[host] else [] for host in hosts}
    return Record(
        jobs=jobs,
        ids=books["ids"],
        cancelled=frozenset(books["cancelled"]),
        results={path.name: json.loads(path.read_text()) for path in (folder / "results").iterdir()},
        hosts={host: list(samples(folder / f"{host}.jsonl")) for host in hosts},
        slurm=list(samples(folder / "ctl.jsonl")),
        journal=json.loads((folder / "journal.json").read_text()),
        leases=leases,
        known=None if top is None else frozenset(job["id"] for job in top["jobs"]),
        factors=frozenset(number for number, _ in json.loads(books["undo"])["factors"]) if books["undo"] else None,
        ways=books["ways"],
    )


def judge(record: Record) -> list[Finding]:
    """Return every violation, in order of time."""
    rules = (lost, wrong_digests, used_by_two, idle, held, stuck, books, factors)
    return sorted(finding for rule in rules for finding in rule(record))


# --- Jobs ----------------------------------------------------------------------------------------------


def lost(record: Record) -> Iterator[Finding]:
    """Yield the jobs that their owner did not cancel and that left no result."""
    for name in record.jobs:
        if name not in record.results and name not in record.cancelled:
            number = record.ids.get(name)
            at_s, state = _last_state(record, name)
            yield Finding(at_s or record.end_s, "job lost", f"{name} (job {number}): {state}")


def wrong_digests(record: Record) -> Iterator[Finding]:
    """Yield the jobs whose digest is not that of the same job alone."""
    for name, found in record.results.items():
        if found["digest"] != digest_after(name, record.jobs[name].iterations):
            yield Finding(found["ended_s"], "digest", f"{name}: its digest is not that of the same job alone")


def _last_state(record: Record, name: str) -> tuple[float | None, str]:
    for sample in reversed(record.slurm):
        for job in sample.get("jobs", ()):
            if job["JobName"] == name:
                at_s = sample["t"] if job["JobState"] in ENDED else None
                return at_s, f"{job['JobState']} {job['Reason']} on {job['NodeList']}, restart {job['Restarts']}"
    return None, "never seen in Slurm"


# --- GPUs ----------------------------------------------------------------------------------------------


def used_by_two(record: Record) -> Iterator[Finding]:
    """Yield each beginning of a time in which two jobs had locks on a GPU."""
    for host, seen in record.hosts.items():
        double: set[str] = set()
        for sample in seen:
            now = {gpu for gpu, jobs in sample["gpus"].items() if len(jobs) > 1}
            for gpu in sorted(now - double):
                yield Finding(sample["t"], "GPU used by two", f"GPU {gpu} of {host}: jobs {sample['gpus'][gpu]}")
            double = now


def idle(record: Record) -> Iterator[Finding]:
    """Yield the times in which a GPU was idle for longer than ``IDLE_S`` while a job that could use it waited."""
    users = {host: _Users(seen) for host, seen in record.hosts.items()}
    since_s: dict[Gpu, float] = {}
    reported: set[Gpu] = set()
    away_s: dict[str, float] = {}
    """When Slurm last had all lanes of a host down or not responding."""
    for sample in record.slurm:
        at_s = sample["t"]
        if sample["up"]:
            up = {_host(node["NodeName"]) for node in sample["nodes"] if not _AWAY.search(node["State"])}
            away_s |= dict.fromkeys(users.keys() - up, at_s)
        # A job of two hosts can use neither host's GPUs while Slurm has one of them for less than that time.
        here = {
            host: seen.at(at_s)
            for host, seen in users.items()
            if _up_s(record, host, at_s) >= UP_S and at_s - away_s.get(host, -inf) >= UP_S
        }
        wanted = _wanted(sample, here, record) if sample["up"] else {}
        for gpu in since_s.keys() - wanted.keys():
            del since_s[gpu]
            reported.discard(gpu)
        limit_s = STOPPED_AGENT_S if _stopped_agents(record, at_s) else IDLE_S
        for gpu, name in sorted(wanted.items()):
            idle_s = at_s - since_s.setdefault(gpu, at_s)
            if idle_s > limit_s and gpu not in reported:
                reported.add(gpu)
                yield Finding(at_s, "GPU idle", f"GPU {gpu[1]} of {gpu[0]} for {idle_s:.0f} s while {name} waits")


class _Users:
    """The jobs on a host's GPUs at any time."""

    def __init__(self, seen: Sequence[Sample]) -> None:
        self._times = [sample["t"] for sample in seen]
        self._seen = seen

    def at(self, at_s: float) -> Mapping[str, Sequence[int]]:
        """Return the users of each GPU that has some."""
        place = bisect_right(self._times, at_s)
        return self._seen[place - 1]["gpus"] if place else {}


def _wanted(sample: Sample, users: Mapping[str, Mapping[str, Sequence[int]]], record: Record) -> dict[Gpu, str]:
    """Return the idle GPUs that a job could use which waits, with that job's name."""
    free, reasons = _free_gpus(sample, users), sample.get("reasons", {})
    wanted: dict[Gpu, str] = {}
    # 1. Jobs that Slurm has placed, none of whose GPUs has a user.
    for job in sample["jobs"]:
        if job["JobState"] in {"RUNNING", "SUSPENDED"} and NO_MEMORY not in reasons.get(job["JobId"], ""):
            has = _gpus_of(job)
            if has and all(gpu[1] in free.get(gpu[0], ()) for gpu in has):
                wanted |= dict.fromkeys(has, job["JobName"])
    # 2. The first pending job, where one lane of enough hosts that it may use has its GPUs free in Slurm's books.
    pending = [
        job for job in sample["jobs"] if job["JobState"] == "PENDING" and not job["Reason"].startswith(NOT_FOR_GPUS)
    ]
    first = min(pending, key=lambda job: (-int(job["Priority"] or 0), int(job["JobId"])), default=None)
    planned = record.jobs.get(first["JobName"]) if first else None
    if first is not None and planned is not None:
        pins = {_host(node) for node in _expand(first["ReqNodeList"]) if node != "(null)"}
        room = [
            host
            for host, gpus in sorted(free.items())
            if len(gpus) >= planned.gpus and _free_in_books(sample, host) >= planned.gpus and (host in pins or not pins)
        ]
        if len(room) >= planned.hosts:
            wanted |= {(host, gpu): planned.name for host in room for gpu in free[host]}
    return wanted


def _free_gpus(sample: Sample, users: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, set[int]]:
    counts = {_host(node["NodeName"]): _count(node["Gres"]) for node in sample["nodes"]}
    return {host: {gpu for gpu in range(counts.get(host, 0)) if not seen.get(str(gpu))} for host, seen in users.items()}


def _free_in_books(sample: Sample, host: str) -> int:
    lanes = [n for n in sample["nodes"] if _host(n["NodeName"]) == host and not _AWAY.search(n["State"])]
    return max((_count(node["Gres"]) - _allocated(node["AllocTRES"]) for node in lanes), default=0)


def _host(node: str) -> str:
    return re.sub(r"-l\d+$", "", node)


def _count(gres: str) -> int:
    found = re.search(r"gpu:(?:\w+:)?(\d+)", gres)
    return int(found[1]) if found else 0


def _allocated(tres: str) -> int:
    found = re.search(r"gres/gpu=(\d+)", tres)
    return int(found[1]) if found else 0


def _gpus_of(job: Mapping[str, Any]) -> set[Gpu]:
    """Return a job's GPUs by the indices that Slurm shows, such as ``gpu:a100:3(IDX:0-1,3)`` on ``node[1-2]``."""
    found: set[Gpu] = set()
    for nodes, gres in job["gpus"].items():
        indices = re.search(r"\(IDX:([\d,-]+)\)", gres)
        for node in _expand(nodes):
            for part in indices[1].split(",") if indices else ():
                low, _, high = part.partition("-")
                found |= {(_host(node), gpu) for gpu in range(int(low), int(high or low) + 1)}
    return found


def _expand(nodes: str) -> list[str]:
    """Return the names in a list such as ``node[1-2]-l1,node4``."""
    names: list[str] = []
    for head, ranges, tail in re.findall(r"([^,\[]+)(?:\[([\d,-]+)\])?([^,\[]*)", nodes):
        if not ranges:
            names.append(head + tail)
        for part in ranges.split(",") if ranges else ():
            low, _, high = part.partition("-")
            names += [f"{head}{number}{tail}" for number in range(int(low), int(high or low) + 1)]
    return names


def _up_s(record: Record, host: str, at_s: float) -> float:
    """Return how long slurmctld and a host's slurmds have been up and in reach, seconds; 0 while they are not."""
    since_s, away = 0.0, set()
    for row in record.journal:
        mine = row["target"] == "ctl:slurmctld" or row["target"].startswith(f"{host}:slurmd")
        if row["kind"] in {"kill", "down", "up"} and mine and row["t"] <= at_s:
            since_s = max(since_s, row["t"])
            away = away | {row["target"]} if row["kind"] == "down" else away - {row["target"]}
    return 0.0 if away else at_s - since_s


def _stopped_agents(record: Record, at_s: float) -> set[str]:
    """Return the agents that are stopped: they have a socket, and say nothing."""
    rows = [row for row in record.journal if row["target"].endswith(":cadenza-agent") and row["t"] <= at_s]
    last = {row["target"]: row["kind"] for row in rows}
    return {agent for agent, kind in last.items() if kind == "down"}


# --- Holds ---------------------------------------------------------------------------------------------


def held(record: Record) -> Iterator[Finding]:
    """Yield the jobs that were held for longer than ``HELD_S`` of a slurmctld that answers: no owner holds one."""
    since_s: dict[str, float] = {}
    for sample in record.slurm:
        if not sample["up"]:
            since_s.clear()
            continue
        now = {job["JobId"]: job for job in sample["jobs"] if _is_held(job)}
        for number in since_s.keys() - now.keys():
            del since_s[number]
        for number, job in now.items():
            held_s = sample["t"] - since_s.setdefault(number, sample["t"])
            if held_s > HELD_S:
                since_s[number] = inf  # said once
                yield Finding(
                    sample["t"], "held", f"job {number} ({job['JobName']}) for {held_s:.0f} s: {job['Reason']}"
                )


def _is_held(job: Mapping[str, Any]) -> bool:
    return bool(job["JobState"] == "PENDING" and job["Reason"].startswith("JobHeld"))


# --- The end -------------------------------------------------------------------------------------------


def stuck(record: Record) -> Iterator[Finding]:
    """Yield jobs that are held, suspended or frozen at the end, and nodes that take no jobs."""
    last = next((sample for sample in reversed(record.slurm) if sample["up"]), None)
    if last is None:
        yield Finding(record.end_s, "stuck", "slurmctld does not answer")
        return
    states = {int(job["JobId"]): job["JobState"] for job in last["jobs"]}
    for job in last["jobs"]:
        if job["JobState"] == "SUSPENDED" or _is_held(job):
            yield Finding(
                last["t"], "stuck", f"job {job['JobId']} ({job['JobName']}): {job['JobState']} {job['Reason']}"
            )
    for host, seen in record.hosts.items():
        frozen = next((sample["frozen"] for sample in reversed(seen) if "frozen" in sample), ())
        for job in frozen:
            if states.get(job) != "SUSPENDED":
                yield Finding(last["t"], "stuck", f"job {job} is frozen on {host}; Slurm: {states.get(job, 'unknown')}")
    names = {node["NodeName"] for sample in record.slurm if sample["up"] for node in sample["nodes"]}
    for name in sorted(names - {node["NodeName"] for node in last["nodes"]}):
        yield Finding(last["t"], "stuck", f"node {name} is gone")
    for node in last["nodes"]:
        if re.search("DRAIN|DOWN|COMPLETING|NOT_RESPONDING|FAIL", node["State"]):
            yield Finding(last["t"], "stuck", f"node {node['NodeName']}: {node['State']} {node['Reason']}")


def books(record: Record) -> Iterator[Finding]:
    """Yield differences between the jobs of Slurm, of the service, of the agents and of the hosts at the end."""
    last = next((sample for sample in reversed(record.slurm) if sample["up"]), None)
    if last is None:
        return
    live = [job for job in last["jobs"] if job["JobState"] not in ENDED]
    numbers = {int(job["JobId"]) for job in live}
    if record.known is None:
        yield Finding(last["t"], "books", "the service's record could not be read")
    elif record.known != numbers:
        yield Finding(last["t"], "books", f"jobs of the service {sorted(record.known)}, of Slurm {sorted(numbers)}")
    for host, leases in record.leases.items():
        placed = {
            (int(job["JobId"]), int(job["Restarts"]))
            for job in live
            if job["JobState"] != "PENDING" and host in {_host(node) for node in _expand(job["NodeList"])}
        }
        leased = {(int(lease["job"]), int(lease["restart"])) for lease in leases}
        if leased != placed:
            yield Finding(last["t"], "books", f"{host}: leases {sorted(leased)}, jobs of Slurm {sorted(placed)}")
        seen = next((sample["processes"] for sample in reversed(record.hosts[host]) if "processes" in sample), {})
        left = {int(job) for job in seen} - {job for job, _ in placed}
        if left:
            yield Finding(last["t"], "books", f"{host}: processes of jobs {sorted(left)}, which Slurm has not there")


def factors(record: Record) -> Iterator[Finding]:
    """Yield SiteFactors that the service still has on record of jobs that are over."""
    last = next((sample for sample in reversed(record.slurm) if sample["up"]), None)
    if record.factors is None:
        yield Finding(record.end_s, "factor", "the record of SiteFactors could not be read")
    elif last is not None:
        live = {int(job["JobId"]) for job in last["jobs"] if job["JobState"] not in ENDED}
        if left := sorted(record.factors - live):
            yield Finding(last["t"], "factor", f"SiteFactors of jobs {left}, which are over")
