"""Runs of jobs from Slurm's accounting: ``sacct --json``, and the table of ``sacct -P`` (pure).

Source: https://slurm.schedmd.com/sacct.html. A job that was requeued has a record for each run with ``--duplicates``.
A record that cannot be read costs itself only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, NamedTuple

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import MAX_QUANTITY, integer, number, quoted
from cadenza.slurm_plugin.gateway.slurm_json import ERRORS, NotSlurms, decoded, name_of, raw_records, records
from cadenza.slurm_plugin.gateway.slurm_values import (
    NEVER_S,
    Number,
    gpu_count,
    gpu_type,
    gpu_types,
    known_s,
    node_names,
    span_s,
    tres,
)
from cadenza.slurm_plugin.history.submit_line import asks_for_gpus, gpu_type_in, nice_in

MAX_COUNT = 10**9
COUNT = re.compile(r"\d{1,9}", re.ASCII)
COLUMNS = ("JobIDRaw", "User", "Partition", "Submit", "Start", "End")
TRES = ("AllocTRES", "ReqTRES")
FIELDS = (*COLUMNS, "Eligible", "TimelimitRaw", "Suspended", *TRES)
"""Columns that ``sacct -P --format=`` needs; those after End may be missing, but one of TRES."""
NODES = "NodeList"
"""Column that names the nodes of jobs, so that those without GPUs count as load, and others have their type."""
SITE = ("Account", "QOS", "Licenses", "Constraints", "SubmitLine")
"""Columns of what a site's rules go by; the last two, which may hold bars, have to be the last."""
SUBMITS = re.compile(r"(\S*/)?(sbatch|srun|salloc)(\s|$)")
PARTS = re.compile(r"gres/(shard|mps)(:|$)")
HELD_NOTE = re.compile(r"^cadenza: held$", re.MULTILINE)
"""Note in the administrator's comment of a job that Cadenza held at its submission, which it no longer does."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Word = Annotated[str, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=2**20)]
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
    constraint: str = ""
    """Features that its nodes must have, in Slurm's words."""
    had_type: str = ""
    """Type of the GPUs that it got; empty: not known, or several."""
    type_known: bool = True
    """True if its request tells the type, or that any will do."""
    type_kept: bool = False
    """True if the accounting itself has the type that it asked for."""
    has_parts: bool = False
    """True if it had parts of GPUs (gres/shard, gres/mps) in place of whole ones."""


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


class _Times(msgspec.Struct, frozen=True):
    submission: Count = 0
    eligible: Count = 0
    start: Count = 0
    end: Count = 0
    suspended: Count = 0
    limit: Number[Count | float] = Number()


class _Resource(msgspec.Struct, frozen=True):
    type: Word = ""
    name: Word = ""
    count: int | float = 0
    """Negative, or beyond all numbers, where Slurm has none."""


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


class _Comment(msgspec.Struct, frozen=True):
    administrator: Text = ""


class _Job(msgspec.Struct, frozen=True):
    job_id: Count
    time: _Times = _Times()
    user: Word = ""
    partition: Text = ""
    nodes: Text = ""
    tres: _Resources = _Resources()
    account: Word = ""
    qos: Word = ""
    licenses: Text = ""
    constraints: Text = ""
    comment: _Comment = _Comment()
    submit_line: Text = ""
    array: _Array = _Array()


class _Error(msgspec.Struct, frozen=True):
    description: Text = ""


class RecordRow(NamedTuple):
    """One record before its times are checked: submission, eligibility, start and end, 0 for unknown."""

    job: int
    user: str
    partition: str
    times: tuple[float, ...]
    suspended_s: float
    tres: Mapping[str, int]
    """Resources that it got; of one that got none, those that it asked for."""
    gpus: int
    nodes: str = ""
    account: str = ""
    qos: str = ""
    asked: Mapping[str, int] = {}
    """Resources that it asked for; empty where only those that it got are known."""
    licenses: str = ""
    constraint: str = ""
    admin_comment: str = ""
    submit_line: str = ""
    array: _Array = _Array()
    type_told: bool = False
    """True if ``asked`` has the type of GPU, if the job asked for one."""


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
        rows, _ = raw_records(text, "jobs")
    except NotSlurms as error:
        raise InputError(f"{source}: not the JSON of sacct --json: {error}") from None
    if not rows:
        raise InputError(f"{source}: sacct found no jobs{_errors(text)}")
    if b'"job_state"' in bytes(rows[0]):
        raise InputError(f"{source}: these jobs are of squeue or scontrol; write them with sacct --json")
    for at, row in enumerate(rows):
        yield partial(_of_job, row, source, at)


