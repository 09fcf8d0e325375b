#!/usr/bin/env python3
"""Accept a machine's GPUs for Cadenza: one table row a check, each in a process with a limit of its own.

It runs from a checkout with the torch that is there (2.4 or later), without an install and without a network. Letters:
A the machine and its link, B the speed of both ways and what stays by NVML, C training that yields is bit-identical and
what cannot move refuses by name, D a large model, E two processes that alternate under a real agent, F the driver's
process checkpoint, also of two scripts that alternate, G the agent's figures, H what goes wrong: a full GPU,
interrupts, kills, P peers on the same state and packing, R jobs of several ranks in turns under a real agent. Exit
status: 0 all that ran passed, 1 a row failed, 3 no GPU. A row that cannot run here says "not run" and why, and counts
for nothing.

With ``--json`` each row is in the file as soon as it has ended, so that a run that is cut keeps what it measured.
``--remaining`` leaves out the rows that passed before, by the files in a directory: on the same type of GPU, with the
same torch (major.minor), and at a commit since which the files that the row tests have not changed. Rows that never ran
come first, then those that failed, then the cheap ones. ``--budget`` leaves out a row that would not fit any more.

``--simulated`` runs the same checks on the simulated GPU of tests/simulated: its speeds are those of no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rows import Unit, units

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LETTERS = "ABCDEFGHPR"
TOGETHER = 4
"""Processes that run at once, where none measures time."""
PATIENCE = 4.0
"""Factor of all limits on the simulated GPU, which runs where other tests do."""
NO_GPU = 3
FACTS_S = 60.0
GPU_BYTES, LINK_BYTES_S = 512 << 20, 400 << 20
"""Memory of the simulated GPU, and its link."""
SIMULATED = "SIMULATED_GPUS"
TURNS = {"alternation.py": (1, 64 << 20), "ranks.py": (2, 88 << 20)}
"""Number and memory of the simulated GPUs of scripts whose jobs take turns: a GPU has room for one job, not for two."""
Row = dict[str, Any]


@contextmanager
def environment(*, simulated: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of the checks: the package by a link if it is not installed, and the simulated GPUs."""
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

            simulated_gpu.create(Path(folder) / "gpu", GPU_BYTES, context_bytes=1 << 20, bytes_per_s=LINK_BYTES_S)
            found[SIMULATED] = str(Path(folder) / "gpu")
            for script, (count, nbytes) in TURNS.items():
                places = [Path(folder) / f"{script}{number}" for number in range(count)]
                for place in places:
                    simulated_gpu.create(place, nbytes, context_bytes=1 << 20)
                found[f"{SIMULATED} {script}"] = os.pathsep.join(map(str, places))
            found["LD_LIBRARY_PATH"] = str(simulated_gpu.driver_libraries())
        yield found


@dataclass
class Table:
    """The rows so far, printed and written as they end."""

    json: Path | None
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: Row) -> None:
        """Print a row, and write all rows to a file that is complete at any time."""
        with self.lock:
            self.rows.append(row)
            figures = ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row["figures"].items()
            )
            print(f"{row['outcome']:8} {row['name']:50} {'; '.join(filter(None, (row['why'], figures)))}", flush=True)
            self.write()

    def write(self) -> None:
        """Replace the file."""
        if self.json is not None:
            temporary = self.json.with_name(f".{self.json.name}.new")
            found = {"machine": self.machine, "rows": self.rows, "passed": not self.count("FAILED")}
            temporary.write_text(json.dumps(found, indent=1) + "\n")
            temporary.replace(self.json)

    def count(self, outcome: str) -> int:
        """Return the number of rows with an outcome."""
        return sum(row["outcome"] == outcome for row in self.rows)


def run(unit: Unit, rows: Sequence[str], variables: dict[str, str], table: Table) -> None:
    """Run a unit's process; a row that it did not reach has failed."""
    command = [sys.executable, str(Path(__file__).with_name(unit.script)), "rows", *rows]
    variables = {**variables, **unit.settings}
    if own := variables.get(f"{SIMULATED} {unit.script}"):
        variables[SIMULATED] = own
    limit_s = unit.limit_s * (PATIENCE if SIMULATED in variables else 1)
    began, ended, missing = time.monotonic(), list[str](), list(rows)
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:

        def end() -> None:
            ended.append("limit")
            end_group(process.pid)

        timer = threading.Timer(limit_s, end)
        errors = list[str]()
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        timer.start()
        reader.start()
        for line in process.stdout or ():
            said = json.loads(line) if line.startswith('{"name"') else {}
            if said.get("name") in missing:
                missing.remove(said["name"])
                table.add(said)
        process.wait()
        timer.cancel()
        end_group(process.pid)
        reader.join(1.0)
    last = next((line.strip() for line in reversed(errors) if line.strip()), "")[:200]
    why = f"over {limit_s:.0f} s" if ended else f"its process ended with {process.returncode}: {last}"
    for name in missing:
        table.add({"name": name, "outcome": "FAILED", "why": why, "figures": {}, "seconds": time.monotonic() - began})


