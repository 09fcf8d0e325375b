"""Output of ``cadenza simulate``: a table, a CSV of jobs, and a file for the report."""

from __future__ import annotations

import csv
from dataclasses import fields
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.queue_rules import NAMES
from cadenza.policies.simulator.figures import flat, mean_and_half
from cadenza.policies.simulator.load_sweep import FILL, highest_stable
from cadenza.policies.simulator.result_file import encode
from cadenza.policies.simulator.run_values import JobResult
from cadenza.slurm_plugin.simulations.runner import COMPARED, Results, ratios, saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.1f}"  # noqa: PLR2004


_hours, _percent, _seconds, _milliseconds = "{:.2f} h".format, "{:.1%}".format, "{:.1f} s".format, "{:.2f} ms".format
ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("jobs", "jobs that ended", _plain),
    ("unfinished", "jobs that did not", _plain),
    ("avg_jct_h", "completion time, mean", _hours),
    ("p50_jct_h", "median", _hours),
    ("p99_jct_h", "p99", _hours),
    ("p999_jct_h", "p99.9", _hours),
    ("mean_bounded_slowdown", "bounded slowdown, mean", _plain),
    ("makespan_h", "last end", _hours),
    ("wait_1_gpu_h", "wait for the first start, 1 GPU", _hours),
    ("wait_2_to_7_gpus_h", "2 to 7 GPUs", _hours),
    ("wait_8_gpus_h", "8 GPUs", _hours),
    ("wait_more_gpus_h", "more", _hours),
    ("idle_waiting_gpus", "GPUs idle while a job waits that fits", _plain),
    ("time_to_100_iterations_s", "time to 100 iterations, median", _seconds),
    ("mean_time_to_100_iterations_s", "mean", _seconds),
    ("gpu_utilization", "GPUs held", _percent),
    ("gpu_busy", "GPUs busy", _percent),
    ("cpu_utilization", "CPUs allocated", _percent),
    ("migrations", "migrations", _plain),
    ("restarts", "restarts", _plain),
    ("tunes", "tunes", _plain),
    ("yields", "yields", _plain),
    ("packs", "packings", _plain),
    ("unpacks", "unpackings", _plain),
    ("resizes", "resizes", _plain),
    ("rounds", "rounds", _plain),
    ("decisions", "of them decided", _plain),
    ("decision_p50_ms", "a decision, median", _milliseconds),
    ("decision_p99_ms", "p99", _milliseconds),
    ("decision_max_ms", "longest", _milliseconds),
    ("wall_s", "wall time", _seconds),
)
"""Figure, its label, and its format; some rows of zeros are left out."""
HIDDEN_IF_ZERO = frozenset(
    {"unfinished", "migrations", "restarts", "tunes", "yields", "packs", "unpacks", "resizes", "p999_jct_h"}
)
MIN_JOBS_P999 = 1000
"""Least number of jobs for which p99.9 is printed."""


def as_table(results: Results) -> RenderableType:
    """Return the printed table of the results."""
    request = results.request
    head = Text(f"{request.label}", style="bold")
    head.append(f"  {results.gpus} GPUs, {results.cpus} CPUs", style="none")
    if request.workload is not None:
        head.append(f", seed{'s' * (len(request.seeds) > 1)} {', '.join(map(str, request.seeds))}", style="none")
    if results.points:
        return Group(head, _sweep(results))
    return Group(head, _figures(results), *(Text(line) for line in _remarks(results)))


