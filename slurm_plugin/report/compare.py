"""Comparison of runs: results by label, each figure against the baseline's, jobs paired one by one (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any, TypeVar

from cadenza.policies.core.errors import InputError
from cadenza.policies.simulator.figures import quantile
from cadenza.policies.simulator.load_sweep import load_rows
from cadenza.policies.simulator.run_values import JobResult
from cadenza.slurm_plugin.report.metrics import METRICS, OPTIONAL, Better, comparable
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Loaded, PairedSpeedUp, Result, Run, Slice, Verdict
from cadenza.slurm_plugin.report.sentences import notes, summary
from cadenza.slurm_plugin.report.stats import clear, estimate
from cadenza.slurm_plugin.report.units import HOUR_S

T = TypeVar("T", int, str)
MIN_RELATIVE_DIFFERENCE = 0.005
"""Least difference that counts as better or worse."""
MAX_ROWS = 12
"""Models and users that a table shows: those with the most jobs."""
MIN_JOBS, MOST_CHANGED = 10, 6
"""Jobs of a user or class whose mean says something; users and classes in the list of each direction."""
WIDTHS = ((1, "1 GPU"), (7, "2 to 7 GPUs"), (8, "8 GPUs"), (inf, "more GPUs"))
LENGTHS = ((600.0, "under 10 min"), (HOUR_S, "to 1 h"), (10 * HOUR_S, "to 10 h"), (inf, "longer"))
"""Largest number of GPUs, and largest run time in seconds, of each class."""


def compare(files: Sequence[Loaded], baseline: str | None) -> Comparison:
    """Return the comparison of at least one file.

    The default baseline is the one that the first simulation was compared with, else the first label.
    Raise InputError if no file has the label ``baseline``, or a file is given twice.
    """
    files = (*_baselines(files), *files)
    files, warnings = distinct(files)
    results = grouped(files, baseline)
    return Comparison(
        results,
        dict(_table(results)),
        {result.label: paired_speed_up(result, results[0]) for result in results[1:]},
        slices_by(results, lambda _run, job: job.gpus),
        slices_by(results, lambda _run, job: job.model or "unknown"),
        slices_by(results, lambda run, job: run.classes.get(job.model, "unknown")),
        slices_by(results, lambda _run, job: job.user or "unknown"),
        _named(slices_by(results, lambda _run, job: size_class(job))),
        (*warnings, *notes(results)),
    )


def _baselines(files: Sequence[Loaded]) -> Iterator[Loaded]:
    """Yield the saved baseline of the first file that has one, and other files' runs of it with further seeds."""
    labels, name, seeds = {file.label for file in files}, "", set[int | None]()
    for baseline in (file.baseline for file in files):
        if baseline is None or baseline.label in labels or baseline.label != (name or baseline.label):
            continue
        name = baseline.label
        runs = tuple(run for run in baseline.runs if run.seed not in seeds)
        seeds |= {run.seed for run in runs}
        if runs:
            yield replace(baseline, runs=runs)


def distinct(files: Sequence[Loaded]) -> tuple[tuple[Loaded, ...], tuple[str, ...]]:
    """Give files with the same label and seed labels of their own; return all files and a note on each such label.

    Raise InputError if one file holds a seed twice or is given twice.
    """
    sources_by_part: dict[tuple[str, float, int | None], list[str]] = {}
    for file in files:
        parts = [(0.0, run.seed) for run in file.runs] + [(point.load, point.seed) for point in file.sweep]
        for load, seed in parts:  # a run has load 0
            sources_by_part.setdefault((file.label, load, seed), []).append(file.source)
    for (label, _, seed), sources in sources_by_part.items():
        if len(set(sources)) < len(sources):
            raise InputError(f"{sources[-1]}: {label!r} with seed {seed} appears twice")
    clashing = {label for (label, *_), sources in sources_by_part.items() if len(sources) > 1}
    distinct_files = tuple(
        replace(file, label=f"{file.label} ({file.source})") if file.label in clashing else file for file in files
    )
    return distinct_files, tuple(
        f"Several files have the label “{label}” and the same seed, so they appear as separate results."
        for label in sorted(clashing)
    )


def grouped(files: Sequence[Loaded], baseline: str | None) -> tuple[Result, ...]:
    """Return a result for each label, the baseline first, with its runs in the order of their seeds."""
    labels = list(dict.fromkeys(file.label for file in files))
    first = labels[0] if baseline is None else baseline
    if first not in labels:
        raise InputError(f"--baseline {first}: no result has this label; the labels are {', '.join(labels)}")
    labels.remove(first)
    results = []
    for index, label in enumerate([first, *labels]):
        own = tuple(file for file in files if file.label == label)
        runs = sorted((run for file in own for run in file.runs), key=lambda run: (run.seed or 0, run.source))
        results.append(Result(label, own, tuple(runs), index))
    return tuple(results)


