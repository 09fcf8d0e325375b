"""Charts of a page as data: distributions, the cluster over time, and completion time against load (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cadenza.policies.simulator.figures import quantile
from cadenza.policies.simulator.load_sweep import highest_stable, load_rows
from cadenza.policies.simulator.run_values import Sample
from cadenza.slurm_plugin.report.chart_model import Axis, Chart, Line, log_bounds, upper
from cadenza.slurm_plugin.report.page_model import Comparison, Result, Run
from cadenza.slurm_plugin.report.stats import bins, distribution
from cadenza.slurm_plugin.report.units import HOUR_S, NARROW, axis_unit, count, duration, times, unit_of

MIN_LOG_RATIO = 20.0
"""Ratio of largest to smallest completion time from which the axis is logarithmic."""

TAIL = 0.005
"""Fraction of the jobs at each end that the axis of speed-ups leaves out, because a few would squeeze all others."""

PERCENT_END = 101.0
"""End of an axis of percent; it leaves room for the width of a line at 100 %."""
MAX_IDLE_START = 0.2
"""Largest fraction of an axis of time that may be empty at its start."""


def charts(comparison: Comparison, limit: int) -> tuple[Chart, ...]:
    """Return the charts that have data; lines have at most ``limit`` points."""
    candidates = [_completion(comparison, limit), _speed_up(comparison, limit), _load(comparison)]
    # Without profiles busy GPUs equal held GPUs and are left out.
    runs = [run for result in comparison.results for run in result.runs]
    differs = any(sample.busy != sample.gpus_held for run in runs for sample in run.samples)
    views = [view for view in VIEWS if differs or view.key != "busy"]
    candidates += [_over_time(comparison, view, max(2, limit // 2)) for view in views]
    return tuple(chart for chart in candidates if chart is not None)


def _completion(comparison: Comparison, limit: int) -> Chart | None:
    lines = []
    for result in comparison.results:
        ordered = [job.jct_s for run in result.runs for job in run.jobs if job.jct_s]
        points = distribution(ordered, sum(len(run.jobs) for run in result.runs), limit)
        median = comparison.mean("p50_jct_h", result)
        note = "" if median is None else f"median {duration(median * HOUR_S)}"
        if points:
            lines.append(Line(result.index, result.label, points, note, step=True))
    if not lines:
        return None
    low, high = log_bounds([x for line in lines for x, _ in (line.points[0], line.points[-1])])
    return Chart(
        "jct",
        "Job completion time",
        "Share of the jobs that ended within a time after their submission. Further left is better.",
        _medians("the median completion time is", lines),
        Axis("time from submission to end", "time", max(low, 0.5), high, "log", unit_of((high,))),
        Axis("of the jobs", "part", 0.0, PERCENT_END),
        tuple(lines),
    )


def _speed_up(comparison: Comparison, limit: int) -> Chart | None:
    lines = []
    for result in comparison.results[1:]:
        ratios = comparison.speed_ups[result.label].ratios
        if ratios:
            note = f"median {times(quantile(ratios, 0.5))}"
            lines.append(Line(result.index, result.label, distribution(ratios, len(ratios), limit), note, step=True))
    if not lines:
        return None
    shown = [1.0, *(quantile(item.ratios, part) for item in comparison.speed_ups.values() if item.ratios
                    for part in (TAIL, 1 - TAIL))]  # fmt: skip
    return Chart(
        "speedup",
        "Speed-up of each job",
        f"Completion time with “{comparison.baseline.label}” over that of the same job here: right of 1× it ends "  # noqa: RUF001
        "sooner, left of it later. The axis leaves out 0.5 % of the jobs at each end.",
        _medians("the median speed-up is", lines),
        Axis("speed-up, job by job", "ratio", *log_bounds(shown), "log"),
        Axis("of the jobs", "part", 0.0, PERCENT_END),
        tuple(lines),
        upright=1.0,
    )


def _medians(name: str, lines: Sequence[Line]) -> str:
    return "; ".join(f"{line.label}: {name} {line.note.removeprefix('median ')}" for line in lines) + "."


class View(NamedTuple):
    """One quantity over time; ``whole`` returns its maximum, for a quantity in percent."""

    key: str
    metric: str
    title: str
    caption: str
    label: str
    of: Callable[[Sample], float]
    whole: Callable[[Run], int] | None


VIEWS = (
    View("held", "gpu_utilization", "GPUs held", "GPUs that jobs hold, computing or not.", "of the GPUs",
         lambda sample: sample.gpus_held, lambda run: run.gpus),
    View("busy", "gpu_busy", "GPUs busy", "Held GPUs, weighted by the fraction of time that their jobs compute.",
         "of the GPUs", lambda sample: sample.busy, lambda run: run.gpus),
    View("cpus", "cpu_utilization", "CPUs allocated", "CPUs that jobs hold.", "of the CPUs",
         lambda sample: sample.cpus_used, lambda run: run.cpus),
    View("queue", "", "Queue", "Submitted jobs that have no GPUs and have not ended.", "jobs waiting",
         lambda sample: sample.waiting, None),
)  # fmt: skip


def _over_time(comparison: Comparison, view: View, limit: int) -> Chart | None:
    begins = [run.samples[0].time_s for result in comparison.results for run in result.runs if run.samples]
    if not begins:
        return None
    end = max(run.end_s for result in comparison.results for run in result.runs)
    begin = min(begins) if min(begins) > MAX_IDLE_START * end else 0.0
    edges = [begin + (end - begin) * at / limit for at in range(limit + 1)]
    # What a file does not know of a result is no line at 0.
    known = [one for one in comparison.results if not view.metric or comparison.mean(view.metric, one) is not None]
    lines = tuple(line for result in known if (line := _line(comparison, result, view, edges)).points)
    several = any(len(result.runs) > 1 for result in comparison.results)
    seeds = ", the band goes from the lowest to the highest seed" if several else ""
    if not lines or end <= begin:
        return None
    highest = upper([y for line in lines for _, y in line.points] + [h for line in lines for *_, h in line.band])
    unit = axis_unit(end - edges[0])
    y = Axis(view.label, "part", 0.0, PERCENT_END) if view.whole else Axis(view.label, "number", 0.0, highest)
    return Chart(
        view.key,
        view.title,
        f"{view.caption} Each point is the mean over {duration(edges[1] - edges[0])}{seeds}.",
        "; ".join(f"{line.label}: {line.note}" for line in lines) + ".",
        Axis(f"time since the start, {unit.sign}", "time", edges[0], end, unit=unit, clock=True),
        y,
        lines,
    )


def _line(comparison: Comparison, result: Result, view: View, edges: Sequence[float]) -> Line:
    rows = []
    for run in result.runs:
        whole = view.whole(run) if view.whole else 100.0
        if run.samples and whole:
            steps = tuple((sample.time_s, 100.0 / whole * view.of(sample)) for sample in run.samples)
            rows.append(bins(steps, run.end_s, edges))
    last = max((run.end_s for run in result.runs), default=0.0)
    points, band, half = [], [], (edges[1] - edges[0]) / 2
    for at, low in enumerate(edges[:-1]):
        means = [row[at] for row in rows]
        if means and low < last and any(value is not None for value in means):
            values = [value or 0.0 for value in means]  # an ended run uses nothing
            points.append((low + half, sum(values) / len(values)))
            band.append((low + half, min(values), max(values)))
    # The note is the comparison table's figure; for the queue, its greatest length.
    if view.whole:
        mean = comparison.mean(view.metric, result)
        note = "" if mean is None else f"mean {100 * mean:.0f}{NARROW}%"
    else:
        note = f"longest {count(round(max((y for _, y in points), default=0)))}"
    return Line(result.index, result.label, tuple(points), note, tuple(band) if len(rows) > 1 else ())


def _load(comparison: Comparison) -> Chart | None:
    lines = tuple(_load_line(result) for result in comparison.results)
    lines = tuple(line for line in lines if line.points)
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, low, high in (line.band or ()) for y in (low, high)]
    ys += [y for line in lines for _, y in line.points]
    margin = (max(xs) - min(xs)) * 0.04 or 1.0
    unit = unit_of(ys)
    if max(ys) > MIN_LOG_RATIO * max(min(ys), 1e-9):
        low, high = log_bounds([y for y in ys if y > 0])
        y = Axis("mean JCT", "time", low, high, "log", unit)
    else:
        y = Axis(f"mean JCT, {unit.sign}", "time", 0.0, upper(ys), unit=unit)
    return Chart(
        "load",
        "Completion time against load",
        "Mean completion time at each rate of arrival; a line that turns up shows a cluster that does not keep up. "
        f"Lower is better.{' The band is the 95 % interval.' if any(line.band for line in lines) else ''}",
        "; ".join(f"{line.label}: {line.note}" for line in lines) + ".",
        Axis("jobs submitted an hour", "number", min(xs) - margin, max(xs) + margin),
        y,
        lines,
    )


def _load_line(result: Result) -> Line:
    rows = [row for row in load_rows(result.sweep) if row.mean_jct_h is not None]
    means = [(row.load, (row.mean_jct_h or 0.0) * HOUR_S, (row.interval95 or 0.0) * HOUR_S) for row in rows]
    band = tuple((load, max(0.0, mean - half), mean + half) for load, mean, half in means)
    points = tuple((load, mean) for load, mean, _ in means)
    highest = highest_stable(load_rows(result.sweep))
    note = "keeps up with none" if highest is None else f"keeps up with {highest:g} an hour"
    several = any(row.interval95 is not None for row in rows)
    return Line(result.index, result.label, points, note, band if several else (), dots=True)
