"""The record of a job, and the effects of decisions, as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from cadenza.policies.core.model import Job, Lease
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.store.reader import ActionRow, JobRecord, SwitchRow

OUTCOMES = {None: "", "verified": "", "gone": ", the job had ended", "failed": ", without effect so far"}
MESSAGES = {
    "no decision": "no decision so far",
    "ended": "no longer in Slurm; last: {}",
    "requeue owner": "{} requeues it by itself, so Cadenza does not",
    "not ready": "cannot be asked to yield: {}",
    "unrestored": "is not moved again: {}",
    "unready": "can save no checkpoint yet, so it keeps its GPUs: {}",
    "unmanageable": "left alone: {}",
    "kept in": "would {}: {} [kept in: {}]",
}
"""Sentences of ``cadenza why`` about a job or an action, with a place for each variable part."""
WORDS = "level, quantum, lease and other words: docs/glossary.md"


def summary(record: JobRecord) -> str:
    """Return the last reason as one sentence; it stays on record after the job has ended."""
    reason = record.reason or (record.actions[0].reason if record.actions else MESSAGES["no decision"])
    return reason if record.job else MESSAGES["ended"].format(reason)


def lines(record: JobRecord) -> Iterator[str]:
    """Yield the whole record as text, newest first."""
    yield f"job {record.id}: {summary(record)}"
    yield from (f"  {fault}" for fault in record.faults)
    yield from (f"  {line}" for line in (state_lines(record.job) if record.job else ()))
    for title, rows in sections(record):
        yield f"{title} (newest first):"
        yield from (f"  {row}" for row in rows)
    yield WORDS


def sections(record: JobRecord) -> list[tuple[str, list[str]]]:
    """Return the parts of a record that are not empty, each with its title and a sentence for each row."""
    events = [f"{_time(row.at_s)} {row.host} {row.kind} {row.detail}".rstrip() for row in record.events]
    found = [
        ("decisions", [_action(row) for row in record.actions]),
        ("measured", [f"{_time(row.at_s)} {effect_sentence(row)}" for row in record.effects]),
        ("yields and resumes", [_switch(row) for row in record.switches]),
        ("reported by its hosts", events),
    ]
    return [(title, rows) for title, rows in found if rows]


def state_lines(job: Job) -> Iterator[str]:
    """Yield the job's present state: place, lease, measurements, resources and progress."""
    where = ",".join(job.nodes) or "no node"
    yield f"{job.state} on {where}, {job.gpus} GPUs, user {job.user}, partition {job.partition}"
    if job.lease:
        yield f"lease {job.lease.state}, {job.lease.step} steps, {job.lease.vtime_s:.1f} s of GPU time count for turns"
        yield from _measured(job.lease)
        if job.lease.requeue_owner:
            yield MESSAGES["requeue owner"].format(job.lease.requeue_owner)
        if job.lease.unrestored:
            yield MESSAGES["unrestored"].format(job.lease.unrestored)
        if job.lease.unready:
            yield MESSAGES["unready"].format(job.lease.unready)
        if job.lease.why_not_ready:
            yield MESSAGES["not ready"].format(job.lease.why_not_ready)
    elif job.unmanageable:
        yield MESSAGES["unmanageable"].format(job.unmanageable)
    if job.profile_note:
        yield job.profile_note
    for share in job.placement:
        yield f"has {share.cpus} CPUs and {share.memory_mb} MB on {share.node}"
    if job.progress is not None and job.progress.total_s:
        done = min(job.progress.done_s / job.progress.total_s, 1.0)
        yield f"{done:.0%} done, {job.progress.attained_s:.0f} s with its GPUs"


def _measured(lease: Lease) -> Iterator[str]:
    """Yield the available recent measurements."""
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
    if texts := [text.format(value) for value, text in figures if value is not None]:
        yield f"measured: {', '.join(texts)}"


def _action(row: ActionRow) -> str:
    if not row.allowed:
        return f"{_time(row.at_s)} {MESSAGES['kept in'].format(row.kind.lower(), row.reason, row.rule)}"
    failed = f", failed: {row.error}" if row.ok is False else OUTCOMES.get(row.verified, "")
    return f"{_time(row.at_s)} {row.kind.lower()}: {row.reason}{failed}"


def _switch(row: SwitchRow) -> str:
    text = f"{_time(row.at_s)} {row.host} {row.kind} in {row.total_s * 1e3:.1f} ms"
    if row.kind == "yield":
        text += f", of which {row.boundary_s * 1e3:.1f} ms to the boundary"
    if row.copy_s:
        text += f", copy {row.copy_s * 1e3:.2f} ms of {row.bytes / 1e6:.1f} MB"
    return text + (f" ({row.note})" if row.note else "")


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).astimezone().strftime("%F %T")


def effect_sentence(effect: Effect) -> str:
    """Return the change, the measurement and the verdict of one decision."""
    # 1. The change, and the iteration times before and after it.
    to = effect.now or "where Slurm starts it"
    change = effect.now if effect.kind == "pack" else f"from {effect.was or 'its former share'} to {to}"
    times = ""
    if effect.before_s is not None or effect.after_s is not None:
        before, after = (f"{value:.3g} s" if value is not None else "?" for value in (effect.before_s, effect.after_s))
        times = f"{before} an iteration before, {after} after"
    # 2. The ratio of throughput after to before, as measured and as promised.
    gain = promised = f"promised {effect.predicted:.2f}x" if effect.predicted is not None else ""
    if effect.gain is not None:
        of = " of turns" if effect.kind == "pack" else ""
        gain = f"{effect.gain:.2f}x{of}" + (f" ({promised})" if promised else "")
    # 3. The verdict with its reason.
    verdict = (effect.verdict or "being measured") + (f": {effect.detail}" if effect.detail else "")
    return f"{effect.kind} {change}: {', '.join(filter(None, (times, gain, verdict)))}"
