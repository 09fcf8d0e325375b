"""``cadenza why JOBID``: the decisions about a job, their reasons and their measured effects."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from cadenza.slurm_plugin.cli.common import JobId, config_option, emit, json_option, say, store_or_socket
from cadenza.slurm_plugin.service.owner_socket import ask
from cadenza.slurm_plugin.service.store.reader import JobRecord, StoreReader
from cadenza.slurm_plugin.views.job_sentences import lines, summary

ROWS = 20
"""Newest rows of each section."""


@click.command("why")
@click.argument("job_id", metavar="JOBID", type=JobId())
@json_option
@config_option
def command(*, job_id: int, as_json: bool, config: Path | None) -> None:
    """Explain the decisions about a job, and show what its yields and resumes took.

    Actions that the guard kept in are listed with its rule; in observe-only mode these are the actions that apply
    mode would take. Users who may not read the store get the record of their own jobs from the running service.
    """
    record = _record(job_id, config)
    if not record.exists:
        text = f"job {job_id}: nothing on record; Cadenza never saw it or has deleted its record"
        raise click.ClickException("; ".join((text, *record.faults)))
    if as_json:
        emit("cadenza.why/1", {**msgspec.to_builtins(record), "summary": summary(record)})
    else:
        say(*lines(record))


def _record(job_id: int, config: Path | None) -> JobRecord:
    """Return a job's record from the store, or from the service if this user may not read the store."""
    source = store_or_socket(config)
    if isinstance(source, StoreReader):
        with source as reader:
            return reader.job_record(job_id, ROWS)
    return ask(source, job_id, ROWS)