def same_seeds(ours: Result, theirs: Result) -> bool:
    """Return True if two results have the same known seeds, so that their runs can be paired."""
    return ours.seeds == theirs.seeds and None not in ours.seeds


def _table(results: Sequence[Result]) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    jct_h = [value for run in results[0].runs if (value := run.summary.get("avg_jct_h")) is not None]
    for metric in METRICS:
        values = [[run.summary.get(metric.key) for run in result.runs] for result in results]
        bases = [value for value in values[0] if value is not None]
        small = bool(bases) and not comparable(metric.key, fmean(bases), fmean(jct_h) if jct_h else None)
        cells = tuple(
            compare_cell(
                mine, values[0], metric.better, paired=same_seeds(result, results[0]), first=small or result.index == 0
            )
            for result, mine in zip(results, values, strict=True)
        )
        if any(cell.estimate and (cell.estimate.mean or metric.key not in OPTIONAL) for cell in cells):
            yield metric.key, cells


def compare_cell(
    mine: Sequence[float | None], base: Sequence[float | None], better: Better, *, paired: bool, first: bool = False
) -> Cell:
    """Return one figure and its comparison with the baseline; it is missing if one seed lacks it."""
    ours, theirs = ([item for item in values if item is not None] for values in (mine, base))
    if not ours or len(ours) < len(mine):
        return Cell(None)
    figure = estimate(ours)
    if first or not theirs or len(theirs) < len(base) or not (mean := estimate(theirs).mean):
        return Cell(figure)
    ratio = figure.mean / mean
    return Cell(figure, ratio, verdict(ratio, better, clear(ours, theirs, paired=paired)))


def verdict(ratio: float, better: Better, is_clear: bool | None) -> Verdict:  # noqa: FBT001 (one of three facts)
    """Return the word for a ratio to the baseline."""
    if abs(ratio - 1) < MIN_RELATIVE_DIFFERENCE:
        return "same"
    if is_clear is False:
        return "unclear"
    if not better:
        return "more" if ratio > 1 else "less"
    return "better" if (ratio > 1) == (better == "higher") else "worse"


def paired_speed_up(ours: Result, baseline: Result) -> PairedSpeedUp:
    """Return the speed-up of each job over the baseline; jobs are paired by id and by known seeds.

    Jobs with another submission, number of GPUs or model are not paired, because the workloads differ.
    """
    ratios: list[float] = []
    total = 0
    for mine, base in run_pairs(ours, baseline):
        there = {job.id: job for job in base.jobs}
        total += len(mine.jobs)
        ratios += [ratio for job in mine.jobs if (ratio := _ratio(job, there.get(job.id))) is not None]
    return PairedSpeedUp(tuple(sorted(ratios)), total - len(ratios))


def run_pairs(ours: Result, baseline: Result) -> Iterator[tuple[Run, Run]]:
    """Yield pairs of runs with the same seed; without seeds, pairs by position."""
    if None in (*ours.seeds, *baseline.seeds):
        yield from zip(ours.runs, baseline.runs, strict=False)
        return
    there = {run.seed: run for run in baseline.runs}
    yield from ((run, there[run.seed]) for run in ours.runs if run.seed in there)


def _ratio(job: JobResult, base: JobResult | None) -> float | None:
    if base is None or (job.submit_s, job.gpus, job.model) != (base.submit_s, base.gpus, base.model):
        return None
    if job.jct_s is None or base.jct_s is None or job.jct_s <= 0:
        return None
    return base.jct_s / job.jct_s or None


def slices_by(results: Sequence[Result], kind: Callable[[Run, JobResult], T]) -> tuple[Slice, ...]:
    """Return the mean JCT of each kind of job, kinds in the order of their names."""
    kinds: list[list[dict[T, list[float]]]] = []
    """Completion times in hours by kind of job, of each result and run."""
    for result in results:
        kinds.append([])
        for run in result.runs:
            hours: defaultdict[T, list[float]] = defaultdict(list)
            for job in run.jobs:
                if job.jct_s is not None:
                    hours[kind(run, job)].append(job.jct_s / HOUR_S)
            kinds[-1].append(hours)
    names = sorted({name for runs in kinds for run in runs for name in run})
    return tuple(_slice(name, results, kinds) for name in names)


