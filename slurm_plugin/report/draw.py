"""Charts drawn by matplotlib as small inline SVG: accessible, in the colors and letters of the page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import escape

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.slurm_plugin.report.chart_model import Axis, Chart, Line, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- Colors and line styles ----------------------------------------------------------------------------------

LIGHT = ("#59616e", "#1d3fc9", "#f03a00", "#068c57", "#de50a8", "#7b982d", "#0d86f0", "#6b1887")
DARK = ("#a3adbb", "#7caeff", "#e0661a", "#1fe89c", "#c95cc0", "#f7c532", "#baf1d2", "#b657ff")
"""Chosen so that any two differ for each of the three kinds of color blindness, and all from the background.

The first one, a gray, belongs to the baseline. After the last the colors repeat with other dashes.
"""
DASHES: tuple[tuple[float, ...], ...] = (
    (), (), (6.0, 1.6), (2.0, 1.4), (7.0, 1.6, 1.6, 1.6), (3.6, 1.6), (10.0, 2.0), (1.0, 1.2), (5.0, 1.5, 1.0, 1.5),
)  # fmt: skip
"""Lengths in points, on and off. There is one more than colors, so that pairs of color and dash repeat late."""
INK, MUTED, GRID, AXIS = "#010203", "#010204", "#010205", "#010206"
PAGE_COLORS = {
    **{f"#0201{at:02x}": f"var(--c{at})" for at in range(len(LIGHT))},
    INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", AXIS: "var(--axis)",
}  # fmt: skip
"""The page's color for each placeholder color that matplotlib draws with."""


class Look(NamedTuple):
    """Line style of a result; ``placeholder`` is its color while drawn, ``variable`` the one on the page."""

    placeholder: str
    variable: str
    dashes: tuple[float, ...]
    width: float


def look(index: int) -> Look:
    """Return the line style of the result at a position; 0 is the baseline."""
    at = index % len(LIGHT) if index < len(LIGHT) else 1 + (index - 1) % (len(LIGHT) - 1)
    return Look(f"#0201{at:02x}", f"c{at}", DASHES[index % len(DASHES)], 1.5 if index == 0 else 1.8)


# --- matplotlib ----------------------------------------------------------------------------------------------

POINTS_PER_INCH = 72.0


class Size(NamedTuple):
    """Measures of a drawing in CSS pixels; ``ticks``: most ticks on the x axis, ``points``: most points of a line."""

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
"""For telephones: letters of the same size, fewer ticks."""

