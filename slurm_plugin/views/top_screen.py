"""The screen of ``cadenza top``: a map of GPUs and lanes, and a table of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from cadenza.policies.core.model import Gpu
from cadenza.policies.core.text import gpu_names, printable
from cadenza.slurm_plugin.errors import NO_ROUND
from cadenza.slurm_plugin.report.units import about, milliseconds
from cadenza.slurm_plugin.views.cluster_view import STALE_AFTER_S, STOPPED, JobRow, TopView
from cadenza.slurm_plugin.views.job_sentences import effect_sentence

MARKS = {
    "held": ("▶", "bold green"),
    "stopping": ("◢", "yellow"),
    "yielded": ("‖", "cyan"),
    "waiting": ("…", "dim"),
}
MAX_REASON = 1000
NAME, WIDE_NAME, WIDE = 12, 40, 140
"""Characters of a name that are shown, and with at least so many columns."""
COLUMNS = ("JOB", "USER", "NAME", "STATE", "STEP", "ITER", "SHARE", "GPUS")
RIGHT = frozenset({"STEP", "ITER", "SHARE"})
"""Columns of figures."""


class Screen(NamedTuple):
    """The whole screen for one moment; a narrow one has shorter names."""

    view: TopView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the parts from top to bottom."""
        del console
        view, longest = self.view, NAME if options.max_width < WIDE else WIDE_NAME
        if not view.round:
            yield Text(NO_ROUND)
            return
        yield headline(view)
        yield from (Text(printable(fault, MAX_REASON), style="red") for fault in view.faults)
        yield gpu_map(view, longest)
        yield from job_lines(view.jobs, longest)
        yield from effect_lines(view)
        yield legend()


def headline(view: TopView) -> Text:
    """Return the first line: mode, age of the round, agents, durations of yields, idle GPUs, jobs that can move."""
    alive = sum(agent.alive for agent in view.agents)
    line = Text("cadenza ", style="bold")
    if any(fault.startswith(STOPPED) for fault in view.faults):
        line.append("STOPPED ", style="bold red")
    else:
        line.append(f"{view.mode} ", style="bold green" if view.mode == "apply" else "bold yellow")
    line.append(f" round {view.round}, ")
    line.append(f"{view.age_s:.0f} s ago", style="red" if view.age_s > STALE_AFTER_S else "")
    line.append(f"   agents {alive}/{len(view.agents)}", style="" if alive == len(view.agents) else "red")
    line.append(f"   {view.policy}   slice {view.slice_s:g} s   yields in the last minute {view.yields}")
    if view.yield_p50_s is not None and view.yield_p99_s is not None:
        line.append(f" (p50 {milliseconds(view.yield_p50_s)}, p99 {milliseconds(view.yield_p99_s)})")
    line.append(f"   idle GPUs {view.idle_gpus}")
    if view.waiting_that_fit and view.idle_gpus:
        line.append(f", {len(view.waiting_that_fit)} jobs that fit wait", style="yellow")
    if view.managed_jobs:
        line.append(f"   can move {view.movable_jobs}/{view.managed_jobs}")
    for sentence in view.closed:
        line.append(f"   {printable(sentence)}", style="red")
    return line


def gpu_map(view: TopView, longest: int) -> Table:
    """Return one row for the GPUs of a host that the same jobs have: their holder, and the waiting jobs by lane."""
    jobs = {job.id: job for job in view.jobs}
    lanes = max((job.lane or 0 for job in view.jobs if job.lease), default=0) + 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("GPU", *(f"lane {lane}" for lane in range(lanes))):
        table.add_column(name, no_wrap=name == "GPU")
    for (_, holder, waiting, others), rows in groupby(view.gpus, attrgetter("host", "holder", "waiting", "others")):
        cells = [Text() for _ in range(lanes)]
        for number in (*(() if holder is None else (holder,)), *waiting):
            if job := jobs.get(number):
                cells[job.lane or 0].append_text(marked(job, longest))
        if others:
            number = "" if holder is None else f"{holder} "
            cells[0].append_text(Text(f"▶ {number}another user's job", style="dim"))
        table.add_row(gpu_names(Gpu(row.host, row.index) for row in rows), *cells)
    return table


def marked(job: JobRow, longest: int) -> Text:
    """Return the mark of a job's lease, its number and its name."""
    mark, style = MARKS.get(job.lease, (" ", "dim"))
    return Text(f"{mark} {job.id} {printable(job.name, longest)} ", style=style)


def job_lines(jobs: Sequence[JobRow], longest: int) -> Iterator[Text]:
    """Yield a line for each job, and below it what was last done about it and why; no figure is cut."""
    rows = [COLUMNS, *(job_cells(job, longest) for job in jobs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS) - 1)]
    for row, job in zip(rows, (None, *jobs), strict=True):
        line = Text(style="bold" if job is None else "")
        for name, cell, width in zip(COLUMNS, row, widths, strict=False):
            style = MARKS.get(job.lease, ("", "dim"))[1] if job is not None and name == "STATE" else ""
            line.append(cell.rjust(width) if name in RIGHT else cell.ljust(width), style).append(" ")
        yield line.append(row[-1])
        if job is None:
            continue
        why = printable(job.reason or (job.why_not_ready if job.lease else ""), MAX_REASON)
        if said := ": ".join(filter(None, (printable(job.last_action), why))):
            yield Text(f"  {said}", style="dim")


def job_cells(job: JobRow, longest: int) -> tuple[str, ...]:
    """Return the cells of one job."""
    return (
        str(job.id) if not job.restart else f"{job.id}.{job.restart}",
        printable(job.user, longest),
        printable(job.name, longest),
        job.lease or job.slurm_state.lower(),
        str(job.step) if job.step else "",
        milliseconds(job.iteration_s) if job.iteration_s is not None else "",
        f"{job.share:.0%}" if job.share is not None else "",
        gpu_names(job.gpus) if job.gpus else f"wants {job.gpus_wanted}",
    )


def effect_lines(view: TopView) -> Iterator[Text]:
    """Yield the effects of the last decisions, newest first."""
    for effect in view.effects:
        ago = about(max(view.at_s - effect.at_s, 0.0)) + " ago"
        style = {"kept": "green", "undone": "yellow"}.get(effect.verdict, "dim")
        sentence = printable(effect_sentence(effect), MAX_REASON)
        yield Text(f"{ago:>9} job {effect.key} {sentence}", style=style)


def legend() -> Text:
    """Return the meaning of the marks."""
    return Text("   ".join(f"{mark} {state}" for state, (mark, _) in MARKS.items()), style="dim")