def largest(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Return the slices with the most jobs, in their own order: as many as a table shows."""
    kept = sorted(slices, key=lambda item: (-max(item.jobs), item.name))[:MAX_ROWS]
    return tuple(item for item in slices if item in kept)


def uncompared(comparison: Comparison, label: str) -> Comparison:
    """Return the comparison in which one result is shown, and not judged against the baseline."""
    at = next(result.index for result in comparison.results if result.label == label)

    def plainly(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        return (*cells[:at], Cell(cells[at].estimate), *cells[at + 1 :])

    kinds = {
        name: tuple(item._replace(cells=plainly(item.cells)) for item in getattr(comparison, name))
        for name in ("by_gpus", "by_model", "by_class", "by_user", "by_size")
    }
    return replace(
        comparison, cells={key: plainly(cells) for key, cells in comparison.cells.items()},
        speed_ups={**comparison.speed_ups, label: PairedSpeedUp((), 0)}, **kinds,
    )  # fmt: skip


def most_changed(comparison: Comparison, label: str) -> tuple[Slice, ...]:
    """Return the users and the classes by size that one result changes most: those that win, then those that lose.

    Kinds of fewer than ``MIN_JOBS`` jobs are left out.
    """
    position = next(result.index for result in comparison.results if result.label == label)
    changes = [
        (ratio, item.name, item)
        for item in (*(user._replace(name=f"user {user.name}") for user in comparison.by_user), *comparison.by_size)
        if min(item.jobs) >= MIN_JOBS and (ratio := item.cells[position].ratio) is not None
    ]
    ordered = sorted(changes, key=lambda change: change[:2])
    wins = [item for ratio, _, item in ordered if ratio < 1 - MIN_RELATIVE_DIFFERENCE]
    losses = [item for ratio, _, item in ordered if ratio > 1 + MIN_RELATIVE_DIFFERENCE]
    return (*wins[:MOST_CHANGED], *losses[-MOST_CHANGED:])


def _named(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Return the slices of size classes with the names of their widths and lengths."""
    places = [divmod(int(item.name), len(LENGTHS)) for item in slices]
    names = [f"{WIDTHS[width][1]}, {LENGTHS[length][1]}" for width, length in places]
    return tuple(item._replace(name=name) for item, name in zip(slices, names, strict=True))


def size_class(job: JobResult) -> int:
    """Return the number of a job's class: widths times lengths, from few GPUs and short to many and long."""
    width = next(at for at, (most, _) in enumerate(WIDTHS) if job.gpus <= most)
    length = next(at for at, (most, _) in enumerate(LENGTHS) if job.work_s <= most)
    return width * len(LENGTHS) + length


def _slice(name: T, results: Sequence[Result], kinds: Sequence[Sequence[dict[T, list[float]]]]) -> Slice:
    means = [[fmean(run[name]) if name in run else None for run in runs] for runs in kinds]
    return Slice(
        str(name),
        tuple(sum(len(run.get(name, ())) for run in runs) / max(len(runs), 1) for runs in kinds),
        tuple(
            compare_cell(mine, means[0], "lower", paired=same_seeds(result, results[0]), first=result.index == 0)
            for result, mine in zip(results, means, strict=True)
        ),
    )


# --- For --json -------------------------------------------------------------------------------------------


def plain(comparison: Comparison, page: str) -> dict[str, Any]:
    """Return a comparison as JSON types; names and units are those of `cadenza simulate --json`."""
    return {
        "page": page,
        "baseline": comparison.baseline.label,
        "notes": list(comparison.notes),
        "results": [_result(result, comparison) for result in comparison.results],
    }


def _result(result: Result, comparison: Comparison) -> dict[str, Any]:
    return {
        "label": result.label,
        "summary": summary(result, comparison),
        "files": [
            {"file": file.source, "arguments": file.arguments, "seeds": [run.seed for run in file.runs]}
            for file in result.files
        ],
        "figures": {key: _figure(cells[result.index]) for key, cells in comparison.cells.items()},
        "sweep": load_rows(result.sweep),
        "speed_up": _speed_up(result, comparison),
    }


def _figure(cell: Cell) -> dict[str, Any] | None:
    """Return a mean over seeds, half its 95 % interval, and its comparison with the baseline."""
    if cell.estimate is None:
        return None
    mean, half, seeds = cell.estimate
    return {"mean": mean, "half": half, "seeds": seeds, "ratio": cell.ratio, "verdict": cell.verdict}


def _speed_up(result: Result, comparison: Comparison) -> dict[str, Any] | None:
    """Return the speed-up of the jobs, each compared with itself in the baseline."""
    paired = comparison.speed_ups.get(result.label)
    if not paired or not paired.ratios:
        return None
    return {
        "jobs": len(paired.ratios),
        "unpaired": paired.unpaired,
        "median": quantile(paired.ratios, 0.5),
        "sooner": sum(ratio > 1 for ratio in paired.ratios) / len(paired.ratios),
        "later": sum(ratio < 1 for ratio in paired.ratios) / len(paired.ratios),
    }
