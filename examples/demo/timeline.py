"""The plot of the jobs on each GPU: plain Slurm above, Cadenza below, on one time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from metrics import Run

COLORS = "tab20"
BAR = 0.86
"""Height of a bar in rows."""
LABEL_S = 14.0
"""A job's name is written on its first stretch of at least this length."""


def plot(runs: Sequence[Run], path: Path) -> None:
    """Write the time lines of several runs of one list as one PNG; raise OSError when that fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 3.4 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    end_s = max(run.span[1] - run.span[0] for run in runs)
    for number, run in enumerate(runs):
        axes = figure.add_subplot(len(runs), 1, number + 1)
        draw(axes, run)
        axes.set_xlim(0, end_s * 1.01)
    axes.set_xlabel("seconds since the first submission")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw(axes: Axes, run: Run) -> None:
    """Draw one run: a row for each GPU, a bar for each stretch in which a job held it."""
    from matplotlib import colormaps  # noqa: PLC0415

    palette = colormaps[COLORS]
    names = sorted({result.job for result in run.results})
    rows = gpu_rows(run)
    begin = run.span[0]
    labeled: set[tuple[str, str, int]] = set()
    for stretch in sorted(run.stretches, key=lambda stretch: stretch.from_s):
        color = palette(names.index(stretch.job) % palette.N)
        for index in stretch.gpus:
            row, length = rows.index((stretch.host, index)), stretch.to_s - stretch.from_s
            axes.barh(row, length, left=stretch.from_s - begin, height=BAR, color=color, linewidth=0)
            if length >= LABEL_S and (stretch.job, stretch.host, index) not in labeled:
                labeled.add((stretch.job, stretch.host, index))
                axes.text(stretch.from_s - begin + 0.5, row, stretch.job, va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(len(rows)), [f"{host}:{index}" for host, index in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(run.name, loc="left", fontsize=10)


def gpu_rows(run: Run) -> list[tuple[str, int]]:
    """Return every GPU that was held, hosts in order."""
    return sorted({(stretch.host, index) for stretch in run.stretches for index in stretch.gpus})
