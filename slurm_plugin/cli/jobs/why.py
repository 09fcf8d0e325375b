"""``cadenza why JOBID``: what was decided about a job and why, and what its switches measured."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option, open_store, store_option
from cadenza.slurm_plugin.cli.jobs import effect_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cadenza.policies.core.model import Job, Lease
    from cadenza.slurm_plugin.service.store.reader import ActionRow, EventRow, SwitchRow, Why

OUTCOMES = {None: "", "verified": "", "gone": ", the job had ended", "failed": ", without effect so far"}


@click.command("why")
@click.argument("job_id", metavar="JOBID", type=click.IntRange(min=1))
@click.option("--last", default=20, show_default=True, type=click.IntRange(min=1), help="Rows of each kind.")
@json_option
@store_option
@config_option
def command(*, job_id: int, last: int, as_json: bool, store: Path | None, config: Path | None) -> None:
    """Tell what was decided about a job and why, and what its yields and resumes measured.

    Actions that were not carried out are listed with the rule that kept them in; in observe-only mode that
    is what would have been done.
    """
    with open_store(store, config) as reader:
        found = reader.why(job_id, last)
    if not found.known:
        raise click.ClickException(f"job {job_id}: nothing on record; Cadenza never saw it, or has forgotten it")
    if as_json:
        emit({**msgspec.to_builtins(found), "summary": summary(found)})
    else:
        click.echo("\n".join(lines(found)))


def summary(found: Why) -> str:
    """Return the last reason, as one sentence.

    A reason is kept after the job has ended; then it is said so.
    """
    now = found.reason or (found.actions[0].reason if found.actions else "nothing was decided about it")
    return now if found.job else f"no longer in Slurm; last: {now}"


def lines(found: Why) -> Iterator[str]:
    """Yield everything as text, newest first."""
    yield f"job {found.id}: {summary(found)}"
    if found.job:
        yield from _state(found.job)
    yield from _section("decisions", [_action(row) for row in found.actions])
    yield from _section("measured", [f"{_time(row.at_s)} {effect_text.sentence(row)}" for row in found.effects])
    yield from _section("yields and resumes", [_switch(row) for row in found.switches])
    yield from _section("reported by its hosts", [_event(row) for row in found.events])


def _state(job: Job) -> Iterator[str]:
    where = ",".join(job.nodes) or "no node"
    yield f"  {job.state} on {where}, {job.gpus} GPUs, user {job.user}, partition {job.partition}"
    if job.lease:
        yield f"  lease {job.lease.state}, {job.lease.vtime_s:.1f} s of virtual time, {job.lease.step} steps"
        yield from _measured(job.lease)
        if job.lease.requeue_owner:
            yield f"  {job.lease.requeue_owner} requeues it by itself: we do not"
        if job.lease.why_not_ready:
            yield f"  cannot be asked to yield: {job.lease.why_not_ready}"
    elif job.unmanageable:
        yield f"  left alone: {job.unmanageable}"
    yield from _resources(job)


def _resources(job: Job) -> Iterator[str]:
    """Yield what it has of CPUs and memory, why, and how far it is."""
    if job.profile_note:
        yield f"  {job.profile_note}"
    for share in job.placement:
        yield f"  has {share.cpus} CPUs and {share.memory_mb} MB on {share.node}"
    if job.progress is not None and job.progress.total_s:
        done = min(job.progress.done_s / job.progress.total_s, 1.0)
        yield f"  {done:.0%} done, {job.progress.attained_s:.0f} s with its GPUs"


def _measured(lease: Lease) -> Iterator[str]:
    """Yield what was measured lately, as far as it is known."""
    use = lease.use
    if use is None:
        return
    figures = (
        (lease.iteration_s, "{:.3g} s an iteration"), (use.iteration_p99_s, "p99 {:.3g} s"),
        (use.samples_s, "{:.4g} samples/s"), (use.data_wait, "{:.0%} of it waiting for data"),
        (use.gpu_percent, "GPU {:.0f} %"), (use.gpu_memory_mb, "{:.0f} MB on GPUs"),
        (use.cpu_percent, "CPU {:.0f} %"), (use.rss_mb, "{:.0f} MB resident"),
        (use.memory_low_mb, "{:.0f} MB at boundaries"), (use.memory_peak_mb, "{:.0f} MB at most"),
    )  # fmt: skip
    if known := [text.format(value) for value, text in figures if value is not None]:
        yield f"  measured: {', '.join(known)}"


def _section(title: str, rows: list[str]) -> Iterator[str]:
    if rows:
        yield f"{title} (newest first):"
        yield from (f"  {row}" for row in rows)


def _action(row: ActionRow) -> str:
    if not row.allowed:
        return f"{_time(row.at_s)} would {row.kind.lower()}: {row.reason} [kept in: {row.rule}]"
    failed = f", failed: {row.error}" if row.ok is False else OUTCOMES.get(row.verified, "")
    return f"{_time(row.at_s)} {row.kind.lower()}: {row.reason}{failed}"


def _switch(row: SwitchRow) -> str:
    text = f"{_time(row.at_s)} {row.host} {row.kind} in {row.total_s * 1e3:.1f} ms"
    if row.kind == "yield":
        text += f", of which {row.boundary_s * 1e3:.1f} ms to the boundary"
    if row.copy_s:
        text += f", copy {row.copy_s * 1e3:.2f} ms of {row.bytes / 1e6:.1f} MB"
    return text + (f" ({row.note})" if row.note else "")


def _event(row: EventRow) -> str:
    return f"{_time(row.at_s)} {row.host} {row.kind} {row.detail}".rstrip()


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).astimezone().strftime("%F %T")
