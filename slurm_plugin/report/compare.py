"""From runs to a comparison: results by label, each figure against the baseline's, jobs paired one by one (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from cadenza.policies.core.errors import InputError
from cadenza.policies.simulator.run_values import JobResult
from cadenza.slurm_plugin.report.metrics import METRICS, OPTIONAL, Better
from cadenza.slurm_plugin.report.notes import notes
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Loaded, PairedSpeedUp, Result, Run, Slice, Verdict
from cadenza.slurm_plugin.report.stats import clear, estimate
from cadenza.slurm_plugin.report.units import HOUR_S

T = TypeVar("T", int, str)
SAME = 0.005
"""A relative difference below this is not called better or worse."""
MOST_MODELS = 12


def compare(files: Sequence[Loaded], baseline: str | None) -> Comparison:
    """Return the comparison of at least one file; the first label is the baseline where none is named.

    Raises InputError when ``baseline`` is not a label among them, or a file is named twice.
    """
    apart, renamed = distinct(files)
    results = grouped(apart, baseline)
    return Comparison(
        results,
        {key: cells for key, cells in _table(results) if key not in OPTIONAL or _shows(cells)},
        {result.label: paired_speed_up(result, results[0]) for result in results[1:]},
        _slices(results, lambda _run, job: job.gpus),
        _fold(_slices(results, lambda _run, job: job.model or "unknown")),
        _slices(results, lambda run, job: run.classes.get(job.model, "unknown")),
        (*renamed, *notes(results)),
    )


def distinct(files: Sequence[Loaded]) -> tuple[tuple[Loaded, ...], tuple[str, ...]]:
    """Tell files of one label apart that hold the same seed; return them with a note on each such label.

    Raises InputError when one file holds a seed twice, or is named twice.
    """
    found: dict[tuple[str, float, int | None], list[str]] = {}
    for file in files:
        for load, seed in _parts(file):
            found.setdefault((file.label, load, seed), []).append(file.source)
    for (label, _, seed), sources in found.items():
        if len(set(sources)) < len(sources):
            raise InputError(f"{sources[-1]}: {label!r} with seed {seed} is there twice")
    clashing = {label for (label, *_), sources in found.items() if len(sources) > 1}
    apart = tuple(_by_file(file) if file.label in clashing else file for file in files)
    return apart, tuple(
        f"Several files hold the label “{label}” with the same seed: they are shown apart, by file."
        for label in sorted(clashing)
    )


def _parts(file: Loaded) -> Iterator[tuple[float, int | None]]:
    """Yield load and seed of everything in a file; a run's load counts as 0."""
    yield from ((0.0, run.seed) for run in file.runs)
    yield from ((point.load, point.seed) for point in file.sweep)


def _by_file(file: Loaded) -> Loaded:
    return replace(file, label=f"{file.label} ({file.source})")


def grouped(files: Sequence[Loaded], baseline: str | None) -> tuple[Result, ...]:
    """Return a result for each label, the baseline first, others in the order given; runs in order of seeds."""
    labels = list(dict.fromkeys(file.label for file in files))
    first = labels[0] if baseline is None else baseline
    if first not in labels:
        raise InputError(f"--baseline {first}: no result has this label; there are {', '.join(labels)}")
    labels.remove(first)
    return tuple(
        _result(label, [file for file in files if file.label == label], index)
        for index, label in enumerate([first, *labels])
    )


def _result(label: str, files: Sequence[Loaded], index: int) -> Result:
    runs = sorted((run for file in files for run in file.runs), key=lambda run: (run.seed or 0, run.source))
    return Result(label, tuple(files), tuple(runs), index)


def same_seeds(ours: Result, theirs: Result) -> bool:
    """Tell whether two results have the same known seeds, so that run k of one belongs to run k of the other."""
    return ours.seeds == theirs.seeds and None not in ours.seeds


def _table(results: Sequence[Result]) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    for metric in METRICS:
        values = [[run.summary.get(metric.key) for run in result.runs] for result in results]
        cells = tuple(
            cell(mine, values[0], metric.better, paired=same_seeds(result, results[0]), first=result.index == 0)
            for result, mine in zip(results, values, strict=True)
        )
        if any(found.estimate for found in cells):
            yield metric.key, cells


