"""Runs of jobs from Slurm's accounting: ``sacct --json``, and the table of ``sacct -P`` (pure).

Source: https://slurm.schedmd.com/sacct.html. A job that was requeued has a record for each run with ``--duplicates``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.csv_table import MAX_QUANTITY, integer, number, quoted
from cadenza.slurm_plugin.gateway.slurm_json import hosts

NEVER_S = 4_294_967_294
"""Slurm's time for unknown (``NO_VAL``); later moments are no times either."""
MAX_COUNT = 10**9
SECONDS = re.compile(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,2})(?:\.\d+)?", re.ASCII)
MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)", re.ASCII)
MEMORY_MB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": MB_PER_GB, "T": MB_PER_GB * 1024, "P": MB_PER_GB * 1024**2}
COLUMNS = ("JobIDRaw", "User", "Partition", "Submit", "Start", "End")
TRES = ("AllocTRES", "ReqTRES")
FIELDS = (*COLUMNS, "Eligible", "TimelimitRaw", "Suspended", *TRES)
"""Columns that ``sacct -P --format=`` needs; those after End may be missing, but one of TRES."""
NODES = "NodeList"
"""Column that names the nodes of jobs without GPUs, so that they count as load."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Word = Annotated[str, msgspec.Meta(max_length=256)]
MAX_TEXT = 65_536


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One run of a job. Times in seconds since the epoch, None where it has not come so far."""

    job: int
    """Slurm's own number; the tasks of an array have one each."""
    user: str
    partition: str
    submit_s: float
    """When it could have started: Slurm's eligible time, where there is one, after ``--begin`` and dependencies."""
    start_s: float | None
    end_s: float | None
    suspended_s: float
    limit_s: float | None
    gpus: int
    memory_mb: float | None
    cpus: int = 0
    nodes: frozenset[str] = frozenset()
    """Its nodes, where the accounting names them."""


class SlurmNumber(msgspec.Struct, frozen=True):
    """A number of Slurm's JSON, which may be unset or infinite."""

    set: bool = False
    infinite: bool = False
    number: Count | float = 0

    @property
    def value(self) -> float | None:
        """Return the number, None without one."""
        return float(self.number) if self.set and not self.infinite else None


class _Times(msgspec.Struct, frozen=True):
    submission: Count = 0
    eligible: Count = 0
    start: Count = 0
    end: Count = 0
    suspended: Count = 0
    limit: SlurmNumber = SlurmNumber()


class _Resource(msgspec.Struct, frozen=True):
    type: Word = ""
    name: Word = ""
    count: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    """Negative where Slurm has none."""


class _Resources(msgspec.Struct, frozen=True):
    allocated: tuple[_Resource, ...] = ()
    requested: tuple[_Resource, ...] = ()


class _Job(msgspec.Struct, frozen=True):
    job_id: Count
    time: _Times
    user: Word | None = ""
    partition: Word = ""
    nodes: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""
    tres: _Resources = _Resources()


class RecordRow(NamedTuple):
    """One record before its times are checked: submission, eligibility, start and end, 0 for unknown."""

    job: int
    user: str
    partition: str
    times: tuple[float, ...]
    suspended_s: float
    tres: Mapping[str, float]
    nodes: str = ""


class _Answer(msgspec.Struct, frozen=True):
    jobs: tuple[msgspec.Raw, ...]


def read_job_records(text: str, source: str) -> tuple[JobRecord, ...]:
    """Return the runs of a file of ``sacct --json`` or ``sacct -P``; steps are left out.

    Raise InputError with file, and line or job, for a file that is neither, or that holds an impossible value.
    """
    return tuple(_of_json(text, source) if text.lstrip().startswith("{") else _of_table(text, source))


# --- JSON ------------------------------------------------------------------------------------------------


def _of_json(text: str, source: str) -> Iterator[JobRecord]:
    try:
        rows = msgspec.json.decode(text, type=_Answer).jobs
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{source}: not the JSON of sacct --json: {error}") from None
    for at, row in enumerate(rows):
        try:
            job = msgspec.json.decode(row, type=_Job)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{source}: jobs[{at}]: {error}") from None
        times = job.time
        limit_min = times.limit.value
        tres = job.tres.allocated or job.tres.requested
        counts = {f"{item.type}/{item.name}" if item.name else item.type: float(max(item.count, 0)) for item in tres}
        moments = (times.submission, times.eligible, times.start, times.end)
        row_of = RecordRow(
            job.job_id, job.user or "", job.partition, moments, float(times.suspended), counts, job.nodes
        )
        yield record_of(row_of, None if limit_min is None else 60 * limit_min, f"{source}: jobs[{at}]")


# --- Table -----------------------------------------------------------------------------------------------


