"""Draws a chart with matplotlib, in placeholder colours that the page's style sheet later fills in."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from cadenza.slurm_plugin.report.chart import Axis, Chart, Line, ticks
from cadenza.slurm_plugin.report.errors import EnvironmentLacks
from cadenza.slurm_plugin.report.theme import AXIS, GRID, INK, MUTED, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS_PER_INCH = 72.0


class Size(NamedTuple):
    """A drawing's measures in CSS pixels; ``ticks``: at most so many on the x axis."""

    name: str
    width: float
    height: float
    ticks: int
    points: int
    left: float = 46.0
    right: float = 14.0
    top: float = 32.0
    bottom: float = 42.0


WIDE = Size("wide", 620.0, 306.0, 9, 300)
NARROW = Size("narrow", 340.0, 256.0, 5, 140)
"""A telephone's: the same letters, fewer ticks."""

STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "font.family": ["DejaVu Sans"],
    "font.size": 11.0,
    "path.simplify": False,
    "lines.solid_capstyle": "round",
    "lines.dash_capstyle": "butt",
    "lines.solid_joinstyle": "round",
    "lines.scale_dashes": False,
    "text.color": MUTED,
    "text.parse_math": False,
    "axes.unicode_minus": True,
}


@contextmanager
def _style(salt: str) -> Iterator[None]:
    """Use our style whatever the reader's own matplotlibrc says; ids in the drawing follow from ``salt``."""
    import matplotlib as mpl  # noqa: PLC0415 (optional, and slow to import)

    defaults: dict[Any, Any] = dict(mpl.rcParamsDefault)
    defaults = {key: value for key, value in defaults.items() if not key.startswith("backend")}
    with mpl.rc_context(defaults | dict(STYLE) | {"svg.hashsalt": salt}):
        yield


def require() -> None:
    """Raise EnvironmentLacks, naming the extra, when matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        raise EnvironmentLacks(
            "cadenza report needs matplotlib to draw: install the extra 'plots' (pip install 'cadenza[plots]')"
        ) from None


def draw(chart: Chart, size: Size) -> str:
    """Return a chart as matplotlib's SVG document."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    out = io.StringIO()
    with _style(f"{chart.key}-{size.name}"):
        figure = Figure(figsize=(size.width / POINTS_PER_INCH, size.height / POINTS_PER_INCH), frameon=False)
        FigureCanvasSVG(figure)
        axes = figure.add_axes(_box(size), frameon=False)
        _frame(axes, chart, size)
        for line in reversed(chart.lines):
            _line(axes, line)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


def _box(size: Size) -> tuple[float, float, float, float]:
    """Return the plot's rectangle in parts of the drawing."""
    width = size.width - size.left - size.right
    height = size.height - size.top - size.bottom
    return (size.left / size.width, size.bottom / size.height, width / size.width, height / size.height)


def _frame(axes: Axes, chart: Chart, size: Size) -> None:
    """Draw everything but the lines: scales, ticks, grid and what the axes show."""
    axes.set_xscale(chart.x.scale)
    axes.set_yscale(chart.y.scale)
    axes.set_xlim(chart.x.low, chart.x.high)
    axes.set_ylim(chart.y.low, chart.y.high)
    _ticks(axes, "x", chart.x, size.ticks)
    _ticks(axes, "y", chart.y, 5)
    axes.tick_params(length=0, labelcolor=MUTED, labelsize=11, pad=7)
    axes.set_axisbelow(True)
    axes.grid(visible=True, which="major", axis="y", color=GRID, linewidth=1.0)
    axes.axhline(chart.y.low, color=AXIS, linewidth=1.2, zorder=1.5, clip_on=False)
    middle = 1 - (size.right + (size.width - size.left - size.right) / 2) / size.width
    axes.figure.text(middle, 9 / size.height, chart.x.label, ha="center", va="bottom", color=MUTED, fontsize=11)
    axes.figure.text(2 / size.width, 1 - 11 / size.height, chart.y.label, ha="left", va="center", color=MUTED)
    if chart.upright is not None:
        axes.axvline(chart.upright, color=INK, linewidth=1.0, dashes=(2, 2), zorder=1.6)


def _ticks(axes: Axes, which: str, axis: Axis, most: int) -> None:
    from matplotlib.ticker import NullLocator  # noqa: PLC0415

    found = ticks(axis, most)
    side = axes.xaxis if which == "x" else axes.yaxis
    side.set_minor_locator(NullLocator())
    side.set_ticks([at for at, _ in found], [label for _, label in found])


def _line(axes: Axes, line: Line) -> None:
    """Draw one result's line, on top of its band; its group in the drawing is named ``series-INDEX``."""
    style = look(line.index)
    dashes: dict[str, Any] = {"dashes": style.dashes} if style.dashes else {}
    xs, ys = _columns(line.points)
    if line.band:
        around, lows, highs = zip(*line.band, strict=True)
        band = axes.fill_between(around, lows, highs, color=style.placeholder, alpha=0.16, linewidth=0)
        band.set_gid(f"band-{line.index}")
    (drawn,) = axes.plot(
        xs, ys, color=style.placeholder, linewidth=style.width, zorder=3 - line.index / 1000,
        drawstyle="steps-post" if line.step else "default", marker="o" if line.dots else "", markersize=4.5, **dashes,
    )  # fmt: skip
    drawn.set_gid(f"series-{line.index}")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