def end_group(leader: int) -> None:
    """End the processes that a unit has left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def facts(variables: dict[str, str]) -> dict[str, Any]:
    """Return what identifies the machine and the checkout."""
    command = [sys.executable, str(Path(__file__).with_name("checks.py")), "facts"]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, timeout=FACTS_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"the machine's facts are not known: the process ended with {done.returncode}")
    said: dict[str, Any] = json.loads(lines[-1])["machine"]
    return {**said, "commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}


def git(*words: str) -> str:
    """Return what git says of this checkout, "" without git."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def unchanged(commit: str, files: Sequence[str]) -> bool:
    """Return True if some paths are as they were at a commit, also in the working tree."""
    if not re.fullmatch("[0-9a-f]{40}", commit) or shutil.which("git") is None:
        return False
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *files]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass
class Past:
    """The results of a row before."""

    outcomes: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Commits at which it passed, in a checkout without changes."""
    seconds: float = 0.0


def past_results(folder: Path, machine: dict[str, Any]) -> dict[str, Past]:
    """Return the results on this type of GPU with this torch, by the rows' names."""
    found: dict[str, Past] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            said = json.loads(file.read_text())
            like = all(_kind(said["machine"])[key] == value for key, value in _kind(machine).items())
            rows = [(row["name"], row["outcome"], float(row.get("seconds", 0.0))) for row in said["rows"]]
        except (OSError, ValueError, KeyError, TypeError):  # a benchmark of another kind
            continue
        for name, outcome, seconds in rows if like else ():
            one = found.setdefault(name, Past())
            one.outcomes.append(outcome)
            one.seconds = max(one.seconds, seconds)
            if outcome == "passed" and not said["machine"].get("changed"):
                one.commits.append(str(said["machine"].get("commit", "")))
    return found


def _kind(machine: dict[str, Any]) -> dict[str, Any]:
    """Return what two machines must have in common, so that a row that passed on one need not run on the other."""
    return {"device": machine.get("device"), "torch": ".".join(str(machine.get("torch", "")).split(".")[:2])}


def remaining(rows: Sequence[str], unit: Unit, past: dict[str, Past]) -> list[str]:
    """Return the rows of a unit that have not passed; all that need it, since they look at one run."""
    open_rows = [name for name in rows if not any(unchanged(one, unit.files) for one in past.get(name, Past()).commits)]
    return list(rows) if open_rows else []


def urgency(rows: Sequence[str], unit: Unit, past: dict[str, Past]) -> tuple[int, float]:
    """Return the key by which units run: those that never ran, those that failed, and then the cheap ones."""
    known = [past[name] for name in rows if name in past]
    ran = [one for one in known if {"passed", "FAILED"} & set(one.outcomes)]
    rank = 0 if not ran else 1 if any(one.outcomes[-1] == "FAILED" for one in ran) else 2
    return rank, expected_s(rows, unit, past)


def expected_s(rows: Sequence[str], unit: Unit, past: dict[str, Past]) -> float:
    """Return the time that a unit took at most before, or half its limit."""
    return sum(past[name].seconds for name in rows if name in past) or unit.limit_s / 2


def in_time(chosen: list[tuple[Unit, list[str]]], variables: dict[str, str], table: Table, options: Any) -> None:
    """Run units by their urgency; several at once where none measures time, and none that does not fit the budget."""
    past = past_results(options.results, table.machine)
    ends = time.monotonic() + options.budget if options.budget else float("inf")
    ordered = sorted(chosen, key=lambda one: urgency(one[1], one[0], past))

    def start(one: tuple[Unit, list[str]]) -> None:
        unit, rows = one
        needed = expected_s(rows, unit, past)
        if time.monotonic() + needed <= ends:
            run(unit, rows, variables, table)
            return
        for name in rows:
            why = f"takes about {needed:.0f} s, and the budget leaves {max(0.0, ends - time.monotonic()):.0f}"
            table.add({"name": name, "outcome": "not run", "why": why, "figures": {}, "seconds": 0.0})

    for rank in range(3):
        mine = [one for one in ordered if urgency(one[1], one[0], past)[0] == rank]
        with ThreadPoolExecutor(min(TOGETHER, os.cpu_count() or 1)) as pool:
            list(pool.map(start, [one for one in mine if not one[0].alone]))
        for one in mine:
            if one[0].alone:
                start(one)


def main() -> int:
    """Run the rows, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine's facts there")
    parser.add_argument("--only", default=",".join(LETTERS), help="rows to run, by letter: %(default)s")
    parser.add_argument(
        "--long", action="store_true", help="let two jobs take turns of 60 s, which takes ten minutes more"
    )
    parser.add_argument(
        "--rows", default="", metavar="TEXTS", help="only the rows whose name has one of these texts, between commas"
    )
    parser.add_argument("--remaining", action="store_true", help="only the rows that have not passed on such a GPU")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="results before, for --remaining: %(default)s"
    )
    parser.add_argument("--budget", type=float, metavar="S", help="leave out what does not fit into these seconds")
    parser.add_argument("--simulated", action="store_true", help="on the simulated GPU of tests/simulated")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(LETTERS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    with environment(simulated=options.simulated) as variables:
        if options.long:
            variables["ACCEPTANCE_LONG"] = "1"
        machine = facts(variables)
        if "no_gpu" in machine:
            print(f"no GPU: {machine['no_gpu']}")
            return NO_GPU
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        table = Table(options.json, machine)
        past, chosen = past_results(options.results, machine), list[tuple[Unit, list[str]]]()
        for unit in units("simulated" if options.simulated else "cuda", long=options.long):
            wanted = [name for name in unit.rows if name.split()[0] in options.only]
            rows = [name for name in wanted if any(text in name for text in options.rows.split(","))]
            rows = remaining(rows, unit, past) if options.remaining else rows
            if rows:
                chosen.append((unit, rows))
        in_time(chosen, variables, table, options)
    print(f"{table.count('passed')} passed, {table.count('FAILED')} failed, {table.count('not run')} not run")
    table.write()
    return int(table.count("FAILED") > 0)


if __name__ == "__main__":
    sys.exit(main())
