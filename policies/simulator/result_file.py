"""Saved simulations, schema ``cadenza.simulation/1``: files of ``cadenza simulate --save`` for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.strict_mapping import input_error
from cadenza.policies.simulator.figures import mean_over
from cadenza.policies.simulator.run_values import JobResult, Result, Sample

SCHEMA: Literal["cadenza.simulation/1"] = "cadenza.simulation/1"
MAX_SAMPLES = 2000
"""Samples that a saved run keeps."""


class SweepPoint(msgspec.Struct, frozen=True):
    """One load of a sweep with one seed: jobs an hour, hours, share of the GPUs held."""

    load: float
    seed: int
    mean_jct_h: float | None
    gpu_utilization: float
    stable: bool


class SavedRun(msgspec.Struct, frozen=True):
    """One simulation with one seed; ``seed`` is None for a trace."""

    seed: int | None
    end_s: float
    summary: dict[str, Any]
    """As ``cadenza simulate --json`` prints it."""
    jobs: tuple[JobResult, ...]
    samples: tuple[Sample, ...]


class Saved(msgspec.Struct, frozen=True):
    """A file: one run for each seed, or the points of a load sweep."""

    label: str
    arguments: tuple[str, ...]
    """The command's words, without the program's name."""
    gpus: int
    cpus: int
    runs: tuple[SavedRun, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    classes: dict[str, str] = {}
    """Tasks of the models that have one."""
    baseline: str = ""
    """Name of the baseline that the runs were compared with; empty without one."""
    baseline_runs: tuple[SavedRun, ...] = ()
    """The same jobs under it, a run for each seed."""
    schema: Literal["cadenza.simulation/1"] = SCHEMA


def save_run(result: Result, seed: int | None, summary: Mapping[str, Any]) -> SavedRun:
    """Return one run as it is saved: jobs that were submitted, and at most 2,000 samples."""
    jobs = tuple(job for job in result.jobs if job.submit_s <= result.end_s)
    return SavedRun(seed, result.end_s, dict(summary), jobs, thin(result.samples, result.end_s))


def thin(samples: Sequence[Sample], end_s: float, most: int = MAX_SAMPLES) -> tuple[Sample, ...]:
    """Return the samples, or where there are more than ``most`` their means over as many equal intervals."""
    if len(samples) <= most:
        return tuple(samples)
    begin = samples[0].time_s
    width = (end_s - begin) / most
    edges = [begin + width * position for position in range(most + 1)]
    rows: list[Sample] = []
    first = 0
    for left, right in pairwise(edges):
        while first + 1 < len(samples) and samples[first + 1].time_s <= left:
            first += 1
        last = first
        while last < len(samples) and samples[last].time_s < right:
            last += 1
        rows.append(_mean_row(samples[first:last], left, right))
    return tuple(rows)


def _mean_row(samples: Sequence[Sample], left: float, right: float) -> Sample:
    return Sample(
        left,
        mean_over(samples, lambda sample: sample.gpus_held, left, right),
        mean_over(samples, lambda sample: sample.cpus_used, left, right),
        mean_over(samples, lambda sample: sample.running, left, right),
        mean_over(samples, lambda sample: sample.waiting, left, right),
        mean_over(samples, lambda sample: sample.busy, left, right),
        mean_over(samples, lambda sample: sample.idle_waiting, left, right),
    )


def encode(saved: Saved) -> bytes:
    """Return a file's content, JSON."""
    return msgspec.json.encode(saved)


def decode(data: bytes, source: str) -> Saved:
    """Return a file's content; raise InputError, naming file and key, for a file that ``--save`` did not write."""
    try:
        return msgspec.json.decode(data, type=Saved)
    except msgspec.ValidationError as error:
        raise InputError(f"{input_error(error, source)}; is it from cadenza simulate --save?") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: not JSON: {error}") from None