STYLE = {
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


def require() -> None:
    """Raise EnvironmentLacks, naming the extra, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        raise EnvironmentLacks(
            "the page needs matplotlib to draw: install the extra 'plots' (pip install 'cadenza[plots]')"
        ) from None


def draw(chart: Chart, size: Size) -> str:
    """Return a chart as an ``svg`` element for the page."""
    import matplotlib as mpl  # noqa: PLC0415 (optional, and slow to import)
    from matplotlib import style  # noqa: PLC0415
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    out = io.StringIO()
    width, height = size.width - size.left - size.right, size.height - size.top - size.bottom
    box = (size.left / size.width, size.bottom / size.height, width / size.width, height / size.height)
    # Our style instead of the reader's matplotlibrc; the ids in the drawing follow from the salt.
    with style.context(["default", STYLE]), mpl.rc_context({"svg.hashsalt": f"{chart.key}-{size.name}"}):
        figure = Figure(figsize=(size.width / POINTS_PER_INCH, size.height / POINTS_PER_INCH), frameon=False)
        FigureCanvasSVG(figure)
        axes = figure.add_axes(box, frameon=False)
        _frame(axes, chart, size)
        for line in reversed(chart.lines):
            _line(axes, line)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(out.getvalue(), chart, size)


def _frame(axes: Axes, chart: Chart, size: Size) -> None:
    """Draw scales, ticks, grid and the labels of the axes."""
    axes.set(xscale=chart.x.scale, yscale=chart.y.scale)
    axes.set(xlim=(chart.x.low, chart.x.high), ylim=(chart.y.low, chart.y.high))
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


def _ticks(axes: Axes, which: str, axis: Axis, limit: int) -> None:
    from matplotlib.ticker import NullLocator  # noqa: PLC0415

    positions, labels = zip(*ticks(axis, limit), strict=True)
    side = axes.xaxis if which == "x" else axes.yaxis
    side.set_minor_locator(NullLocator())
    side.set_ticks(positions, labels)


def _line(axes: Axes, line: Line) -> None:
    """Draw one result's line above its band; the groups in the drawing are ``series-INDEX`` and ``band-INDEX``."""
    style = look(line.index)
    dashes: dict[str, Any] = {"dashes": style.dashes} if style.dashes else {}
    xs, ys = zip(*line.points, strict=True)
    if line.band:
        around, lows, highs = zip(*line.band, strict=True)
        band = axes.fill_between(around, lows, highs, color=style.placeholder, alpha=0.16, linewidth=0)
        band.set_gid(f"band-{line.index}")
    (drawn,) = axes.plot(
        xs, ys, color=style.placeholder, linewidth=style.width, zorder=3 - line.index / 1000,
        drawstyle="steps-post" if line.step else "default", marker="o" if line.dots else "", markersize=4.5, **dashes,
    )  # fmt: skip
    drawn.set_gid(f"series-{line.index}")


# --- From matplotlib's document to the page ------------------------------------------------------------------

NOISE = re.compile(
    r'\A.*<svg[^>]*>|<defs>\s*<style.*?</defs>|</svg>|<g id="[^"]*"/>| transform="rotate\(-0[^"]*"'
    r"|font-[a-z]+: [^;]*; |(?<=>)\s+|\s+(?=<)",
    re.DOTALL,
)
"""Parts that the page does without: the root, matplotlib's style sheet, empty groups, its fonts, and spaces.

The root is looked for at the start alone: at each character, it took ten times as long as to draw.
"""
COLOR = re.compile("|".join(PAGE_COLORS))
COORDINATES = re.compile(r'(?<= [dxy]=")[^"]*')
NUMBER = re.compile(r"-?\d+\.\d+")
GROUP = re.compile(r'<g id="(?:(series|band)-(\d+)|[^"]*)"')


def _inline(document: str, chart: Chart, size: Size) -> str:
    """Return matplotlib's document as a small ``svg`` element in the page's colors, with title and description."""
    labels = {str(line.index): escape(line.label) for line in chart.lines}

    def group(match: re.Match[str]) -> str:
        """Mark the groups of lines; drop the ids of groups, because each drawing has the same ones."""
        return f'<g class="{match[1]} n{match[2]}"><title>{labels[match[2]]}</title' if match[1] else "<g"

    def rounded(match: re.Match[str]) -> str:
        return NUMBER.sub(lambda part: f"{float(part[0]):.1f}".replace("-0.0", "0").removesuffix(".0"), match[0])

    # 1. Drop what the page does without, round coordinates to a tenth of a pixel, and leave out implied letters.
    content = NOISE.sub("", document)
    content = COORDINATES.sub(rounded, content).replace(" \nL ", " ").replace(" \n", " ")
    # 2. Use the page's colors, names and references.
    content = COLOR.sub(lambda match: PAGE_COLORS[match[0]], content)
    content = content.replace("xlink:href", "href").replace("; ", ";").replace(": ", ":")
    content = GROUP.sub(group, content)
    # 3. Describe it.
    name = f"{chart.key}-{size.name}"
    return (
        f'<svg class="drawing {size.name}" viewBox="0 0 {size.width:g} {size.height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-text"><title id="{name}-title">{escape(chart.title)}</title>'
        f'<desc id="{name}-text">{escape(f"{chart.caption} {chart.text}")}</desc>{content}</svg>'
    )