def _shows(cells: Sequence[Cell]) -> bool:
    return any(found.estimate and found.estimate.mean for found in cells)


def cell(
    mine: Sequence[float | None], base: Sequence[float | None], better: Better, *, paired: bool, first: bool = False
) -> Cell:
    """Return one figure and how it stands to the baseline's; a figure that a seed lacks is none."""
    ours, theirs = _known(mine), _known(base)
    if not ours:
        return Cell(None)
    figure = estimate(ours)
    if first or not theirs or not (mean := estimate(theirs).mean):
        return Cell(figure)
    ratio = figure.mean / mean
    return Cell(figure, ratio, verdict(ratio, better, clear(ours, theirs, paired=paired)))


def _known(values: Sequence[float | None]) -> list[float]:
    known = [item for item in values if item is not None]
    return known if len(known) == len(values) else []


def verdict(ratio: float, better: Better, is_clear: bool | None) -> Verdict:  # noqa: FBT001 (one of three facts)
    """Return the word for a ratio to the baseline."""
    if abs(ratio - 1) < SAME:
        return "same"
    if is_clear is False:
        return "unclear"
    if not better:
        return "more" if ratio > 1 else "less"
    return "better" if (ratio > 1) == (better == "higher") else "worse"


def paired_speed_up(ours: Result, baseline: Result) -> PairedSpeedUp:
    """Return how much sooner each job ended than in the baseline: jobs are paired by id, and by seed where it is known.

    A pair whose submission, GPUs or model differ is no pair: the workloads differ.
    """
    ratios: list[float] = []
    total = 0
    for mine, base in run_pairs(ours, baseline):
        there = {job.id: job for job in base.jobs}
        total += len(mine.jobs)
        ratios += [found for job in mine.jobs if (found := _ratio(job, there.get(job.id))) is not None]
    return PairedSpeedUp(tuple(sorted(ratios)), total - len(ratios))


def run_pairs(ours: Result, baseline: Result) -> Iterator[tuple[Run, Run]]:
    """Yield runs that saw the same workload as far as seeds say: of one seed, or by position where there is none."""
    if None in (*ours.seeds, *baseline.seeds):
        yield from zip(ours.runs, baseline.runs, strict=False)
        return
    there = {run.seed: run for run in baseline.runs}
    yield from ((run, there[run.seed]) for run in ours.runs if run.seed in there)


def _ratio(job: JobResult, base: JobResult | None) -> float | None:
    if base is None or job.jct_s is None or base.jct_s is None or not alike(job, base) or job.jct_s <= 0:
        return None
    return base.jct_s / job.jct_s or None


def alike(job: JobResult, other: JobResult) -> bool:
    """Tell whether two runs saw one and the same job."""
    return (job.submit_s, job.gpus, job.model) == (other.submit_s, other.gpus, other.model)


def _slices(results: Sequence[Result], kind: Callable[[Run, JobResult], T]) -> tuple[Slice, ...]:
    """Return the mean JCT of each kind of jobs, kinds in order of their names."""
    found = [[_by_kind(run, kind) for run in result.runs] for result in results]
    names = sorted({name for runs in found for run in runs for name in run})
    return tuple(_slice(name, results, found) for name in names)


def _by_kind(run: Run, kind: Callable[[Run, JobResult], T]) -> dict[T, list[float]]:
    """Return the completion times of each kind of jobs, in hours."""
    kinds: dict[T, list[float]] = {}
    for job in run.jobs:
        if job.jct_s is not None:
            kinds.setdefault(kind(run, job), []).append(job.jct_s / HOUR_S)
    return kinds


def _slice(name: T, results: Sequence[Result], found: Sequence[Sequence[dict[T, list[float]]]]) -> Slice:
    means = [[_average(run.get(name)) for run in runs] for runs in found]
    return Slice(
        str(name),
        tuple(sum(len(run.get(name, ())) for run in runs) for runs in found),
        tuple(
            cell(mine, means[0], "lower", paired=same_seeds(result, results[0]), first=result.index == 0)
            for result, mine in zip(results, means, strict=True)
        ),
    )


def _average(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _fold(slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Keep the kinds with the most jobs."""
    most = sorted(slices, key=lambda item: (-max(item.jobs), item.name))[:MOST_MODELS]
    return tuple(item for item in slices if item in most)
