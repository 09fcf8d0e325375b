"""The file of ``cadenza watch``: waits and idle GPU hours, added up from look to look (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import floor
from typing import Annotated, Literal

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.strict_mapping import input_error
from cadenza.slurm_plugin.history.job_records import JobRecord
from cadenza.slurm_plugin.history.queue_answer import QueueJob
from cadenza.slurm_plugin.service.accounting.usage import MAX_GAP_S, by_hour

SCHEMA: Literal["cadenza.watch/1"] = "cadenza.watch/1"
MAX_HOURS, MAX_RUNS, MAX_RUNNING = 92 * 24, 20_000, 20_000
"""Hours, runs that have ended, and runs that have not, of which the newest are kept."""
MAX_BYTES = 32_000_000

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]


class Hour(msgspec.Struct, frozen=True, array_like=True):
    """One hour since the epoch: seconds between looks, and what was added up in them."""

    hour: Number
    watched_s: Seconds
    idle_gpu_s: Seconds
    """GPUs idle while a job waited that fits."""
    waiting_job_s: Seconds
    """Jobs that waited for GPUs."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """One run of a job with GPUs; the fields of ``JobRecord``."""

    job: Number
    user: Name
    partition: Name
    submit_s: Seconds
    start_s: Seconds
    end_s: Seconds | None
    suspended_s: Seconds
    limit_s: Seconds | None
    gpus: Number
    memory_mb: Seconds | None
    cpus: Number
    account: Name = ""
    qos: Name = ""
    gpu_type: Name = ""
    constraint: Name = ""

    @property
    def record(self) -> JobRecord:
        """Return the run as accounting would have it."""
        return JobRecord(**msgspec.structs.asdict(self))


class WatchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is kept; times in seconds since the epoch."""

    cluster: Name
    partition: Name | None
    since_s: Seconds
    at_s: Seconds
    """The last look, with its idle GPUs while a job waited that fits, and its waiting jobs."""
    idle: Number = 0
    waiting: Number = 0
    hours: Annotated[tuple[Hour, ...], msgspec.Meta(max_length=MAX_HOURS)] = ()
    runs: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
    """Runs that have ended."""
    running: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RUNNING)] = ()
    dropped: Number = 0
    """Older runs that are no longer kept."""
    schema: Literal["cadenza.watch/1"] = SCHEMA


def encode(record: WatchRecord) -> bytes:
    """Return the file's content, JSON."""
    return msgspec.json.encode(record)


def decode(data: bytes, source: str) -> WatchRecord:
    """Return the record; raise InputError naming file and key for a file that is not ours."""
    try:
        record = msgspec.json.decode(data, type=WatchRecord)
    except msgspec.ValidationError as error:
        raise InputError(f"{input_error(error, source)}; is it from cadenza watch?") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: not JSON: {error}") from None
    for at, run in enumerate(record.runs):
        if run.end_s is None or not run.submit_s <= run.start_s <= run.end_s:
            raise InputError(f"{source}: runs[{at}]: job {run.job} ends before it starts, or starts before it waits")
    return record


def begin(cluster: str, partition: str | None, at_s: float) -> WatchRecord:
    """Return an empty record; Slurm's times, with which its beginning is compared, are whole seconds."""
    return WatchRecord(cluster, partition, floor(at_s), at_s)


def add(record: WatchRecord, at_s: float, jobs: Sequence[QueueJob], idle: int) -> WatchRecord:
    """Return the record with one more look.

    ``idle``: GPUs idle while a job waits that fits. Between two looks at most ``MAX_GAP_S`` apart the smaller number
    of idle GPUs counts, and the smaller one of waiting jobs; a longer time is not counted.
    """
    waiting = sum(job.waits for job in jobs)
    runs = (*record.runs, *_ended(record, at_s, jobs))
    running = tuple(_run(job.record) for job in jobs if _runs(job))
    return msgspec.structs.replace(
        record, at_s=at_s, idle=idle, waiting=waiting, running=running[-MAX_RUNNING:], runs=runs[-MAX_RUNS:],
        hours=_hours(record, at_s, min(idle, record.idle), min(waiting, record.waiting)),
        dropped=record.dropped + max(len(runs) - MAX_RUNS, 0),
    )  # fmt: skip


def _runs(job: QueueJob) -> bool:
    return job.record.gpus > 0 and job.record.start_s is not None and job.record.end_s is None


def _ended(record: WatchRecord, at_s: float, jobs: Sequence[QueueJob]) -> Iterable[Run]:
    """Return the runs that have ended since the last look; one that slurmctld has forgotten ends now."""
    over = {}
    for job in jobs:
        one = job.record
        if one.gpus and one.start_s is not None and one.end_s is not None and one.end_s >= record.since_s:
            over[one.job, one.start_s] = one
    still = {(job.record.job, job.record.start_s) for job in jobs if _runs(job)}
    for run in record.running:
        key = (run.job, run.start_s)
        if key not in still and key not in over:
            over[key] = replace(run.record, end_s=max(at_s, run.start_s))
    known = {(run.job, run.start_s) for run in record.runs}
    return [_run(one) for key, one in over.items() if key not in known]


def _run(record: JobRecord) -> Run:
    """Return a run that has started; Slurm may date a submission anew."""
    dated = replace(record, submit_s=min(record.submit_s, record.start_s or 0.0))
    return Run(*(getattr(dated, name) for name in Run.__struct_fields__))


def _hours(record: WatchRecord, at_s: float, idle: int, waiting: int) -> tuple[Hour, ...]:
    span_s = at_s - record.at_s
    if not 0.0 < span_s <= MAX_GAP_S:
        return record.hours
    rows = {row.hour: row for row in record.hours}
    for hour, part in by_hour(record.at_s, at_s):
        row, seconds = rows.get(hour, Hour(hour, 0.0, 0.0, 0.0)), part * span_s
        rows[hour] = Hour(
            hour, row.watched_s + seconds, row.idle_gpu_s + idle * seconds, row.waiting_job_s + waiting * seconds
        )
    return tuple(rows[hour] for hour in sorted(rows))[-MAX_HOURS:]
