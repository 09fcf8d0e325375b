"""Output of ``cadenza whatif``: the verdict, a table, sentences, JSON, the page and its figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cadenza.policies.core.text import printable
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.simulator.figures import flat
from cadenza.policies.simulator.run_values import JobResult
from cadenza.slurm_plugin.history.as_it_was import DAY_S
from cadenza.slurm_plugin.report.chart_model import Axis, Chart, Line, upper
from cadenza.slurm_plugin.report.compare import compare, most_changed, plain, uncompared
from cadenza.slurm_plugin.report.page import Lead, render
from cadenza.slurm_plugin.report.page_model import Comparison, Slice
from cadenza.slurm_plugin.report.units import HOUR_S, NARROW, number, percent, unit_of
from cadenza.slurm_plugin.simulations.runs import AS_IT_WAS, SLURM, WhatIf
from cadenza.slurm_plugin.simulations.verdict import Effect, Verdict, interval, mean_wait_s, verdict

EASY = "easy"
SHORT = {AS_IT_WAS: "was", " can move": ""}
"""Parts of labels that the terminal has no room for."""


class Row(NamedTuple):
    """One row of the terminal's table, in one unit: hours in the one that suits, a part in percent."""

    key: str
    name: str
    kind: Literal["time", "part", "number"] = "time"


ROWS = (
    Row("avg_jct_h", "completion, mean"), Row("p50_jct_h", "  median"), Row("p99_jct_h", "  p99"),
    Row("mean_bounded_slowdown", "bounded slowdown", "number"), Row("wait_1_gpu_h", "wait, 1 GPU"),
    Row("wait_2_to_7_gpus_h", "wait, 2-7 GPUs"), Row("wait_8_gpus_h", "wait, 8 GPUs"),
    Row("wait_more_gpus_h", "wait, more GPUs"), Row("gpu_utilization", "GPUs held", "part"),
    Row("idle_waiting_gpus", "idle, a job waits", "number"), Row("restarts", "moves", "number"),
)  # fmt: skip


def title(found: WhatIf) -> str:
    """Return a sentence with the number of jobs, the days and the GPUs."""
    last_s = max(job.submit_s for job in found.history.jobs)
    gpus = sum(node.gpus for node in found.nodes if node.lane == 0)
    return f"{len(found.history.jobs):,} jobs in {last_s / DAY_S:.1f} days on {gpus:,} GPUs"


def remarks(found: WhatIf) -> Iterator[str]:
    """Yield sentences on the error of the simulation, on the jobs left out, and on the assumptions."""
    yield from found.remarks
    times_h = {file.label: file.runs[0].summary.get("avg_jct_h") for file in found.results}
    base_h = times_h[found.last]
    for label in list(times_h)[len(times_h) - found.more :]:
        if base_h and (time_h := times_h[label]) is not None:
            yield (
                f"{label.removeprefix(found.last + ', ').capitalize()}: completion time {percent(time_h / base_h - 1)} "
                f"on average, compared with “{found.last}”."
            )
    for point in found.points:
        if not point.part and {job.start_s for job in point.runs[0].jobs} == {job.start_s for job in _slurm(found)}:
            yield f"“{point.label}”: nothing changes, each job starts as under Slurm."
    if found.history.drawn:
        yield found.history.drawn
    if found.history.left_out:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in found.history.left_out.most_common())
        yield f"Jobs that are left out: {counts}."
    if load := found.history.load:
        yield (
            f"Jobs without GPUs on these nodes: {len(load):,}, with {found.history.load_share:.1%} of the CPU time. In "
            "the simulations they take CPUs and memory as well, and no figure counts them."
        )
    if found.history.cpu_load:
        yield (
            f"Jobs without GPUs that are left out had up to {found.history.cpu_load:.1%} of the CPU time of these "
            "nodes; in the simulations these CPUs are free."
        )
    if found.unshareable is not None and (text := found.unshareable.text()):
        yield f"{text}."
    apart = "Jobs run on nodes of their partition only." if _partitions(found) else "All partitions count as one."
    yield from found.site_notes
    yield (
        "Accounting does not say which jobs keep checkpoints: they are drawn at random. "
        f"Each job has the CPUs and the memory that it had. {apart} "
        "A requeued job counts with the sum of its runs."
    )


