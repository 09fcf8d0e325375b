"""Runs of jobs from Slurm's accounting: ``sacct --json``, and the table of ``sacct -P`` (pure).

Source: https://slurm.schedmd.com/sacct.html. A job that was requeued has a record for each run with ``--duplicates``.
A record that cannot be read costs itself only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, NamedTuple

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.csv_table import MAX_QUANTITY, integer, number, quoted
from cadenza.slurm_plugin.cli.whatif.submit_line import gpu_type_in, nice_in
from cadenza.slurm_plugin.gateway.slurm_json import hosts

NEVER_S = 4_294_967_294
"""Slurm's time for unknown (``NO_VAL``); later moments are no times either."""
MAX_COUNT = 10**9
SECONDS = re.compile(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,2})(?:\.\d+)?", re.ASCII)
COUNT = re.compile(r"\d{1,9}", re.ASCII)
MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)", re.ASCII)
MEMORY_MB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": MB_PER_GB, "T": MB_PER_GB * 1024, "P": MB_PER_GB * 1024**2}
COLUMNS = ("JobIDRaw", "User", "Partition", "Submit", "Start", "End")
TRES = ("AllocTRES", "ReqTRES")
FIELDS = (*COLUMNS, "Eligible", "TimelimitRaw", "Suspended", *TRES)
"""Columns that ``sacct -P --format=`` needs; those after End may be missing, but one of TRES."""
NODES = "NodeList"
"""Column that names the nodes of jobs without GPUs, so that they count as load."""
SITE = ("Account", "QOS", "Licenses", "SubmitLine")
"""Columns of what a site's rules go by; the last one, which may hold bars, has to be the last."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Word = Annotated[str, msgspec.Meta(max_length=256)]
MAX_TEXT = 65_536
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
MAX_RECORDS = 10_000_000
UNREADABLE = "that cannot be read"


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
    account: str = ""
    qos: str = ""
    gpu_type: str = ""
    """Type of GPU that it asked for; empty: any, or not known."""
    nice: int = 0
    array: str = ""
    """The job array that it belongs to; empty: none."""
    array_limit: int | None = None
    """Tasks of the array that may run at once; Slurm says so for one of them only."""
    licenses: tuple[tuple[str, int], ...] = ()


class JobRecords(NamedTuple):
    """Runs of an accounting, and those that could not be read, by reason."""

    runs: tuple[JobRecord, ...]
    left_out: Counter[str]
    example: str = ""
    """Place and cause of the first one that could not be read."""


class BadRecord(InputError):  # noqa: N818
    """A record that says something impossible; ``reason`` goes with a number of jobs."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


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


class _Running(msgspec.Struct, frozen=True):
    tasks: Count = 0


class _Max(msgspec.Struct, frozen=True):
    running: _Running = _Running()


class _Limits(msgspec.Struct, frozen=True):
    max: _Max = _Max()


class _Array(msgspec.Struct, frozen=True):
    job_id: Count = 0
    limits: _Limits = _Limits()


class _Job(msgspec.Struct, frozen=True):
    job_id: Count
    time: _Times
    user: Word | None = ""
    partition: Text = ""
    nodes: Text = ""
    tres: _Resources = _Resources()
    account: Word | None = ""
    qos: Word | None = ""
    licenses: Text | None = ""
    submit_line: Annotated[str, msgspec.Meta(max_length=2**20)] | None = ""
    array: _Array = _Array()


class RecordRow(NamedTuple):
    """One record before its times are checked: submission, eligibility, start and end, 0 for unknown."""

    job: int
    user: str
    partition: str
    times: tuple[float, ...]
    suspended_s: float
    tres: Mapping[str, float]
    nodes: str = ""
    account: str = ""
    qos: str = ""
    asked: Mapping[str, float] = {}
    """Resources that it asked for; empty where only those that it got are known."""
    licenses: str = ""
    submit_line: str = ""
    array: _Array = _Array()


class _Answer(msgspec.Struct, frozen=True):
    jobs: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_RECORDS)]


def read_job_records(text: str, source: str) -> JobRecords:
    """Return the runs of a file of ``sacct --json`` or ``sacct -P``; steps are left out.

    Raise InputError for a file that is neither. A record that holds an impossible value is left out and counted.
    """
    runs, left_out, example = [], Counter[str](), ""
    for read in _of_json(text, source) if text.lstrip().startswith("{") else _of_table(text, source):
        try:
            runs.append(read())
        except InputError as error:
            left_out[error.reason if isinstance(error, BadRecord) else UNREADABLE] += 1
            example = example or str(error)
    return JobRecords(tuple(runs), left_out, example)


# --- JSON ------------------------------------------------------------------------------------------------


def _of_json(text: str, source: str) -> Iterator[Callable[[], JobRecord]]:
    try:
        rows = msgspec.json.decode(text, type=_Answer).jobs
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{source}: not the JSON of sacct --json: {error}") from None
    for at, row in enumerate(rows):
        yield partial(_of_job, row, f"{source}: jobs[{at}]")


