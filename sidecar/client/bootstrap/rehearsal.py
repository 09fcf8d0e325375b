"""``cadenza run --rehearse-move``: whether a command, moved in the middle, does the same as one that was not moved.

The command runs twice: once alone, once with a scripted agent that orders a checkpoint, kills all its processes and
starts the command again, as a requeue does. Each optimizer step of both is compared. No Slurm and no GPU is needed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.sidecar import wire
from cadenza.sidecar.client.bootstrap import rehearsal_compare
from cadenza.sidecar.client.bootstrap.process import REHEARSAL_ENV
from cadenza.sidecar.client.bootstrap.rehearsal_agent import Outcome, ScriptedAgent
from cadenza.sidecar.client.bootstrap.rehearsal_compare import Record, Unrecordable

STEPS = 30
JOB = "1"
SCRATCH = "{scratch}"
"""Stands in a command for a folder of the rehearsal's own, such as a script's output directory."""
SLURM_STARTERS = frozenset({"srun", "sbatch", "salloc"})
LAST_LINES = 5
IDENTICAL, DIFFERS, BAD_INPUT = 0, 1, 2


@dataclass
class Start:
    """One start of the command: how it ended, what it has done, and the file with its output."""

    outcome: Outcome
    records: dict[int, Record]
    output: Path

    @property
    def steps(self) -> int:
        """Number of steps that all ranks have made."""
        return min((len(record.steps) for record in self.records.values()), default=0)


@dataclass
class Verdict:
    """The findings of a comparison."""

    lines: list[str] = field(default_factory=list)
    identical: bool = False


class Rehearsal:
    """The starts of a command in a folder; ``options`` are those of ``cadenza run`` for each of them."""

    def __init__(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], options: Sequence[str] = ()
    ) -> None:
        self._command, self._folder, self._environ, self._options = list(command), folder, environ, list(options)
        self._receipt: dict[str, Any] = {}
        """Receipt for the next start of the job that is moved."""

    def alone(self, steps: int) -> Start:
        """Run the command for some steps, or to its end."""
        return self._start("alone", 0, steps, 0)

    def moved(self, restart: int, steps: int, order_at: int) -> Start:
        """Start the command as its job's ``restart``-th time, and order a checkpoint at a boundary (0: none)."""
        start = self._start("moved", restart, steps, order_at)
        if saved := start.outcome.saved:
            self._receipt = {"restart": restart + 1, "step": saved["step"], "paths": saved["paths"], "away_s": 0.0}
        return start

    def _start(self, name: str, restart: int, steps: int, order_at: int) -> Start:
        folder = self._folder / name
        scratch = folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        address = self._folder / f"{name}{restart}.sock"
        output = folder / f"output-{restart}.txt"
        command = [sys.executable, "-m", "cadenza.sidecar.client.bootstrap.run_script", *self._options, "--"]
        command += [word.replace(SCRATCH, str(scratch)) for word in self._command]
        kept = {key: value for key, value in self._environ.items() if not key.startswith(("SLURM_", "CADENZA_"))}
        ours = {"SLURM_JOB_ID": JOB, "SLURM_RESTART_COUNT": str(restart), wire.SOCKET_ENV: str(address)}
        if not restart:
            del ours["SLURM_RESTART_COUNT"]
        agent = ScriptedAgent(address, order_at, self._receipt if restart else {})
        counter = _Counter(folder, restart)
        environ = {**kept, **ours, REHEARSAL_ENV: str(folder), "PYTHONUNBUFFERED": "1"}
        outcome = agent.run(command, environ, output, counter.steps, steps)
        return Start(outcome, rehearsal_compare.read(folder, restart), output)


class _Counter:
    """Counts the steps in the growing records of one start."""

    def __init__(self, folder: Path, restart: int) -> None:
        self._folder, self._restart = folder, restart
        self._counts: dict[Path, tuple[int, int]] = {}

    def steps(self) -> int:
        """Return the number of steps that all ranks so far have made."""
        for path in self._folder.glob(f"{self._restart}.*.jsonl"):
            size, count = self._counts.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(size)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._counts[path] = size + len(data), count + data.count(b'"kind":"step"')
        return min((count for _, count in self._counts.values()), default=0)


def compare(alone: Start, starts: Sequence[Start]) -> Verdict:
    """Compare a job that was moved between its starts with the same command run alone."""
    verdict = Verdict(identical=True)
    for rank, record in sorted(alone.records.items()):
        prefix = f"rank {rank}: " if len(alone.records) > 1 else ""
        place = 0
        rehearsal_compare.ignore_unseeded(record, starts[0].records.get(rank, Record()))
        for number, start in enumerate(starts):
            mine = start.records.get(rank, Record())
            last = number == len(starts) - 1
            place, lines = _compare_start(record, mine, place, start, number, ends=last and alone.outcome.status == 0)
            verdict.lines += [prefix + line for line in lines]
            if lines:
                verdict.identical = False
                break
    return verdict