def _slurm(found: WhatIf) -> Sequence[JobResult]:
    return next(file for file in found.results if file.label == SLURM).runs[0].jobs


def _partitions(found: WhatIf) -> bool:
    """Return True if the nodes are in a site's own partitions."""
    return not any(PARTITION in node.partitions for node in found.nodes)


def judged(found: WhatIf) -> tuple[Comparison, Verdict]:
    """Return the comparison with Slurm's simulation, in which the past is shown and not judged, and the verdict."""
    comparison = uncompared(compare(found.results, SLURM), AS_IT_WAS)
    return comparison, verdict(found, comparison)


def as_text(found: WhatIf, comparison: Comparison, judgment: Verdict) -> RenderableType:
    """Return the verdict, the table and the remarks."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(no_wrap=True)
    results = sorted(comparison.results, key=lambda result: result.label != AS_IT_WAS)
    labels = [_short(result.label) for result in results]
    labels.insert(2, EASY)
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    for row in ROWS:
        values = [comparison.mean(row.key, result) for result in results]
        values.insert(2, flat(found.easy).get(row.key) if row.key != "restarts" else None)
        if any(value is not None for value in values):
            table.add_row(*_cells(row, values))
    return Group(
        Text(title(found), style="bold"),
        *(Text(printable(line, 2000), style="bold" if not at else "") for at, line in enumerate(judgment.lines)),
        Text(), table, Text(),
        *(
            Text(printable(line, 2000), style="dim")
            for line in remarks(found)
            if not any(line in said for said in judgment.lines)
        ),
    )  # fmt: skip


def _short(label: str) -> str:
    for long, short in SHORT.items():
        label = label.replace(long, short)
    return label.replace(", twice the memory", " 2x mem")


def _cells(row: Row, values: Sequence[float | None]) -> Iterator[str]:
    """Yield the cells of a row: its name with the unit, and the figures."""
    scale, sign = 1.0, ""
    if row.kind == "time":
        unit = unit_of((max((value or 0.0) * HOUR_S for value in values),))
        scale, sign = HOUR_S / unit.seconds, f" ({unit.sign})"
    elif row.kind == "part":
        scale, sign = 100.0, " (%)"
    yield f"{row.name}{sign}"
    for value in values:
        yield "" if value is None else number(value * scale)


def page(found: WhatIf, comparison: Comparison, judgment: Verdict) -> str:
    """Return the HTML page; Slurm's simulation is the baseline of the others."""
    kinds = tuple(
        (f"by-{name}", f"Completion time by {text}", text[0].upper() + text[1:], slices)
        for name, slices in judgment.groups.items()
        for text in (GROUPS[name],)
    )
    base = comparison.baseline.runs[0]
    lead = Lead(
        judgment.lines, judgment.refused, _chart(judgment.effects), HEAD,
        (
            _part_row("Slurm alone", mean_wait_s([base]), judgment.facts["idle_gpu_h"]),
            *map(_effect_row, judgment.effects),
        ),
        kinds,
    )  # fmt: skip
    extremes = most_changed(comparison, found.last)
    return render(comparison, f"What if: {title(found)}", tuple(remarks(found)), extremes, lead)


GROUPS = {"account": "account", "qos": "QOS"}
HEAD = (
    "Who keeps checkpoints", "Mean wait, h", "Completion time", "95 % interval", "Moves", "Moves cost, GPU h",
    "Idle beside waiting jobs, GPU h",
)  # fmt: skip


def _part_row(name: str, wait_s: float, idle_h: float, *more: str) -> tuple[str, ...]:
    return (name, number(wait_s / HOUR_S, 2), *(more or ("", "", "", "")), number(idle_h, 0))