def _errors(text: str) -> str:
    """Return the errors that an answer of Slurm's names, after its own sentence; empty for none."""
    with suppress(NotSlurms):
        found, _ = records(raw_records(text, "errors")[0], _Error, "error", lambda error, _: error.description)
        return "".join(f"; its error: {said}" for said in found[:1])
    return ""


def _of_job(data: msgspec.Raw, source: str, at: int) -> JobRecord:
    where = f"{source}: jobs[{at}]"
    try:
        job, _ = decoded(bytes(data), _Job)
    except ERRORS as error:
        raise InputError(f"{where} ({name_of(data, 'job', at)}): {error}") from None
    times = job.time
    limit_min = times.limit.value
    moments = (times.submission, times.eligible, times.start, times.end)
    asked = _counts(job.tres.requested)
    got = _counts(job.tres.allocated) or asked
    row = RecordRow(
        job.job_id, job.user, job.partition, moments, times.suspended, got, gpu_count(got), job.nodes, job.account,
        job.qos, asked, job.licenses, job.constraints, job.comment.administrator, job.submit_line, job.array,
    )  # fmt: skip
    return record_of(row, None if limit_min is None else 60 * limit_min, where)


def _counts(resources: Iterable[_Resource]) -> dict[str, int]:
    rows = ((f"{item.type}/{item.name}" if item.name else item.type, item.count) for item in resources)
    return {name: int(count) if 0 <= count < 2**63 else 0 for name, count in rows}


# --- Table -----------------------------------------------------------------------------------------------


def _of_table(text: str, source: str) -> Iterator[Callable[[], JobRecord]]:
    # Only a line feed ends a record: users' texts hold other characters that end a line elsewhere.
    lines = ((at, line.removesuffix("\r")) for at, line in enumerate(text.split("\n"), 1))
    columns = next((line.split("|") for _, line in lines if line.strip()), [])
    wanted = f"sacct -P --format={','.join((*FIELDS, NODES, *SITE))}"
    for name in COLUMNS:
        if name not in columns:
            begins = quoted("|".join(columns))
            raise InputError(f"{source}: column {name!r} is missing, it begins with {begins}; write it with {wanted}")
    if not any(name in columns for name in TRES):
        raise InputError(f"{source}: columns AllocTRES and ReqTRES are missing; write it with {wanted}")
    for line, row in lines:
        cells = row.split("|")
        step = "." in cells[columns.index("JobIDRaw")] if len(cells) == len(columns) else "." in cells[0]
        # The rest of a command line that holds a line feed, and the columns again where files were put together.
        rest = columns[-1] == SITE[-1] and len(cells) < len(columns) and not row[:1].isdigit()
        if row.strip() and not step and not rest and cells != columns:
            yield partial(_of_row, cells, columns, f"{source}:{line}")


def _of_row(cells: Sequence[str], columns: Sequence[str], where: str) -> JobRecord:
    cells = _whole_cells(cells, columns)
    if len(cells) != len(columns):
        raise InputError(f"{where}: has {len(cells)} cells where the first line names {len(columns)} columns")
    cell = dict(zip(columns, cells, strict=True))
    times = tuple(_moment(cell.get(name, ""), f"{where}: {name}") for name in ("Submit", "Eligible", "Start", "End"))
    limit, suspended = cell.get("TimelimitRaw", ""), cell.get("Suspended", "")
    try:
        asked = tres(cell.get("ReqTRES", ""))
        got = tres(cell.get("AllocTRES", "")) or asked
    except ValueError as error:
        raise InputError(f"{where}: TRES: {error}") from None
    try:
        suspended_s = span_s(suspended) if suspended[:1].isdigit() else 0.0  # else it is empty, or INVALID
    except ValueError as error:
        raise InputError(f"{where}: Suspended: {error}") from None
    row = RecordRow(
        integer(cell["JobIDRaw"], f"{where}: JobIDRaw", 0, 2**63 - 1), cell["User"], cell["Partition"], times,
        suspended_s, got, gpu_count(got), cell.get(NODES, ""), cell.get("Account", ""), cell.get("QOS", ""), asked,
        cell.get("Licenses", ""), cell.get("Constraints", ""), cell.get("AdminComment", ""),
        cell.get("SubmitLine", ""),
    )  # fmt: skip
    # sacct writes UNLIMITED and Partition_Limit in place of a number.
    limit_min = number(limit, f"{where}: TimelimitRaw") if limit[:1].isdigit() else NEVER_S
    return record_of(row, 60 * limit_min if limit_min < NEVER_S else None, where)


