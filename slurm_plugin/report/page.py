"""The page of a comparison: one HTML document that loads nothing and needs no script to be read (pure)."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from cadenza.slurm_plugin.report.chart_model import Chart
from cadenza.slurm_plugin.report.charts import charts
from cadenza.slurm_plugin.report.compare import largest
from cadenza.slurm_plugin.report.draw import DARK, LIGHT, NARROW, WIDE, draw, look
from cadenza.slurm_plugin.report.heat_map import heat_maps
from cadenza.slurm_plugin.report.page_model import Comparison, Result, Slice
from cadenza.slurm_plugin.report.sentences import summary
from cadenza.slurm_plugin.report.tables import VersusText, sections, slice_table, versus
from cadenza.slurm_plugin.report.units import HOUR_S, count, number, unit_of
from cadenza.slurm_plugin.report.units import NARROW as SPACE


class Lead(NamedTuple):
    """The part ahead of the figures: sentences, the first of which is the verdict, a chart, a table, more kinds."""

    lines: tuple[str, ...]
    refused: bool
    """There is no verdict: no figure of the page is called better or worse."""
    chart: Chart
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[tuple[str, str, str, tuple[Slice, ...]], ...]
    """Key, title, head and means of further kinds of jobs."""
    repeated: str = "draws"
    """Name of the runs of one result."""


class CardText(NamedTuple):
    """One result in short: its mean JCT, the comparison with the baseline, and a summary."""

    result: Result
    summary: str
    figure: str = ""
    unit: str = ""
    versus: VersusText | None = None


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals |= {"look": look, "light": LIGHT, "dark": DARK, "narrow": SPACE}
    environment.filters["count"] = count
    return environment


def document(template: str, title: str, results: Sequence[Result] = (), **values: Any) -> str:
    """Return a page from a template; the page allows no script but our own, named by its digest."""
    environment = _environment()
    script = environment.get_template("sort.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = environment.get_template(template)
    return page.render(title=title, results=results, script=script, script_digest=digest, **values)


def render(
    comparison: Comparison, title: str, remarks: Sequence[str] = (), extremes: Sequence[Slice] = (),
    lead: Lead | None = None,
) -> str:  # fmt: skip
    """Return the page, with remarks ahead of its own notes, and a table of the kinds of jobs that changed most.

    Raise EnvironmentLacks without matplotlib.
    """
    results = comparison.results
    several = len(results) > 1
    # 1. The facts below the title.
    first = next((run for result in results for run in result.runs), None)
    facts = [f"{len(results)} results" if several else "1 result"]
    if first is not None:
        facts += [f"{count(len(first.jobs))} jobs", f"{count(first.gpus)} GPUs and {count(first.cpus)} CPUs"]
    # 2. Each chart, drawn for wide and for narrow screens.
    narrow = {chart.key: chart for chart in charts(comparison, NARROW.points)}
    drawings = [(chart, _drawn(chart, narrow[chart.key])) for chart in charts(comparison, WIDE.points)]
    # 3. The tables by kind of job.
    kinds = (
        ("by-change", "Users and classes that win and lose most", "User or class", extremes),
        ("by-gpus", "Completion time by number of GPUs", "GPUs", comparison.by_gpus),
        ("by-size", "Completion time by size and length", "GPUs and run time", comparison.by_size),
        *(lead.kinds if lead is not None else ()),
        ("by-user", _title("user", comparison.by_user), "User", largest(comparison.by_user)),
        ("by-class", "Completion time by class of model", "Class", comparison.by_class),
        ("by-model", _title("model", comparison.by_model), "Model", largest(comparison.by_model)),
    )
    slices = [slice_table(*names, results) for names in kinds if len(names[-1]) > 1]
    # 4. The document.
    commands = [_command(result) for result in results]
    if len({tuple(command["lines"]) for command in commands}) == 1:
        commands = commands[:1]
    return document(
        "comparison.html", title, results, facts=facts, notes=(*remarks, *comparison.notes),
        cards=[_card(result, comparison) for result in results], sections=sections(comparison), charts=drawings,
        slices=slices, heat_maps=heat_maps(comparison), commands=commands, lead=lead,
        lead_drawings=_drawn(lead.chart, lead.chart) if lead is not None else (),
        most_seeds=max(len(result.runs) for result in results), seeds="seeds" if lead is None else lead.repeated,
    )  # fmt: skip


def _drawn(wide: Chart, narrow: Chart) -> tuple[str, str]:
    return draw(wide, WIDE), draw(narrow, NARROW)


def _title(kind: str, slices: Sequence[Slice]) -> str:
    shown = len(largest(slices))
    some = f": {shown} of {len(slices)} {kind}s, those with most jobs" if shown < len(slices) else ""
    return f"Completion time by {kind}{some}"


def _card(result: Result, comparison: Comparison) -> CardText:
    text = summary(result, comparison)
    cell = comparison.figure("avg_jct_h", result)
    if cell is None or cell.estimate is None:
        return CardText(result, text)
    cells = comparison.cells["avg_jct_h"]
    unit = unit_of([other.estimate.mean * HOUR_S for other in cells if other.estimate])
    return CardText(result, text, number(cell.estimate.mean * HOUR_S / unit.seconds), unit.sign, versus(cell))


def _command(result: Result) -> dict[str, Any]:
    """Return the commands that made one result, and its files and seeds."""
    lines = list(dict.fromkeys(shlex.join(("cadenza", file.command, *file.arguments)) for file in result.files))
    source = f"from {', '.join(file.source for file in result.files)}"
    seeds = sorted({run.seed for run in result.runs if run.seed is not None} | {point.seed for point in result.sweep})
    if seeds:
        source += f"; {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    return {"result": result, "lines": lines, "source": source}
