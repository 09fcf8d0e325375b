#!/usr/bin/env python3
"""Public training scripts under moves: each runs alone, and again with two moves at random boundaries.

    benchmarks/moves/public_scripts.py FOLDER [--python PYTHON] [--only NAME] [--seed 1]
    benchmarks/moves/public_scripts.py FOLDER --own-saves
    benchmarks/moves/public_scripts.py --random-moves 1000

FOLDER holds clones of the repositories, by their names. The scripts are not part of this repository: what is not there,
or what its Python lacks, is said. Each script runs in a copy of its folder, with a few lines added where a text of it
stands, or unmodified, under `cadenza run`. After each optimizer step the losses and checksums of parameters, buffers,
optimizer state and random numbers are compared (as `cadenza run --rehearse-move` does). With ``--own-saves`` scripts
that resume by themselves run unmodified under `cadenza run --saves`: each is moved twice and comes to its end, and the
work that the job says is lost stands beside what its next start makes again. Exit code 1 if one differs or fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import random_moves
from public_script_table import OWN_SAVES, SCRIPTS, Script

from cadenza.sidecar.client.bootstrap.rehearsal import SCRATCH, Rehearsal, Start, compare
from cadenza.sidecar.client.bootstrap.rehearsal_compare import Unrecordable
from cadenza.sidecar.client.bootstrap.script_saves_options import RESUME_ARG, SAVES

MOVES = 2
NO_END = 10**6
"""Steps of a run that is not cut."""


@dataclass
class Row:
    """A line of the table."""

    script: Script
    commit: str
    moves: int
    result: str
    steps: str = ""


def with_lines(text: str, lines: Sequence[tuple[str, str]]) -> str:
    """Return a script with lines added; raise ValueError for a text that does not stand in it once."""
    for old, new in lines:
        if text.count(old) != 1 and not (old.startswith("import ") and old in text):
            raise ValueError(f"{old.strip()!r} stands in it {text.count(old)} times: another version?")
        text = text.replace(old, new, 1)
    return text


def copy(script: Script, source: Path, work: Path) -> None:
    """Copy a script's folder, for the run alone and for the moved one, and make it small."""
    for name in ("alone", "moved"):
        folder = work / name / "scratch" / "script"
        shutil.copytree(source.parent, folder, ignore=shutil.ignore_patterns(".git"))
        if script.prepare:
            script.prepare(folder)
        place = folder / source.name
        place.write_text(with_lines(place.read_text(), script.lines))


def lacking(python: str, modules: Sequence[str]) -> str:
    """Return the first module that a Python lacks."""
    for module in modules:
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            return module
    return ""


def command(script: Script, source: Path, python: str) -> list[str]:
    """Return a script's command, in the copy of its folder."""
    words = [*script.launcher.split(), source.name, *script.arguments.split()]
    return ["env", "-C", f"{SCRATCH}/script", python, *words]