def _remarks(results: Results) -> Iterator[str]:
    """Yield sentences on the order of Slurm's queue, and on the jobs that can share and move."""
    movable, jobs = results.movable, results.jobs
    if not results.request.setup.place or results.baselines or results.easy:
        weights = results.request.setup.queue.weights
        named = [f"{name} {value:,.0f}" for name in NAMES if (value := getattr(weights, name))]
        yield f"Slurm's order: {', '.join(named) if named else 'submission (all weights are 0)'}"
    if results.ideal:
        times, ideal = results.ratio_to_ideal, fmean(one.avg_jct_h for one in results.ideal)
        if times["avg_jct_h"] is not None and times["p99_jct_h"] is not None:
            yield (
                f"ideal LAS, where every job can leave at no cost: mean {_hours(ideal)}; "
                f"mean and p99 here are {times['avg_jct_h']:.2f} and {times['p99_jct_h']:.2f} times those of the ideal"
            )
    if results.opted_in < jobs:
        yield f"{results.opted_in} of {jobs} jobs opted in"
    if results.request.shared or results.opted_in < jobs:
        yield f"{movable} of {jobs} jobs can move (they keep checkpoints)"
    if results.unshareable is not None and (text := results.unshareable.text()):
        yield text


def _figures(results: Results) -> Table:
    """Return one row a figure; over several seeds mean and half of the 95 % interval."""
    each = [flat(summary) for summary in results.summaries]
    others = [
        (name, [flat(summary) for summary in theirs], ratios(results.summaries, theirs))
        for name, theirs in ((results.request.baseline or "", results.baselines), ("easy", results.easy))
        if theirs
    ]
    table = Table(box=None, pad_edge=False, show_header=bool(others), header_style="bold")
    table.add_column()  # alone may wrap, so that no figure is cut
    for title in ("", *(column for name, _, _ in others for column in (name, "RATIO"))):
        table.add_column(title, justify="right", no_wrap=True)
    for key, name, write in ROWS:
        known = [value for row in each if (value := row[key]) is not None]
        if len(known) < len(each) or (key in HIDDEN_IF_ZERO and not any(known)):
            continue
        if key == "p999_jct_h" and max(summary.jobs for summary in results.summaries) < MIN_JOBS_P999:
            continue
        mean, half = mean_and_half(known)
        cells = []
        for _, base, against in others:
            theirs = [value for row in base if (value := row[key]) is not None] if key in COMPARED else []
            ratio = against.get(key)
            cells += [write(fmean(theirs)) if theirs else "", "" if ratio is None else f"{ratio:.2f}"]
        table.add_row(name, write(mean) if half is None else f"{write(mean)} ± {write(half)}", *cells)
    return table


def _sweep(results: Results) -> RenderableType:
    """Return one row a load, and the highest stable one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("JOBS AN HOUR", "MEAN JCT", "±", "GPUS HELD", "STABLE"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = results.loads
    for row in rows:
        mean = "" if row.mean_jct_h is None else _hours(row.mean_jct_h)
        half = "" if row.interval95 is None else _hours(row.interval95)
        table.add_row(f"{row.load:g}", mean, half, _percent(row.gpu_utilization), "yes" if row.stable else "no")
    best = highest_stable(rows)
    verdict = "none of these loads is stable" if best is None else f"highest stable load: {best:g} jobs an hour"
    if results.short:
        verdict = f"too few jobs to tell stable loads from others: they must arrive over {FILL} mean run times at least"
    return Group(table, Text(verdict))


# --- Files -----------------------------------------------------------------------------------------------


def write_files(results: Results) -> None:
    """Write what ``--per-job`` and ``--save`` name; raise InputError for a file that cannot be written."""
    words = results.request.words
    if words["per_job"]:
        _write("--per-job", words["per_job"], per_job(results).encode())
    if words["save"]:
        _write("--save", words["save"], encode(saved(results)))


def _write(option: str, path: str, data: bytes) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise InputError(f"{option}: {path!r} cannot be written: {error.strerror}") from None


def per_job(results: Results) -> str:
    """Return one CSV row a job: the seed of its run, its facts, and its completion time."""
    text = StringIO()
    names = [item.name for item in fields(JobResult)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["seed", *names, "jct_s"])
    for run in results.runs:
        seed = "" if run.seed is None else run.seed
        for job in run.jobs:
            values = [getattr(job, name) for name in (*names, "jct_s")]
            writer.writerow([seed, *("" if value is None else value for value in values)])
    return text.getvalue()
