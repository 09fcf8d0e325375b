"""Puts a page together: one HTML document that needs nothing from outside and no script to be read (pure)."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Iterator
from importlib.resources import files

from cadenza.slurm_plugin.report.chart import Chart
from cadenza.slurm_plugin.report.charts import charts
from cadenza.slurm_plugin.report.draw import NARROW, WIDE, draw
from cadenza.slurm_plugin.report.html import Html, join, tag
from cadenza.slurm_plugin.report.page_model import Comparison, Result
from cadenza.slurm_plugin.report.sentences import summary
from cadenza.slurm_plugin.report.svg import inline
from cadenza.slurm_plugin.report.tables import comparison_table, named, slices_table, swatch, versus
from cadenza.slurm_plugin.report.theme import DARK, LIGHT, variables
from cadenza.slurm_plugin.report.units import HOUR_S, count, number, unit_of
from cadenza.slurm_plugin.report.units import NARROW as SPACE


def render(comparison: Comparison, title: str) -> str:
    """Return the page. Raises EnvironmentLacks when matplotlib is missing."""
    main = tag("main", *_sections(comparison))
    body = (_header(comparison, title), main, _footer(comparison))
    return document(title, body, len(comparison.results))


def document(title: str, body: Iterable[Html], results: int = 0) -> str:
    """Return a whole document; ``results``: how many results its charts compare."""
    script = Html(f"<script>{_asset('sort.js')}</script>")
    return f'<!doctype html>\n<html lang="en">\n{_head(title, results)}\n{tag("body", *body, script)}\n</html>\n'


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _head(title: str, results: int) -> Html:
    digest = base64.b64encode(hashlib.sha256(_asset("sort.js").encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=rules),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        Html(f"<style>{_style(results)}</style>"),
    )


def _style(results: int) -> str:
    """Return the style sheet, with the palettes and a rule that lets one result stand out under the pointer."""
    sheet = _asset("style.css").replace("/* light palette */", variables(LIGHT))
    hover = "".join(
        f".chart:has(.k{at}:hover) :is(.series,.band):not(.n{at}){{opacity:.12}}\n" for at in range(results)
    )
    return sheet.replace("/* dark palette */", variables(DARK)) + hover


def _header(comparison: Comparison, title: str) -> Html:
    several = len(comparison.results) > 1
    facts = [f"{len(comparison.results)} results" if several else "1 result", *_facts(comparison)]
    baseline = tag("p", "Baseline: ", named(comparison.baseline), class_="baseline") if several else None
    return tag("header", tag("h1", title), tag("p", " · ".join(facts), class_="facts"), baseline)


def _facts(comparison: Comparison) -> Iterator[str]:
    first = next((run for result in comparison.results for run in result.runs), None)
    if first is not None:
        yield f"{count(len(first.jobs))} jobs"
        yield f"{count(first.gpus)} GPUs and {count(first.cpus)} CPUs"


def _sections(comparison: Comparison) -> Iterator[Html]:
    if comparison.notes:
        notes = [tag("li", note) for note in comparison.notes]
        yield tag("aside", tag("h2", "Before you compare"), tag("ul", *notes), class_="notes", role="note", id="notes")
    yield section("summary", "In short", tag("div", *_cards(comparison), class_="cards"))
    if comparison.cells:
        yield section("comparison", "Comparison", scroll(comparison_table(comparison), "Comparison"))
    yield section("charts", "Charts", tag("div", *_charts(comparison), class_="charts"))
    yield from _kinds(comparison)
    yield section("commands", "How each result was made", *(_command(result) for result in comparison.results))


def section(key: str, title: str, *children: Html) -> Html:
    """Return a section with its heading."""
    return tag("section", tag("h2", title), *children, id=key)


def scroll(table: Html, name: str) -> Html:
    """Return a table that scrolls by itself where it is too wide, also by keyboard."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=name)