def environment(source: Path, work: Path) -> dict[str, str]:
    """Return the environment of a script: its repository can be imported, and no hub can be reached."""
    paths = [str(source.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hub")}
    return {**os.environ, **offline, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def play(script: Script, source: Path, work: Path, python: str, draw: random.Random) -> tuple[int, str, str]:
    """Run a script alone and moved; return the number of moves, the result, and the steps of the moves."""
    # 1. A copy of the script's folder for each run, with its lines.
    try:
        copy(script, source, work)
    except ValueError as error:
        return 0, f"not run: {error}", ""
    rehearsal = Rehearsal(command(script, source, python), work, environment(source, work))
    # 2. Alone.
    alone = rehearsal.alone(script.steps)
    alone.cut(script.steps)
    if alone.outcome.status not in (None, 0) or not alone.steps:
        return 0, f"not run: its status is {alone.outcome.status}: {last_line(alone)}", ""
    # 3. Two moves, each in the first part of what is left, and the rest.
    starts: list[Start] = []
    made, steps = 0, []
    while not starts or starts[-1].outcome.saved is not None:
        order = draw.randint(1, max(1, (alone.steps - made) // 2)) if len(starts) < MOVES else 0
        left = alone.steps - made + (0 if alone.outcome.status is None else alone.steps)
        starts.append(rehearsal.moved(len(starts), left, order))
        made += starts[-1].steps
        if starts[-1].outcome.saved is not None:
            steps.append(made)
        elif order:
            break
    moves = len(steps)
    if starts[-1].outcome.reasons and not moves:
        return 0, f"refused: {starts[-1].outcome.reasons[-1]}", ""
    verdict = compare(alone, starts)
    result = "identical" if verdict.identical else "DIFFERS: " + " | ".join(map(str.strip, verdict.lines))
    if moves < MOVES:
        result += f", and no move {moves + 1}: {'; '.join(starts[-1].outcome.reasons) or 'it ended before'}"
    return moves, result, ", ".join(map(str, steps)) + f" of {alone.steps}"


def play_own(script: Script, source: Path, work: Path, python: str, draw: random.Random) -> tuple[int, str, str]:
    """Move a script that goes on from its own checkpoints until it ends; return as ``play`` does."""
    copy(script, source, work)
    options = [SAVES, f"{SCRATCH}/script/{script.saves}", f"{RESUME_ARG}={script.resume}"]
    rehearsal = Rehearsal(command(script, source, python), work, environment(source, work), options)
    starts = [rehearsal.moved(0, NO_END, draw.randint(1, script.steps))]
    while starts[-1].outcome.saved is not None:
        starts.append(rehearsal.moved(len(starts), NO_END, draw.randint(1, script.steps) if len(starts) < MOVES else 0))
    moves, places, faults = len(starts) - 1, [], []
    for before, after in itertools.pairwise(starts):
        found = lost(before, after)
        faults += [after.outcome.unrestored or "its checkpoint is that of no step"] if found is None else []
        steps, seconds = found or (0, 0.0)
        stated = (before.outcome.saved or {}).get("lost_s", 0.0)
        places.append(f"{before.steps}: {steps} steps, {stated:.1f} s stated, {seconds:.1f} s measured")
    if starts[-1].outcome.status != 0:
        faults.append(f"its status is {starts[-1].outcome.status}: {last_line(starts[-1])}")
    if moves < MOVES:
        faults.append(f"no move {moves + 1}: {'; '.join(starts[-1].outcome.reasons) or 'it ended before'}")
    return moves, "DIFFERS: " + "; ".join(faults) if faults else "ended", "; ".join(places)


def lost(before: Start, after: Start) -> tuple[int, float] | None:
    """Return the steps of a start that the next one makes again, and their time; None if it goes on from none."""
    (record,), (again,) = before.records.values(), after.records.values()
    first = (again.first or {}).get("parameters")
    for number, step in enumerate(reversed(record.steps)):
        if step["parameters"] == first:
            return number, record.steps[-1]["at_s"] - step["at_s"]
    return None


def last_line(start: Start) -> str:
    """Return the last line of a start's output."""
    return (start.output.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]


def run_one(script: Script, folder: Path, python: str, seed: int, keep: bool) -> Row:  # noqa: FBT001
    """Return a script's line of the table."""
    clone = folder / script.repository.rpartition("/")[2]
    source = clone / script.path
    commit = ""
    if clone.exists():
        # of the clone itself; a folder within another repository has none
        found = subprocess.run(
            ["git", "-C", clone, "log", "-1", "--format=%h"], capture_output=True, text=True, check=False,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)},
        )  # fmt: skip
        commit = found.stdout.strip()
        if not commit and (clone / "COMMIT").exists():
            commit = (clone / "COMMIT").read_text().strip()[:9]
    if not source.exists():
        return Row(script, commit, 0, f"not there: {source}")
    if module := lacking(python, script.needs):
        return Row(script, commit, 0, f"not run: {python} has no {module}")
    work = Path(tempfile.mkdtemp(prefix="cadenza-public-"))
    began = time.monotonic()
    try:
        run = play_own if script.saves else play
        moves, result, steps = run(script, source, work, python, random.Random(seed))
    except Unrecordable as error:
        moves, result, steps = 0, f"cannot be compared: {error}", ""
    print(f"  {script.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if keep:
        print(f"  {work}", file=sys.stderr)
    else:
        shutil.rmtree(work)
    return Row(script, commit, moves, result, steps)


def table(rows: Sequence[Row]) -> str:
    """Return the table."""
    head = "| script | repository, commit | lines added | moves | after steps | result |\n|---|---|---|---|---|---|"
    lines = [
        f"| {row.script.name} | {row.script.repository} {row.commit or '-'} | {row.script.added or 'none'} "
        f"| {row.moves} | {row.steps} | {row.result} |"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> int:
    """Print the table; return 1 if a script differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the outputs and records")
    parser.add_argument("--own-saves", action="store_true", help="scripts that go on from their own checkpoints")
    parser.add_argument("--random-moves", type=int, default=0)
    given = parser.parse_args()
    if given.random_moves:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a disk is not what is measured
            return random_moves.main(Path(folder), given.random_moves, given.seed)
    if given.folder is None:
        parser.error("FOLDER holds the clones; or give --random-moves N")
    chosen = [script for script in (OWN_SAVES if given.own_saves else SCRIPTS) if given.only in script.name]
    rows = [run_one(script, given.folder.absolute(), given.python, given.seed, given.keep) for script in chosen]
    print(table(rows))
    return 1 if any("DIFFERS" in row.result for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
