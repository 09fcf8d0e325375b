"""The page's tables: figures side by side, and completion times by kind of job (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cadenza.slurm_plugin.report.html import Html, join, tag
from cadenza.slurm_plugin.report.metrics import METRICS, Metric
from cadenza.slurm_plugin.report.page_model import Cell, Comparison, Estimate, Result, Slice, Verdict
from cadenza.slurm_plugin.report.theme import look
from cadenza.slurm_plugin.report.units import (
    HOUR_S,
    HOURS,
    NARROW,
    Unit,
    count,
    count_decimals,
    decimals_of,
    number,
    percent,
    times,
    unit_of,
)

WORDS: dict[Verdict, str] = {
    "better": "better", "worse": "worse", "more": "more", "less": "less", "same": "about same", "unclear": "not clear",
}  # fmt: skip
EMPTY = "\N{NO-BREAK SPACE}"
"""Keeps a line's place."""
NOTHING = 0.0005
"""A relative difference that rounds to 0.0 %."""


def swatch(index: int) -> Html:
    """Return a short piece of a result's line."""
    style = look(index)
    dashes = " ".join(f"{length:g}" for length in style.dashes) or None
    line = tag("line", x1=1, y1=5, x2=25, y2=5, stroke_width=3, stroke_dasharray=dashes)
    return tag("svg", line, class_="swatch", viewBox="0 0 26 10", aria_hidden="true",
               style=f"stroke:var(--{style.variable})")  # fmt: skip


def named(result: Result) -> Html:
    """Return a result's line and label."""
    return join(swatch(result.index), tag("span", result.label, class_="label"))


def comparison_table(comparison: Comparison) -> Html:
    """Return the table of all figures: a row for each, a column for each result."""
    heads = [tag("th", "", tag("span", "Figure", class_="hidden"), scope="col", class_="name")]
    heads += [tag("th", named(result), _role(result, comparison), scope="col") for result in comparison.results]
    return tag(
        "table",
        tag("caption", "Every figure beside the baseline’s", class_="hidden"),  # noqa: RUF001
        tag("thead", tag("tr", *heads)),
        *_sections(comparison),
        class_="figures",
        id="figures",
    )


def _role(result: Result, comparison: Comparison) -> Html | None:
    seeds = f"{len(result.runs)} seeds" if len(result.runs) > 1 else ""
    role = "baseline" if result is comparison.baseline and len(comparison.results) > 1 else ""
    return tag("small", ", ".join(word for word in (role, seeds) if word) or EMPTY)


def _sections(comparison: Comparison) -> Iterator[Html]:
    width = len(comparison.results) + 1
    for section in dict.fromkeys(metric.section for metric in METRICS):
        metrics = [metric for metric in METRICS if metric.section == section and metric.key in comparison.cells]
        if metrics:
            head = tag("tr", tag("th", tag("span", section), colspan=width, scope="colgroup"), class_="section")
            rows = [_row(metric, comparison.cells[metric.key], comparison.results) for metric in metrics]
            yield tag("tbody", head, *rows)


def _row(metric: Metric, cells: Sequence[Cell], results: Sequence[Result]) -> Html:
    means = [cell.estimate.mean * metric.seconds for cell in cells if cell.estimate]
    unit = unit_of(means) if metric.kind == "time" else HOURS
    name = tag("th", metric.name, tag("small", metric.explain), scope="row", class_="name")
    shown = [_cell(metric, cell, result, unit) for cell, result in zip(cells, results, strict=True)]
    return tag("tr", name, *shown, data_metric=metric.key)


def _cell(metric: Metric, cell: Cell, result: Result, unit: Unit) -> Html:
    if cell.estimate is None:
        return tag("td", tag("span", "–", class_="value"), data_result=result.label)  # noqa: RUF001
    scale, sign, decimals = _scale(metric, cell.estimate.mean, unit)
    return tag(
        "td", _figure(cell.estimate, scale, sign, decimals),
        versus(cell) if metric.better or abs((cell.ratio or 0.0) - 1) >= NOTHING else None,
        data_result=result.label, data_value=repr(cell.estimate.mean),
    )  # fmt: skip


def _scale(metric: Metric, value: float, unit: Unit) -> tuple[float, str, int]:
    """Return by what a figure is multiplied, the sign that then follows it, and its decimals."""
    if metric.kind == "count":
        return 1.0, "", count_decimals(value)
    if metric.kind == "part":
        return 100.0, "%", 1
    scale, sign = (1.0, "ms") if metric.kind == "ms" else (metric.seconds / unit.seconds, unit.sign)
    return scale, sign, decimals_of(value * scale)


def _figure(found: Estimate, scale: float, sign: str, decimals: int) -> Html:
    """Return a mean with its unit and, where seeds differ, half its interval."""
    unit = tag("span", f"{NARROW}{sign}", class_="unit") if sign else None
    mean = tag("span", number(found.mean * scale, decimals), unit, class_="value")
    if not found.half:
        return mean
    half = number(found.half * scale, decimals or count_decimals(found.half * scale))
    return join(mean, tag("span", f" ±{NARROW}{half}", class_="half"))


def versus(cell: Cell) -> Html | None:
    """Return how a figure stands to the baseline's: the change with its sign, the word for it, and the ratio."""
    if cell.ratio is None:
        return None
    if abs(cell.ratio - 1) < NOTHING:
        return tag("span", tag("span", "same", class_="word"), class_="versus same")
    word = tag("span", WORDS[cell.verdict], class_="word")
    ratio = tag("span", times(cell.ratio), class_="ratio")
    return tag("span", tag("b", percent(cell.ratio - 1)), " ", word, " ", ratio, class_=f"versus {cell.verdict}")


def slices_table(head: str, slices: Sequence[Slice], results: Sequence[Result], key: str) -> Html:
    """Return the mean completion time of each kind of jobs, a row each."""
    unit = unit_of([cell.estimate.mean * HOUR_S for item in slices for cell in item.cells if cell.estimate])
    heads = [tag("th", head, scope="col", class_="name")]
    heads.append(tag("th", "Jobs", _seeds(results), scope="col", class_="jobs"))
    heads += [tag("th", named(result), tag("small", f"mean JCT, {unit.sign}"), scope="col") for result in results]
    body = [_slice_row(item, results, unit) for item in slices]
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="sortable", id=key)


def _seeds(results: Sequence[Result]) -> Html | None:
    most = max(len(result.runs) for result in results)
    return tag("small", f"of {most} seeds") if most > 1 else None


def _slice_row(item: Slice, results: Sequence[Result], unit: Unit) -> Html:
    jobs = max(item.jobs)
    cells = [_slice_cell(cell, result, unit) for cell, result in zip(item.cells, results, strict=True)]
    name = tag("th", item.name, scope="row", class_="name", data_value=item.name)
    return tag("tr", name, tag("td", count(jobs), data_value=jobs, class_="jobs"), *cells)


def _slice_cell(cell: Cell, result: Result, unit: Unit) -> Html:
    if cell.estimate is None:
        return tag("td", "–", data_result=result.label)  # noqa: RUF001
    scale = HOUR_S / unit.seconds
    figure = _figure(cell.estimate, scale, "", decimals_of(cell.estimate.mean * scale))
    return tag("td", figure, versus(cell), data_result=result.label, data_value=repr(cell.estimate.mean))
