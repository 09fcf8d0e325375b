"""The chart of the first page, from the record of a made-up month: `python docs/month_chart.py >docs/month.svg`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "records.toml"
SERIES = {"all": "all jobs", "jobs that cannot move (1.00)": "cannot move", "jobs that can (1.00)": "can move"}
"""Rows of the record, and their names in the chart."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 70, 560, 70, 330
LEAST, MOST = 0.6, 1.1
STYLE = """\
text { font: 20px sans-serif; fill: #22262b } .title { font-weight: bold } .axis { stroke: #8a8f98 }
.s0 { stroke: #2a6fbb; fill: #2a6fbb } .s1 { stroke: #5f6670; fill: #5f6670 } .s2 { stroke: #b3541e; fill: #b3541e }
polyline { fill: none !important; stroke-width: 3 } text.s0, text.s1, text.s2 { stroke: none }
@media (prefers-color-scheme: dark) { text { fill: #e4e6ea } .s0 { stroke: #7fb2ec; fill: #7fb2ec }
.s1 { stroke: #b4bac3; fill: #b4bac3 } .s2 { stroke: #ef9a6b; fill: #ef9a6b } }"""


def draw() -> str:
    """Return the chart: mean completion time to Slurm's over the part of the jobs that can move."""
    record = tomllib.loads(RECORDS.read_text())["month"]
    parts = record["columns"][1:]
    places = [LEFT + 40 + index * (RIGHT - LEFT - 80) / (len(parts) - 1) for index in range(len(parts))]
    title = "Mean completion time of a month, Slurm = 1"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="32">{title}</text>',
    ]
    for tick in (0.6, 0.8, 1.0):
        lines.append(f'<path class="axis" d="M{LEFT} {_height(tick):.0f}H{RIGHT}"/>')
        lines.append(f'<text x="{LEFT - 10}" y="{_height(tick) + 7:.0f}" text-anchor="end">{tick}</text>')
    for part, x in zip(parts, places, strict=True):
        lines.append(f'<text x="{x:.0f}" y="{BOTTOM + 28}" text-anchor="middle">{part}</text>')
    middle = (LEFT + RIGHT) // 2
    lines.append(f'<text x="{middle}" y="{BOTTOM + 60}" text-anchor="middle">part of the jobs that can move</text>')
    for index, (row, name) in enumerate(SERIES.items()):
        cells = next(cells for what, *cells in record["rows"] if what == row)
        values = [float(cell.split(",")[0].split()[0]) for cell in cells if cell[0].isdigit()]
        points = [(x, _height(value)) for x, value in zip(places, values, strict=False)]
        lines.append(f'<polyline class="s{index}" points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in points)}"/>')
        lines += [f'<circle class="s{index}" cx="{x:.0f}" cy="{y:.0f}" r="6"/>' for x, y in points]
        x, y = points[-1]
        lines.append(f'<text class="s{index}" x="{x + 14:.0f}" y="{y + 7:.0f}">{values[-1]:.2f} {name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _height(value: float) -> float:
    return BOTTOM - (value - LEAST) / (MOST - LEAST) * (BOTTOM - TOP)


if __name__ == "__main__":
    sys.stdout.write(draw())
