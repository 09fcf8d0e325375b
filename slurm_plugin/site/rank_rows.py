"""Trial of ``cadenza doctor --gpu --ranks``: the rows of several ranks of ``benchmarks/gpu/acceptance.py``."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cadenza.slurm_plugin.site.checks import Finding

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "acceptance.py"
LEVELS = {"passed": "OK", "FAILED": "FAIL", "not run": "WARN"}
RANKS_S = 1800.0
"""Longest time of all rows in seconds; each has a limit of its own."""


def try_ranks(python: str, script: Path = SCRIPT, *options: str) -> Iterator[Finding]:
    """Yield a finding for each row, run with a Python that has the torch of jobs; the GPUs must be free."""
    if not script.is_file():
        advice = "run benchmarks/gpu/acceptance.py --only R from a checkout of this version"
        yield Finding("WARN", "several ranks", "not run: this installation has no benchmarks", advice)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [python, str(script), "--only", "R", "--json", str(rows), *options]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=RANKS_S, check=False)
            ended = f"ended with {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            ended = str(error)
        found: Sequence[dict[str, object]] = json.loads(rows.read_text())["rows"] if rows.exists() else ()
    for row in found:
        name, outcome = str(row["name"]), str(row["outcome"])
        text = "; ".join(filter(None, (outcome, str(row["why"]), _figures(row["figures"]))))
        advice = "" if outcome == "passed" else "such jobs share GPUs here at their own risk"
        yield Finding(LEVELS[outcome], name, text, advice)  # type: ignore[arg-type]
    if not found:
        yield Finding("WARN", "several ranks", f"not run: {script.name} {ended}", "see its output; it needs two GPUs")


def _figures(figures: object) -> str:
    """Return a row's figures as text."""
    items = figures.items() if isinstance(figures, dict) else ()
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in items)
