"""Reads saved simulations and checks their values beyond the schema (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.simulator.result_file import Saved, SavedRun, decode
from cadenza.policies.simulator.run_values import JobResult
from cadenza.slurm_plugin.report.page_model import Loaded, Run

MAX_VALUE = 1e12
"""Largest time, count or figure; sums of such numbers are still exact enough to draw."""


def load(data: bytes, source: str) -> Loaded:
    """Return the contents of one file of ``cadenza simulate --save``.

    Raise InputError with file and key for another file, and for impossible values.
    """
    saved = decode(data, source)
    for problem in _problems(saved):
        raise InputError(f"{source}: {problem}")
    baseline = None
    if saved.baseline_runs:
        baseline = Loaded(source, saved.baseline, saved.arguments, tuple(_runs(saved, saved.baseline_runs, source)))
    return Loaded(source, saved.label, saved.arguments, tuple(_runs(saved, saved.runs, source)), saved.sweep, baseline)


def _runs(saved: Saved, runs: Sequence[SavedRun], source: str) -> Iterator[Run]:
    for run in runs:
        ordered = sorted(run.jobs, key=lambda job: (job.submit_s, job.id))
        jobs = tuple(ordered[slice(*(window(saved.arguments) or (0, None)))])
        figures, size = dict(_figures(run.summary)), (saved.gpus, saved.cpus)
        yield Run(source, run.seed, jobs, run.samples, *size, run.end_s, figures, saved.classes)


def window(arguments: Sequence[str]) -> tuple[int, int] | None:
    """Return the half-open range of job positions that ``--set window`` counts, or None for all.

    >>> window(("--set", "window=4000:5000")), window(("--json",))
    ((4000, 5000), None)
    """
    given = next((word.removeprefix("window=") for word in arguments if word.startswith("window=")), "")
    first, _, last = given.partition(":")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else None


def _figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a summary, those of its nested object as ``decision_p50_ms`` and so on."""
    for key, value in summary.items():
        if _is_number(value):
            yield key, float(value)
        elif key == "decision_ms" and isinstance(value, dict):
            yield from ((f"decision_{name}_ms", float(part)) for name, part in value.items() if _is_number(part))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problems(saved: Saved) -> Iterator[str]:
    """Yield each problem as key and sentence."""
    if not saved.label.strip():
        yield "label: is empty"
    if not saved.runs and not saved.sweep:
        yield "runs: the file has neither a run nor a sweep"
    for key, value in (("gpus", saved.gpus), ("cpus", saved.cpus)):
        if not 1 <= value <= MAX_VALUE:
            yield f"{key}: {value} is not a number of {key.upper()[:-1]}s"
    if saved.baseline_runs and not saved.baseline.strip():
        yield "baseline: is empty, and there are baseline_runs"
    for key, runs in (("runs", saved.runs), ("baseline_runs", saved.baseline_runs)):
        for at, run in enumerate(runs):
            yield from (f"{key}[{at}].{problem}" for problem in _run_problems(run))
    for at, point in enumerate(saved.sweep):
        if not _sound(point.load) or not _sound(point.mean_jct_h or 0.0) or point.load == 0:
            yield f"sweep[{at}]: load and mean_jct_h must be positive numbers"


def _run_problems(run: SavedRun) -> Iterator[str]:
    if not _sound(run.end_s):
        yield f"end_s: {run.end_s:g} is not a time"
    ids: set[int] = set()
    for at, job in enumerate(run.jobs):
        if job.id in ids:
            yield f"jobs[{at}].id: {job.id} appears twice"
        ids.add(job.id)
        yield from (f"jobs[{at}].{problem}" for problem in _job_problems(job))
    yield from _sample_problems(run)
    for key, value in _figures_or_too_big(run.summary):
        yield f"summary.{key}: {value!r} is not a figure"


def _job_problems(job: JobResult) -> Iterator[str]:
    if not _sound(job.submit_s):
        yield f"submit_s: {job.submit_s:g} is not a time"
    if not 1 <= job.gpus <= MAX_VALUE:
        yield f"gpus: {job.gpus} is not a number of GPUs"
    if job.finish_s is not None and not (_sound(job.finish_s) and job.finish_s >= job.submit_s):
        yield f"finish_s: {job.finish_s:g} is not a time after submit_s"


def _sample_problems(run: SavedRun) -> Iterator[str]:
    before = 0.0
    for at, row in enumerate(run.samples):
        if not all(_sound(value) for value in msgspec.structs.astuple(row)):
            yield f"samples[{at}]: holds a number that is negative or too large"
        elif not before <= row.time_s <= run.end_s:
            yield f"samples[{at}]: {row.time_s:g} s is before the sample above it, or after end_s"
        before = row.time_s


def _figures_or_too_big(summary: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    try:
        figures = dict(_figures(summary))
    except OverflowError:
        yield "*", "a number that is too large"
        return
    yield from ((key, value) for key, value in figures.items() if not _sound(value))


def _sound(value: float) -> bool:
    return math.isfinite(value) and 0 <= value <= MAX_VALUE