def _cards(comparison: Comparison) -> Iterator[Html]:
    for result in comparison.results:
        yield tag(
            "article", tag("h3", named(result)), _headline(result, comparison),
            tag("p", summary(result, comparison)), class_="card",
        )  # fmt: skip


def _headline(result: Result, comparison: Comparison) -> Html | None:
    cell = comparison.figure("avg_jct_h", result)
    if cell is None or cell.estimate is None:
        return None
    cells = comparison.cells["avg_jct_h"]
    unit = unit_of([other.estimate.mean * HOUR_S for other in cells if other.estimate])
    figure = number(cell.estimate.mean * HOUR_S / unit.seconds)
    return tag(
        "p", tag("span", figure, tag("span", f"{SPACE}{unit.sign}", class_="unit"), class_="big"),
        tag("span", "mean JCT", class_="what"), versus(cell) or _baseline(result, comparison), class_="headline",
    )  # fmt: skip


def _baseline(result: Result, comparison: Comparison) -> Html | None:
    alone = len(comparison.results) == 1
    return None if alone or result is not comparison.baseline else tag("span", "baseline", class_="versus")


def _charts(comparison: Comparison) -> Iterator[Html]:
    narrow = {chart.key: chart for chart in charts(comparison, NARROW.points)}
    for chart in charts(comparison, WIDE.points):
        yield _figure(chart, narrow[chart.key])


def _figure(wide: Chart, narrow: Chart) -> Html:
    drawings = [Html(inline(draw(chart, size), chart, size)) for chart, size in ((wide, WIDE), (narrow, NARROW))]
    caption = tag("figcaption", tag("h3", wide.title), tag("p", wide.caption))
    return tag("figure", caption, _legend(wide), *drawings, class_="chart", id=f"chart-{wide.key}")


def _legend(chart: Chart) -> Html:
    items = [
        tag("li", swatch(line.index), tag("span", line.label, class_="label"), tag("small", line.note),
            class_=f"k{line.index}")
        for line in chart.lines
    ]  # fmt: skip
    return tag("ul", *items, class_="legend")


def _kinds(comparison: Comparison) -> Iterator[Html]:
    found = (
        ("by-gpus", "Completion time by number of GPUs", "GPUs", comparison.by_gpus),
        ("by-class", "Completion time by class of model", "Class", comparison.by_class),
        ("by-model", "Completion time by model", "Model", comparison.by_model),
    )
    for key, title, head, slices in found:
        if len(slices) > 1:
            table = slices_table(head, slices, comparison.results, f"{key}-table")
            yield section(key, title, scroll(table, title))


def _command(result: Result) -> Html:
    lines = list(dict.fromkeys(shlex.join(("cadenza", "simulate", *file.arguments)) for file in result.files))
    facts = [f"from {', '.join(file.source for file in result.files)}"]
    seeds = sorted({run.seed for run in result.runs if run.seed is not None} | {point.seed for point in result.sweep})
    if seeds:
        facts.append(f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}")
    return tag(
        "article", tag("h3", named(result)), tag("p", "; ".join(facts), class_="source"),
        tag("pre", *(tag("code", line) for line in lines)), class_="command",
    )  # fmt: skip


def _footer(comparison: Comparison) -> Html:
    lines = ["JCT is the job completion time, from submission to the end; means and quantiles are of jobs that ended."]
    if len(comparison.results) > 1:
        lines.append(
            "Changes and ratios are this result’s figure against the baseline’s; "  # noqa: RUF001
            "better and worse are said only where one way is always better: "
            "what ends jobs sooner may hold fewer GPUs for that."
        )
    if any(len(result.runs) > 1 for result in comparison.results):
        lines.append(
            "± is half the 95 % interval of the mean over seeds (Student’s t). “Not clear” means that the "  # noqa: RUF001
            "interval of the difference, seed by seed where the seeds are the same, holds 0."
        )
    return tag("footer", *(join(tag("p", line)) for line in lines), tag("p", "Made by cadenza report."))
