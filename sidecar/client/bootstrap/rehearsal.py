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
from cadenza.sidecar.client.bootstrap.script_saves_options import SAVES
from cadenza.sidecar.client.session.checkpoint_request import NO_CHECKPOINT

REHEARSE, STEPS = "--rehearse-move", "--steps"
"""Options of ``cadenza run``: to rehearse, and the number of optimizer steps to compare."""
DEFAULT_STEPS = 30
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

    def cut(self, steps: int) -> None:
        """Forget what a run did beyond so many steps, if it was ended; one that came to its end is whole."""
        if self.outcome.status is None:
            for record in self.records.values():
                del record.steps[steps:]


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
        self.loses = SAVES in options
        """Its job goes on from its own checkpoints, so that the steps after the last one are lost."""
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
        words = [*self._options, "--", *self._command]
        command = [sys.executable, "-m", "cadenza.sidecar.client.bootstrap.run_script"]
        command += [word.replace(SCRATCH, str(scratch)) for word in words]
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


def compare(alone: Start, starts: Sequence[Start], *, loses: bool = False) -> Verdict:
    """Compare a job that was moved between its starts with the same command run alone.

    ``loses``: its own checkpoints are used, so that the steps after the last of them may be made again.
    """
    verdict = Verdict(identical=True)
    for rank, record in sorted(alone.records.items()):
        prefix = f"rank {rank}: " if len(alone.records) > 1 else ""
        place = 0
        rehearsal_compare.ignore_unseeded(record, starts[0].records.get(rank, Record()))
        for number, start in enumerate(starts):
            mine = start.records.get(rank, Record())
            at, lines = _arrival(record, mine, place, start, loses=loses) if number else (0, [])
            verdict.lines += [prefix + line for line in lines]
            ends = number == len(starts) - 1 and alone.outcome.status == 0
            faults = _faults(record, mine, at, start, restarted=bool(number), ends=ends)
            verdict.lines += [prefix + line for line in faults]
            if faults or (lines and not loses):
                verdict.identical = False
                break
            place = at + len(mine.steps)
    return verdict


def _arrival(alone: Record, mine: Record, place: int, start: Start, *, loses: bool) -> tuple[int, list[str]]:
    """Return the step of the run alone at which a restarted job goes on, and how that is not the one after the move."""
    at, missing = rehearsal_compare.arrival(alone, place, mine)
    if at == 0 and missing:
        return at, [f"restore() was not called, or nothing was restored: {missing[0]}"]
    lines = [f"not restored: {one}" for one in missing]
    if start.outcome.unrestored:
        lines.append(start.outcome.unrestored)
    if at < place:
        again = f"the steps {at + 1} to {place} are made again"
        lines.append(again if loses else f"an older checkpoint was restored: {again}")
    return at, lines


def _faults(alone: Record, mine: Record, at: int, start: Start, *, restarted: bool, ends: bool) -> list[str]:
    """Return how a start's steps differ from those of the run alone from step ``at`` on."""
    script = "the restarted script" if restarted else "the script"
    if start.outcome.status not in (None, 0) or start.outcome.silent:
        ended = "did nothing for ten minutes" if start.outcome.silent else f"failed with status {start.outcome.status}"
        return [f"{script} {ended}"]
    if restarted and not mine.steps and at < len(alone.steps):
        return [f"{script} trained nothing"]
    if found := rehearsal_compare.first_difference(alone, mine.steps, at):
        step, differences = found
        causes = [f"  {one}" for one in differences]
        if not restarted:
            first = f"two runs of this command differ by themselves, from step {step + 1} on: are its seeds set?"
            return [first, *causes, f"  or does it find files of the run before? {SCRATCH} is a folder of its own"]
        return [f"differs from step {step + 1} on", *causes, *_hint(differences, first=step == at)]
    end = at + len(mine.steps)
    short = ends and end != len(alone.steps)
    return [f"it ended after {end} steps, the run alone after {len(alone.steps)}"] if short else []