def _of_table(text: str, source: str) -> Iterator[JobRecord]:
    lines = enumerate(text.splitlines(), 1)
    columns = next((line.split("|") for _, line in lines if line.strip()), [])
    wanted = f"sacct -P --format={','.join((*FIELDS, NODES))}"
    for name in COLUMNS:
        if name not in columns:
            raise InputError(f"{source}: column {name!r} is missing; write it with {wanted}")
    if not any(name in columns for name in TRES):
        raise InputError(f"{source}: columns AllocTRES and ReqTRES are missing; write it with {wanted}")
    for line, row in lines:
        cells = row.split("|")
        where = f"{source}:{line}"
        if not row.strip() or "." in cells[0]:
            continue
        if len(cells) != len(columns):
            raise InputError(f"{where}: has {len(cells)} cells where the first line names {len(columns)} columns")
        cell = dict(zip(columns, cells, strict=True))
        if "." in cell["JobIDRaw"]:
            continue
        times = tuple(
            _moment(cell.get(name, ""), f"{where}: {name}") for name in ("Submit", "Eligible", "Start", "End")
        )
        limit = cell.get("TimelimitRaw", "")
        row_of = RecordRow(
            integer(cell["JobIDRaw"], f"{where}: JobIDRaw", 0, 2**63 - 1), cell["User"], cell["Partition"], times,
            _span(cell.get("Suspended", ""), f"{where}: Suspended"),
            tres_of(cell.get("AllocTRES") or cell.get("ReqTRES", ""), f"{where}: TRES"), cell.get(NODES, ""),
        )  # fmt: skip
        limited = limit[:1].isdigit()
        yield record_of(row_of, 60 * number(limit, f"{where}: TimelimitRaw", 0, 1e9) if limited else None, where)


def _moment(text: str, where: str) -> float:
    """Return a moment in seconds since the epoch, 0 for one that is not known; Slurm writes local time or seconds."""
    if text in ("", "Unknown", "None"):
        return 0.0
    if text.isascii() and text.isdigit():
        return number(text, where, 0, MAX_QUANTITY)
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise InputError(f"{where}: {quoted(text)} is not a time such as 2026-11-24T22:41:21") from None


def _span(text: str, where: str) -> float:
    """Return a time span such as 1-02:03:04 in seconds."""
    if not text:
        return 0.0
    found = SECONDS.fullmatch(text)
    if found is None:
        raise InputError(f"{where}: {quoted(text)} is not a time span such as 1-02:03:04")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def tres_of(text: str, where: str) -> dict[str, float]:
    """Return the counts of a list such as cpu=1,mem=300M,gres/gpu=3 by name, memory in MB."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        amount = MEMORY.fullmatch(value)
        if not equals or amount is None:
            raise InputError(f"{where}: {quoted(part)} is not NAME=COUNT")
        if name == "mem":
            found[name] = number(amount[1], where) * MEMORY_MB[amount[2]]
        elif name == "cpu" or name.startswith("gres/gpu"):
            found[name] = number(amount[1], where, 0, MAX_COUNT)
    return found


def gpus_in(tres: Mapping[str, float]) -> float:
    """Return the GPUs among counted resources; Slurm lists a typed GPU twice, with and without its type."""
    return tres.get("gres/gpu") or sum(count for name, count in tres.items() if name.startswith("gres/gpu:"))


# --- Both ------------------------------------------------------------------------------------------------


def record_of(row: RecordRow, limit_s: float | None, where: str) -> JobRecord:
    """Return a run; raise InputError for times in an impossible order or a count without bounds."""
    submit_s, eligible_s, start_s, end_s = (float(at) if 0 < at < NEVER_S else None for at in row.times)
    if submit_s is None:
        raise InputError(f"{where}: job {row.job} has no time of submission")
    began_s = max(submit_s, eligible_s) if eligible_s is not None else submit_s
    if start_s is not None:
        began_s = min(began_s, max(start_s, submit_s))
    if end_s is not None and start_s is not None and end_s < start_s:
        raise InputError(f"{where}: job {row.job} ends before it starts")
    tres = row.tres
    gpus = gpus_in(tres)
    if not 0 <= gpus <= MAX_COUNT:
        raise InputError(f"{where}: job {row.job}: {gpus:g} is no number of GPUs")
    memory_mb = tres.get("mem", 0.0)
    return JobRecord(
        row.job, row.user or "unknown", row.partition, began_s, start_s, end_s, row.suspended_s, limit_s or None,
        int(gpus), memory_mb if 0 < memory_mb <= MAX_QUANTITY else None, int(min(tres.get("cpu", 0.0), MAX_COUNT)),
        _nodes(row.nodes) if not gpus else frozenset(),
    )  # fmt: skip


def _nodes(text: str) -> frozenset[str]:
    """Return the names in a list of nodes; nothing for other text, as that of a job that never started."""
    try:
        return frozenset(hosts(text))
    except ValueError:
        return frozenset()