def _effect_row(effect: Effect) -> tuple[str, ...]:
    return _part_row(
        _name(effect), effect.wait_s, effect.idle_gpu_h, percent(effect.change),
        interval(effect),
        number(effect.moves, 0), number(effect.moved_gpu_h, 0),
    )  # fmt: skip


def _name(effect: Effect) -> str:
    return f"{100 * effect.part:.3g}{NARROW}% of the {'users, all their jobs' if effect.users else 'jobs'}"


def _chart(effects: Sequence[Effect]) -> Chart:
    """Return the completion time, in percent of Slurm's, by the part of the jobs and of the users."""
    lines = []
    for index, (label, users) in enumerate((("jobs that keep checkpoints", False), ("users who opt in", True)), 1):
        rows = sorted((one.part, one.change, one.half or 0.0) for one in effects if one.users == users)
        if not rows:
            continue
        rows = [(0.0, 0.0, 0.0), *(row for row in rows if row[0])]
        points = tuple((100 * part, 100 + 100 * change) for part, change, _ in rows)
        band = tuple(
            (100 * part, max(100 + 100 * (change - half), 0.0), 100 + 100 * (change + half))
            for part, change, half in rows
        )
        drawn = any(half for *_, half in rows)
        lines.append(Line(index, label, points, "", band if drawn else (), dots=True))
    highest = max(y for line in lines for _, y in line.points)
    return Chart(
        "parts", "What taking part is worth", "Mean completion time by the part of the jobs that keep checkpoints, and "
        "by the part of the users all of whose jobs do. At 0 % it is Slurm’s; lower is better.",  # noqa: RUF001
        "; ".join(f"{line.label}: {number(line.points[-1][1])} at {line.points[-1][0]:g} %" for line in lines) + ".",
        Axis("part that takes part, %", "number", 0.0, 103.0),
        Axis("completion time, % of Slurm’s", "number", 0.0, upper((100.0, highest))),  # noqa: RUF001
        tuple(lines),
    )  # fmt: skip


def as_csv(comparison: Comparison, judgment: Verdict) -> str:
    """Return the figures, one unit a row: a column for each result, and half of its 95 % interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    labels = [result.label for result in comparison.results]
    writer.writerow(("table", "row", "unit", *(text for label in labels for text in (label, f"{label} +-"))))
    kinds: dict[str, Sequence[Slice]] = {
        **judgment.groups, "user": comparison.by_user, "GPUs": comparison.by_gpus, "size": comparison.by_size,
    }  # fmt: skip
    rows = [("figures", key, _unit(key), cells) for key, cells in comparison.cells.items()]
    rows += [(f"completion time by {kind}", item.name, "h", item.cells) for kind in kinds for item in kinds[kind]]
    for table, name, unit, cells in rows:
        found = [cell.estimate for cell in cells]
        figures = [(one.mean, one.half or "") if one else ("", "") for one in found]
        writer.writerow((table, _inert(name), unit, *(value for pair in figures for value in pair)))
    return out.getvalue()


def _unit(key: str) -> str:
    return "h" if key.endswith("_h") else "part" if key.endswith("utilization") else "number"


def _inert(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula; accounts and users are others' words."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def as_json(found: WhatIf, comparison: Comparison, judgment: Verdict, path: str) -> dict[str, Any]:
    """Return the comparison as ``cadenza report --json`` has it, with the verdict and the jobs left out."""
    last = next(result.index for result in comparison.results if result.label == found.last)
    return {
        **plain(comparison, path),
        "verdict": judgment.facts,
        "jobs": len(found.history.jobs),
        "left_out": dict(found.history.left_out),
        "load": {"jobs": len(found.history.load), "cpu_share": found.history.load_share},
        "cpu_load": found.history.cpu_load,
        "easy": {row.key: flat(found.easy)[row.key] for row in ROWS},
        "notes": found.site_notes,
        "mean_wait_s": {result.label: mean_wait_s(result.runs) for result in comparison.results},
        "most_changed": [
            {"name": item.name, "jobs": item.jobs[last], "ratio": item.cells[last].ratio}
            for item in most_changed(comparison, found.last)
        ],
    }
