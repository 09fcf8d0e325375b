#!/usr/bin/env python3
"""Accept a machine's GPU for Cadenza: one table row a check, at most ten minutes on one GPU.

It runs from a checkout with the torch that is there (2.4 or later), without an install and without a network. Blocks:
A the machine and its link, B the speed of both ways and what stays by NVML, C training that yields is bit-identical and
what cannot move refuses by name, D a large model, E two processes that alternate under a real agent, F the driver's
process checkpoint, also of two scripts that alternate, G the agent's figures, H what goes wrong: a full GPU,
interrupts, kills. Exit status: 0 all that ran passed, 1 a row failed, 3 no GPU. A row that cannot run here says "not
run" and why, and counts for nothing.

``--simulated`` runs the same checks on the simulated GPU of tests/simulated: its speeds are those of no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = {
    "moves": ("gpu_checks.py", "ABCH", 165.0),
    "features": ("gpu_features.py", "BCDFH", 205.0),
    "processes": ("gpu_checks.py", "CFG", 55.0),
    "turns": ("gpu_alternation.py", "EF", 175.0),
}
"""The script of each process that runs some of the rows, their letters, and its longest time in seconds: ten minutes
together."""
LONG_S = 1800.0
"""Longest time of the turns with --long."""
LETTERS = "ABCDEFGH"
NO_GPU = 3
GPU_BYTES, SMALL_BYTES = 512 << 20, 64 << 20
LINK_BYTES_S = 400 << 20
"""Memory of the simulated GPU, that of the one on which two jobs take turns, and its link."""
SIMULATED, SMALL = "SIMULATED_GPUS", "SIMULATED_SMALL"
Row = dict[str, Any]


@contextmanager
def environment(*, simulated: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of the checks: the package by a link if it is not installed, and the simulated GPU."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.environ.get("PYTHONPATH", "")]
        if importlib.util.find_spec("cadenza") is None:
            (Path(folder) / "cadenza").symlink_to(ROOT)
            sys.path.insert(0, folder)
            paths.insert(0, folder)
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if simulated:
            sys.path.insert(0, str(ROOT / "tests" / "simulated"))
            import simulated_gpu  # noqa: PLC0415 - imports torch, which the checks on a GPU do in processes of theirs

            gpu, small = Path(folder) / "gpu", Path(folder) / "small"
            simulated_gpu.create(gpu, GPU_BYTES, context_bytes=1 << 20, bytes_per_s=LINK_BYTES_S)
            simulated_gpu.create(small, SMALL_BYTES, context_bytes=1 << 20)
            found |= {SIMULATED: str(gpu), SMALL: str(small)}
            found["LD_LIBRARY_PATH"] = str(simulated_gpu.driver_libraries())
        yield found


def run(block: str, options: argparse.Namespace, environment: dict[str, str]) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of a block and what it said of the machine; a row that its process did not reach has failed."""
    machine: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    script, _, limit_s = BLOCKS[block]
    if options.long and block == "turns":
        limit_s, environment = LONG_S, {**environment, "ACCEPTANCE_LONG": "1"}
    command = [sys.executable, str(Path(__file__).with_name(script)), block, options.rows, options.only]
    if block == "turns" and SMALL in environment:
        environment = {**environment, SIMULATED: environment[SMALL]}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            end_group(process.pid)
            output = process.communicate()[0]
        end_group(process.pid)
    ended = f"its process ended with {process.returncode} (limit {limit_s:.0f} s)"
    for line in output.splitlines():
        said = json.loads(line) if line.startswith("{") else {}
        machine |= said.get("machine", {})
        rows |= {name: {"outcome": "FAILED", "why": ended, "figures": {}} for name in said.get("rows", ())}
        if "name" in said:
            rows[said["name"]] = said
    if process.returncode and not rows:
        rows[block] = {"outcome": "FAILED", "why": ended, "figures": {}}
    return [{"block": block, **row, "name": name} for name, row in rows.items()], machine


def end_group(leader: int) -> None:
    """End what a block has left of its processes."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def show(row: Row) -> None:
    """Print a row of the table."""
    figures = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row["figures"].items()
    )
    print(f"{row['outcome']:8} {row['name']:50} {'; '.join(filter(None, (row['why'], figures)))}", flush=True)


def main() -> int:
    """Run the blocks, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine's facts there")
    parser.add_argument("--only", default=",".join(LETTERS), help="blocks to run, by letter: %(default)s")
    parser.add_argument(
        "--long", action="store_true", help="let two jobs take turns of 60 s, which takes ten minutes more"
    )
    parser.add_argument(
        "--rows", default="", metavar="TEXTS", help="only the rows whose name has one of these texts, between commas"
    )
    parser.add_argument("--simulated", action="store_true", help="on the simulated GPU of tests/simulated")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(LETTERS):
        parser.error(f"no such block: {', '.join(sorted(unknown))}")
    machine: dict[str, Any] = {}
    rows: list[Row] = []
    with environment(simulated=options.simulated) as variables:
        for block, (_, letters, _) in BLOCKS.items():
            if not set(letters) & set(options.only):
                continue
            found, facts = run(block, options, variables)
            if "no_gpu" in facts:
                print(f"no GPU: {facts['no_gpu']}")
                return NO_GPU
            if facts and not machine:
                print(", ".join(f"{name} {value}" for name, value in facts.items()))
            machine |= facts
            for row in found:
                show(row)
            rows += found
    failed = sum(row["outcome"] == "FAILED" for row in rows)
    missing = sum(row["outcome"] == "not run" for row in rows)
    print(f"{len(rows) - failed - missing} passed, {failed} failed, {missing} not run")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows, "passed": not failed}, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
