#!/usr/bin/env python3
"""Draw what live_tuning.py found: each job's completion time with both allocations, and what was predicted.

Usage: live_tuning_plot.py results/live_tuning.json live_tuning.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, GRAY, INK = "#2a6fbb", "#8a8f98", "#22262b"
WIDTH = 0.36
"""Width of a bar; two stand side by side."""


def with_mean(jct_s: dict[str, float]) -> dict[str, float]:
    """Return the jobs' times and, last, their mean."""
    return {**jct_s, "mean": fmean(jct_s.values())}


def draw(found: dict[str, Any]) -> Figure:
    """Return the figure: two bars for each job and for the mean, with the predictions as marks."""
    figure = Figure(figsize=(7.2, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side, (allocate, color) in enumerate(zip(found["measured_s"], (GRAY, BLUE), strict=True)):
        measured = with_mean(found["measured_s"][allocate])
        predicted = with_mean(found["predicted_s"][allocate])
        places = [index + (side - 0.5) * WIDTH for index in range(len(measured))]
        axes.bar(places, list(measured.values()), WIDTH, color=color, label=f"{allocate} shares, measured")
        label = "predicted by the simulator" if side else None
        axes.plot(places, list(predicted.values()), "_", color=INK, markersize=18, label=label)
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylabel("seconds from submission to end")
    axes.grid(axis="y", color="#e4e6ea")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Read the numbers and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", type=Path, help="what live_tuning.py wrote")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.numbers.read_text())).savefig(options.picture)


if __name__ == "__main__":
    main()