def _compare_start(
    alone: Record, mine: Record, place: int, start: Start, number: int, *, ends: bool
) -> tuple[int, list[str]]:
    """Compare one start that goes on at a step of the run alone; return the step after it, and what differs."""
    failed = start.outcome.status not in (None, 0)
    if number and failed:
        return place, [f"the restarted script failed with status {start.outcome.status}"]
    if number and not mine.steps and place < len(alone.steps):
        return place, ["the restarted script trained nothing"]
    at, missing = rehearsal_compare.arrival(alone, place, mine) if number else (0, [])
    if number and at == 0 and missing:
        return place, [f"restore() was not called, or restored nothing: {missing[0]}"]
    lines = []
    if at < place:
        lines.append(f"it went on after step {at} in place of step {place}: an older checkpoint was restored")
    if found := rehearsal_compare.first_difference(alone, mine.steps, at):
        step, differences = found
        if number:
            lines.append(f"differs from step {step + 1} on")
            lines += [f"  {one}" for one in (*missing, *differences)]
            if not missing and step == at:
                lines.append(f"  {_hint(differences)}")
        else:
            lines.append(f"two runs of this command differ by themselves, from step {step + 1} on: are its seeds set?")
            lines += [f"  {one}" for one in differences]
            lines.append(f"  or does it find files of the run before? Give it a folder of its own by {SCRATCH}")
    elif missing:
        lines += [f"not restored, without an effect in these steps: {one}" for one in missing]
    end = at + len(mine.steps)
    if ends and not lines and end != len(alone.steps):
        lines.append(f"it ended after {end} steps, the run alone after {len(alone.steps)}")
    return end, lines


def _hint(differences: Sequence[str]) -> str:
    """Return a hint for the case that all parameters were restored and the first step differs."""
    if any(one.startswith("the random numbers") for one in differences):
        return "data position, a batch fetched ahead, or random numbers drawn between restore() and the first step?"
    if any(one.startswith(("the loss", "the step has")) for one in differences):
        return "data position, a batch fetched ahead, a generator of the script's own, or buffers?"
    return "state that is neither the model's nor the optimizer's: is it among the checkpoint's `own`?"


def rehearse(command: Sequence[str], options: Sequence[str], steps: int, environ: Mapping[str, str]) -> int:
    """Rehearse one move of a command, print what was found, and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="cadenza-rehearsal-"))
    try:
        verdict = _rehearse(Rehearsal(command, folder, environ, options), steps)
    except Unrecordable as error:
        verdict = Verdict([f"it cannot be compared: {error}"])
    _say(*verdict.lines)
    if verdict.identical:
        shutil.rmtree(folder)
        return IDENTICAL
    _say(f"output and records of these runs: {folder}")
    return DIFFERS


def _rehearse(rehearsal: Rehearsal, steps: int) -> Verdict:
    """Run the command alone, then moved, and compare."""
    # 1. Alone.
    _say(f"1 of 3: the command alone, for {steps} optimizer steps; checkpoints go to a temporary folder")
    alone = rehearsal.alone(steps)
    if alone.outcome.status not in (None, 0):
        return Verdict([f"the command failed with status {alone.outcome.status}", *_last_lines(alone)])
    if alone.steps < 2 or not alone.outcome.boundaries:  # noqa: PLR2004 - one before the move, and one after it
        what = f"made {alone.steps} steps of torch's optimizers and {alone.outcome.boundaries} boundaries"
        return Verdict([f"the command {what}: there is nothing to move", *_last_lines(alone)])
    # 2. Again, until its checkpoint is on the disk; then no process of it is left.
    order_at = max(1, alone.outcome.boundaries // 2)
    _say(f"2 of 3: again, with a checkpoint ordered at boundary {order_at}")
    first = rehearsal.moved(0, alone.steps, order_at)
    if first.outcome.saved is None:
        reason = "; ".join(first.outcome.reasons) or f"none in {first.steps} steps; try more by --steps"
        return Verdict([f"no checkpoint was ordered: {reason}"])
    place = first.steps
    if place >= alone.steps:
        return Verdict([f"moved after step {place}, the last one: nothing to compare; try more by --steps"])
    # 3. The rest, as the job's second start.
    _say(f"3 of 3: killed after step {place}; started again")
    left = alone.steps - place + (0 if alone.outcome.status is None else alone.steps)
    second = rehearsal.moved(1, left, 0)
    verdict = compare(alone, [first, second])
    if verdict.identical:
        verdict.lines.append(f"identical from step {place + 1} on, to step {alone.steps}")
    elif not second.steps or second.outcome.status not in (None, 0):
        verdict.lines += _last_lines(second)
    return verdict


def _last_lines(start: Start) -> list[str]:
    lines = start.output.read_text(errors="replace").splitlines()
    return [f"  | {line}" for line in lines[-LAST_LINES:]]


def _say(*lines: str) -> None:
    for line in lines:
        sys.stderr.write(f"cadenza rehearsal: {line}\n")


def main(options: Sequence[str], steps: int, command: Sequence[str]) -> int:
    """Rehearse a command; return 0 if the move changed nothing, 1 if it did or could not be made, 2 for bad use."""
    if steps < 2:  # noqa: PLR2004
        _say(f"--steps {steps}: at least 2 are needed, one before the move and one after it")
        return BAD_INPUT
    if Path(command[0]).name in SLURM_STARTERS:
        _say(f"{command[0]} starts processes on other hosts: rehearse with the command that it starts, or torchrun")
        return BAD_INPUT
    if shutil.which(command[0]) is None:
        _say(f"{command[0]}: no such command")
        return BAD_INPUT
    return rehearse(command, options, steps, os.environ)