def _whole_cells(cells: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the cells of a row whose last ones may hold bars: a constraint such as a100|h100, and a command line."""
    if columns[-1] not in SITE[-2:] or len(cells) <= len(columns):
        return [*cells]
    last = len(columns) - 1
    if columns[-1] == SITE[-1]:
        at = next((at for at in range(last, len(cells)) if SUBMITS.match(cells[at])), len(cells) - 1)
        at = at if columns[-2] == SITE[-2] else last
        cells = [*cells[:at], "|".join(cells[at:])]
    if len(cells) > len(columns):  # what is left over is the constraint's
        at = columns.index(SITE[-2]) if SITE[-2] in columns[-2:] else last
        more = len(cells) - len(columns)
        cells = [*cells[:at], "|".join(cells[at : at + more + 1]), *cells[at + more + 1 :]]
    return [*cells]


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


# --- Both ------------------------------------------------------------------------------------------------


def record_of(row: RecordRow, limit_s: float | None, where: str) -> JobRecord:
    """Return a run; raise InputError for times in an impossible order or a count without bounds."""
    submit_s, eligible_s, start_s, end_s = map(known_s, row.times)
    if submit_s is None:
        raise BadRecord(f"{where}: job {row.job} has no time of submission", "without a time of submission")
    # Slurm calls a job eligible once nothing but resources keeps it waiting. A hold of ours was such a wait, too.
    ours = HELD_NOTE.search(row.admin_comment) is not None
    began_s = submit_s if eligible_s is None or ours else max(submit_s, eligible_s)
    if start_s is not None:
        began_s = min(began_s, start_s)  # Slurm may date a submission anew, after the start
    if end_s is not None and start_s is not None and end_s < start_s:
        raise BadRecord(f"{where}: job {row.job} ends before it starts", "that end before they start")
    if not 0 <= row.gpus <= MAX_COUNT:
        raise InputError(f"{where}: job {row.job}: {row.gpus:g} is no number of GPUs")
    memory_mb = float(row.tres.get("mem", 0))
    asked_type = (gpu_type(row.asked) or gpu_type_in(row.submit_line)) if row.gpus else ""
    got_types = gpu_types(row.tres) if row.gpus else []
    return JobRecord(
        row.job, row.user or "unknown", row.partition, began_s, start_s, end_s, row.suspended_s, limit_s or None,
        row.gpus, memory_mb if 0 < memory_mb <= MAX_QUANTITY else None, int(min(row.tres.get("cpu", 0), MAX_COUNT)),
        node_names(row.nodes), row.account, row.qos, asked_type, nice_in(row.submit_line),
        str(row.array.job_id or ""), row.array.limits.max.running.tasks or None, licenses_in(row.licenses),
        row.constraint.replace("(null)", ""), got_types[0] if len(got_types) == 1 else "",
        row.type_told or bool(asked_type) or asks_for_gpus(row.submit_line), bool(gpu_type(row.asked)),
        not row.gpus and any(count and PARTS.match(name) for name, count in row.tres.items()),
    )  # fmt: skip


def licenses_in(text: str) -> tuple[tuple[str, int], ...]:
    """Return the licenses of a list such as ``solver:2,matlab@server``, and their numbers."""
    found = (part.partition(":") for part in text.split(",") if part and "(" not in part)
    return tuple((name, int(count) if COUNT.fullmatch(count) else 1) for name, _, count in found)