def _hint(differences: Sequence[str], *, first: bool) -> list[str]:
    """Return a hint for the case that the ``first`` step after a move differs, by its differences."""
    if not first:
        return []
    if any(one.startswith("the random numbers") for one in differences):
        return [
            "  is the data's position restored? Was a batch fetched ahead? Are random numbers drawn after restore()?"
        ]
    if any(one.startswith(("the loss", "the step has")) for one in differences):
        return ["  is the data's position restored? Was a batch fetched ahead? Has the script a generator of its own?"]
    return []


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
    order_at = max(1, alone.outcome.boundaries * min(steps, alone.steps) // alone.steps // 2)
    alone.cut(steps)
    _say(f"2 of 3: again, with a checkpoint ordered at boundary {order_at}")
    first = rehearsal.moved(0, alone.steps, order_at)
    if first.outcome.saved is None:
        return Verdict([f"no checkpoint was ordered: {_no_order(first)}"])
    place = first.steps
    if place >= alone.steps:
        return Verdict([f"moved after step {place}, the last one: nothing to compare; try more by --steps"])
    # 3. The rest, as the job's second start.
    _say(f"3 of 3: killed after step {place}; started again")
    left = alone.steps - place + (0 if alone.outcome.status is None else alone.steps)
    second = rehearsal.moved(1, left, 0)
    verdict = compare(alone, [first, second], loses=rehearsal.loses)
    if verdict.identical:
        steps_after = f"steps {place + 1} to {alone.steps}"
        verdict.lines.append(
            f"identical: after the move, {steps_after} have the losses and parameters of the run alone"
        )
    elif not second.steps or second.outcome.status not in (None, 0):
        verdict.lines += _last_lines(second)
    return verdict


def _no_order(start: Start) -> str:
    """Return why no checkpoint came of an order."""
    outcome = start.outcome
    if outcome.status not in (None, 0):
        return f"the script failed with status {outcome.status}"
    if outcome.reasons == [NO_CHECKPOINT]:
        return NO_CHECKPOINT
    if outcome.reasons:
        return f"{'; '.join(outcome.reasons)} (in {start.steps} steps; {STEPS} N takes more)"
    passed = wire.PASSED_WORDS.get(outcome.passed, "none was possible")
    return f"{passed} (in {start.steps} steps; {STEPS} N takes more)"


def _last_lines(start: Start) -> list[str]:
    lines = start.output.read_text(errors="replace").splitlines()
    return [f"  | {line}" for line in lines[-LAST_LINES:]]


def _say(*lines: str) -> None:
    for line in lines:
        sys.stderr.write(f"cadenza rehearsal: {line}\n")


def main(options: Sequence[str], command: Sequence[str]) -> int:
    """Rehearse a command of ``cadenza run``; its other options are those of each start.

    Returns 0 if the move changed nothing, 1 if it did or could not be made, and 2 for bad use.
    """
    words = [part for option in options for part in (option.split("=", 1) if _is_ours(option) else [option])]
    others, steps = [word for word in words if word != REHEARSE], DEFAULT_STEPS
    if STEPS in others:
        at = others.index(STEPS)
        number = "".join(others[at + 1 : at + 2])
        steps = int(number) if number.isascii() and number.isdigit() else 0
        del others[at : at + 2]
    if fault := _fault(others, command, steps):
        _say(fault)
        return BAD_INPUT
    return rehearse(command, others, steps, os.environ)


def _is_ours(option: str) -> bool:
    return option.partition("=")[0] in (STEPS, SAVES)


def _fault(options: Sequence[str], command: Sequence[str], steps: int) -> str:
    """Return why a command line cannot be rehearsed; "" if it can."""
    saves = options[options.index(SAVES) + 1 :][:1] if SAVES in options else [SCRATCH]
    if not saves or not saves[0].startswith(SCRATCH):
        return (
            f"{SAVES}: each run needs checkpoints of its own; {SCRATCH} stands for its folder, as in "
            f"{SAVES} '{SCRATCH}/*.pt' -- python train.py --out={SCRATCH}"
        )
    if not command:
        return f"{REHEARSE} needs a command: cadenza run {REHEARSE} -- python train.py"
    if steps < 2:  # noqa: PLR2004
        return f"{STEPS} takes a number from 2 on: one step before the move, and one after it"
    if Path(command[0]).name in SLURM_STARTERS:
        return f"{command[0]} starts processes on other hosts: rehearse with what it starts, or with torchrun"
    return "" if shutil.which(command[0]) else f"{command[0]}: there is no such command"