def _of_job(data: msgspec.Raw, where: str) -> JobRecord:
    try:
        job = msgspec.json.decode(data, type=_Job)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: {error}") from None
    times = job.time
    limit_min = times.limit.value
    moments = (times.submission, times.eligible, times.start, times.end)
    asked = _counts(job.tres.requested)
    row = RecordRow(
        job.job_id, job.user or "", job.partition, moments, float(times.suspended),
        _counts(job.tres.allocated) or asked, job.nodes, job.account or "", job.qos or "", asked, job.licenses or "",
        job.submit_line or "", job.array,
    )  # fmt: skip
    return record_of(row, None if limit_min is None else 60 * limit_min, where)


def _counts(resources: Iterable[_Resource]) -> dict[str, float]:
    return {f"{item.type}/{item.name}" if item.name else item.type: float(max(item.count, 0)) for item in resources}


# --- Table -----------------------------------------------------------------------------------------------


def _of_table(text: str, source: str) -> Iterator[Callable[[], JobRecord]]:
    lines = enumerate(text.splitlines(), 1)
    columns = next((line.split("|") for _, line in lines if line.strip()), [])
    wanted = f"sacct -P --format={','.join((*FIELDS, NODES, *SITE))}"
    for name in COLUMNS:
        if name not in columns:
            raise InputError(f"{source}: column {name!r} is missing; write it with {wanted}")
    if not any(name in columns for name in TRES):
        raise InputError(f"{source}: columns AllocTRES and ReqTRES are missing; write it with {wanted}")
    for line, row in lines:
        cells = row.split("|")
        step = "." in cells[columns.index("JobIDRaw")] if len(cells) == len(columns) else "." in cells[0]
        if row.strip() and not step:
            yield partial(_of_row, cells, columns, f"{source}:{line}")


def _of_row(cells: Sequence[str], columns: Sequence[str], where: str) -> JobRecord:
    if columns[-1] == "SubmitLine":  # a command line may have bars of its own
        cells = [*cells[: len(columns) - 1], "|".join(cells[len(columns) - 1 :])]
    if len(cells) != len(columns):
        raise InputError(f"{where}: has {len(cells)} cells where the first line names {len(columns)} columns")
    cell = dict(zip(columns, cells, strict=True))
    times = tuple(_moment(cell.get(name, ""), f"{where}: {name}") for name in ("Submit", "Eligible", "Start", "End"))
    limit = cell.get("TimelimitRaw", "")
    asked = tres_of(cell.get("ReqTRES", ""), f"{where}: TRES")
    row = RecordRow(
        integer(cell["JobIDRaw"], f"{where}: JobIDRaw", 0, 2**63 - 1), cell["User"], cell["Partition"], times,
        span_s(cell.get("Suspended", ""), f"{where}: Suspended"),
        tres_of(cell.get("AllocTRES", ""), f"{where}: TRES") or asked, cell.get(NODES, ""),
        cell.get("Account", ""), cell.get("QOS", ""), asked, cell.get("Licenses", ""), cell.get("SubmitLine", ""),
    )  # fmt: skip
    limited = limit[:1].isdigit()
    return record_of(row, 60 * number(limit, f"{where}: TimelimitRaw", 0, 1e9) if limited else None, where)


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


def span_s(text: str, where: str) -> float:
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
        raise BadRecord(f"{where}: job {row.job} has no time of submission", "without a time of submission")
    began_s = max(submit_s, eligible_s) if eligible_s is not None else submit_s
    if start_s is not None:
        began_s = min(began_s, start_s)  # Slurm may date a submission anew, after the start
    if end_s is not None and start_s is not None and end_s < start_s:
        raise BadRecord(f"{where}: job {row.job} ends before it starts", "that end before they start")
    tres = row.tres
    gpus = gpus_in(tres)
    if not 0 <= gpus <= MAX_COUNT:
        raise InputError(f"{where}: job {row.job}: {gpus:g} is no number of GPUs")
    memory_mb = tres.get("mem", 0.0)
    return JobRecord(
        row.job, row.user or "unknown", row.partition, began_s, start_s, end_s, row.suspended_s, limit_s or None,
        int(gpus), memory_mb if 0 < memory_mb <= MAX_QUANTITY else None, int(min(tres.get("cpu", 0.0), MAX_COUNT)),
        _nodes(row.nodes) if not gpus else frozenset(), row.account, row.qos, _gpu_type(row) if gpus else "",
        nice_in(row.submit_line), str(row.array.job_id or ""), row.array.limits.max.running.tasks or None,
        licenses_in(row.licenses),
    )  # fmt: skip


def _gpu_type(row: RecordRow) -> str:
    """Return the type of GPU that a job asked for; what it got tells it only where nothing else does."""
    for counts in (row.asked, {} if gpus_in(row.asked) else row.tres):
        types = [name.partition(":")[2] for name, count in counts.items() if name.startswith("gres/gpu:") and count]
        if len(types) == 1:
            return types[0]
    return gpu_type_in(row.submit_line)


def licenses_in(text: str) -> tuple[tuple[str, int], ...]:
    """Return the licenses of a list such as ``solver:2,matlab@server``, and their numbers."""
    found = (part.partition(":") for part in text.split(",") if part and "(" not in part)
    return tuple((name, int(count) if COUNT.fullmatch(count) else 1) for name, _, count in found)


def _nodes(text: str) -> frozenset[str]:
    """Return the names in a list of nodes; nothing for other text, as that of a job that never started."""
    try:
        return frozenset(hosts(text))
    except ValueError:
        return frozenset()
