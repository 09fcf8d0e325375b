"""Draws a profile's sensitivity as a PNG with matplotlib, which is an extra."""

from __future__ import annotations

import io

import numpy as np

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.profiler.profile_builder import Finding, best_cpus

BLUE, GRAY, INK = "#2a6fbb", "#8a8f98", "#22262b"


def require() -> None:
    """Raise EnvironmentLacks, naming the extra, when matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        raise EnvironmentLacks(
            "--png needs matplotlib to draw: install the extra 'plots' (pip install 'cadenza[plots]')"
        ) from None


def png(finding: Finding) -> bytes:
    """Return steps a second over CPUs for each GPU: measured points, the prediction, the law and the share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (optional, and slow to import)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.2, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    cpus = np.linspace(min(finding.times), max(finding.times), 200)
    axes.plot(cpus, [1 / finding.law.time_s(c) for c in cpus], color=GRAY, dashes=(4, 3), label="max(T_gpu, P/c)")
    axes.plot(cpus, [1 / finding.time_s(c) for c in cpus], color=BLUE, label="predicted")
    known = sorted(finding.times)
    axes.plot(known, [1 / finding.times[c] for c in known], "o", color=BLUE, label="measured")
    axes.axvline(finding.subject.share, color=INK, linewidth=0.8, dashes=(1, 2), label="proportional share")
    axes.axvline(best_cpus(finding), color=BLUE, linewidth=0.8, label="enough")
    axes.set_xlabel("CPUs for each GPU")
    axes.set_ylabel("steps a second")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{finding.subject.model}: P = {finding.law.work_s:.3g} CPU-s, T_gpu = {finding.law.gpu_s:.3g} s")
    axes.grid(visible=True, color="#e4e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
