"""Output of ``cadenza whatif``: a table, sentences, JSON and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.simulator.figures import Summary, flat
from cadenza.slurm_plugin.cli.whatif.history import DAY_S
from cadenza.slurm_plugin.cli.whatif.runs import AS_IT_WAS, SLURM, WhatIf
from cadenza.slurm_plugin.report.compare import compare, most_changed, plain
from cadenza.slurm_plugin.report.page import render
from cadenza.slurm_plugin.report.units import HOUR_S, NARROW, about, duration, percent

EASY = "easy"


def _hours(value: float) -> str:
    return duration(value * HOUR_S).replace(NARROW, " ")


ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("avg_jct_h", "completion time, mean", _hours),
    ("p50_jct_h", "median", _hours),
    ("p99_jct_h", "p99", _hours),
    ("mean_bounded_slowdown", "bounded slowdown, mean", "{:.1f}".format),
    ("wait_1_gpu_h", "wait, 1 GPU", _hours),
    ("wait_2_to_7_gpus_h", "wait, 2 to 7 GPUs", _hours),
    ("wait_8_gpus_h", "wait, 8 GPUs", _hours),
    ("wait_more_gpus_h", "wait, more GPUs", _hours),
    ("gpu_utilization", "GPUs held", "{:.1%}".format),
    ("idle_waiting_gpus", "GPUs idle while a job waits that fits", "{:.1f}".format),
    ("migrations", "moves", "{:,.0f}".format),
)


def title(found: WhatIf) -> str:
    """Return a sentence with the number of jobs, the days and the GPUs."""
    last_s = max(job.submit_s for job in found.history.jobs)
    gpus = sum(node.gpus for node in found.nodes if node.lane == 0)
    return f"{len(found.history.jobs):,} jobs in {last_s / DAY_S:.1f} days on {gpus:,} GPUs"


def remarks(found: WhatIf) -> Iterator[str]:
    """Yield sentences on the error of the simulation, on the jobs left out, and on the assumptions."""
    yield from found.remarks
    was, slurm = (_mean_wait_s(found, label) for label in (AS_IT_WAS, SLURM))
    error = f", {(slurm - was) / was:+.0%}" if was else ""
    yield (
        f"The simulation's error: under Slurm alone it has jobs wait {about(slurm)} on average, and they "
        f"really waited {about(was)}{error}."
    )
    times_h = {file.label: flat(one)["avg_jct_h"] for file, one in zip(found.results, found.summaries, strict=True)}
    yield from _gains(found, times_h)
    base_h = times_h[found.last]
    for label in list(times_h)[len(times_h) - found.more :]:
        if base_h and (time_h := times_h[label]) is not None:
            yield (
                f"{label.removeprefix(found.last + ', ').capitalize()}: completion time {percent(time_h / base_h - 1)} "
                f"on average, compared with “{found.last}”."
            )
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


def _gains(found: WhatIf, times_h: Mapping[str, float | None]) -> Iterator[str]:
    """Yield the gain of each run over Slurm and over EASY, or that it changes nothing."""
    slurm_h, easy_h = times_h[SLURM], flat(found.easy)["avg_jct_h"]
    for label, time_h in list(times_h.items())[: len(times_h) - found.more]:
        if label in (AS_IT_WAS, SLURM) or not slurm_h or not easy_h or time_h is None:
            continue
        if found.starts(label) == found.starts(SLURM):
            yield f"“{label}”: nothing changes, each job starts as under Slurm."
            continue
        yield (
            f"“{label}”: completion time {percent(time_h / slurm_h - 1)} on average compared with Slurm, and "
            f"{percent(time_h / easy_h - 1)} compared with EASY (the order of submission, one reservation)."
        )


def _partitions(found: WhatIf) -> bool:
    """Return True if the nodes are in a site's own partitions."""
    return not any(PARTITION in node.partitions for node in found.nodes)


def _mean_wait_s(found: WhatIf, label: str) -> float:
    """Return the mean time from submission to the first start in one of the results."""
    jobs = next(file for file in found.results if file.label == label).runs[0].jobs
    waits = [job.start_s - job.submit_s for job in jobs if job.start_s is not None]
    return sum(waits) / len(waits) if waits else 0.0


def as_text(found: WhatIf) -> RenderableType:
    """Return the printed table and the remarks."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(no_wrap=True)
    labels = [file.label for file in found.results]
    columns = list(zip(labels, found.summaries, strict=True))
    columns.insert(labels.index(SLURM) + 1, (EASY, found.easy))
    for label, _ in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for key, name, write in ROWS:
        values = [_figure(summary, label, key) for label, summary in columns]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else write(value) for value in values))
    return Group(Text(title(found), style="bold"), table, *(Text(line.replace(NARROW, " ")) for line in remarks(found)))


def _figure(summary: Summary, label: str, key: str) -> float | None:
    if label == AS_IT_WAS and key in ("idle_waiting_gpus", "migrations"):
        return None
    return flat(summary)[key]


def page(found: WhatIf) -> str:
    """Return the HTML page; Slurm's simulation is the baseline of the others."""
    comparison = compare(found.results, SLURM)
    return render(comparison, f"What if: {title(found)}", tuple(remarks(found)), most_changed(comparison, found.last))


def as_json(found: WhatIf, path: str) -> dict[str, Any]:
    """Return the comparison as ``cadenza report --json`` has it, with the mean waits and the jobs left out."""
    comparison = compare(found.results, SLURM)
    last = next(result.index for result in comparison.results if result.label == found.last)
    return {
        **plain(comparison, path),
        "jobs": len(found.history.jobs),
        "left_out": dict(found.history.left_out),
        "load": {"jobs": len(found.history.load), "cpu_share": found.history.load_share},
        "cpu_load": found.history.cpu_load,
        "easy": {key: flat(found.easy)[key] for key, _, _ in ROWS},
        "notes": found.site_notes,
        "mean_wait_s": {file.label: _mean_wait_s(found, file.label) for file in found.results},
        "most_changed": [
            {"name": item.name, "jobs": item.jobs[last], "ratio": item.cells[last].ratio}
            for item in most_changed(comparison, found.last)
        ],
    }
