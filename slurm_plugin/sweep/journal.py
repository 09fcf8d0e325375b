"""The journal of a sweep: records appended to ``journal.jsonl``, and the state that follows from them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cadenza.policies.core.errors import InputError
from cadenza.policies.sweep.learning_curve import Goal, Trial
from cadenza.slurm_plugin.errors import BusyError
from cadenza.slurm_plugin.sweep.configs import Config

State: TypeAlias = Literal["new", "submitting", "live", "done", "stopped", "failed", "cancelled", "gone"]
ENDED = frozenset({"done", "stopped", "failed", "cancelled", "gone"})
Record: TypeAlias = dict[str, Any]


@dataclass
class TrialState:
    """One configuration with its job, its reported values and its end."""

    number: int
    config: Config
    key: int | None = None
    """The caller's own number, such as that of an Optuna trial."""
    state: State = "new"
    job: int | None = None
    slurm: str = ""
    """Last state of the job in Slurm's words, or "cancelling"."""
    stop_reason: str | None = None
    """Reason of a requested stop, or of a failed submission."""
    points: dict[int, float] = field(default_factory=dict)
    behind: bool = False
    """True while better configurations have priority on its GPU."""

    @property
    def ended(self) -> bool:
        """Return True if its job is over or will never be submitted."""
        return self.state in ENDED

    @property
    def values(self) -> list[tuple[int, float]]:
        """Return the reported (step, value) pairs by ascending step."""
        return sorted(self.points.items())

    def best(self, goal: Goal) -> float | None:
        """Return the best finite value reported so far, or None."""
        finite = [value for value in self.points.values() if isfinite(value)]
        return (max if goal == "max" else min)(finite, default=None)

    def curve(self) -> Trial:
        """Return the trial in the form that rules take."""
        return Trial(self.number, tuple(self.values), not self.ended and not self.stop_reason, self.config)


@dataclass
class SweepState:
    """All trials by number, and the target's first hit."""

    trials: dict[int, TrialState] = field(default_factory=dict)
    target: Record | None = None
    """First report that reached the target: trial, step, value, time_s."""
    closed: bool = False
    """True once the user has stopped the sweep."""

    def apply(self, record: Record) -> None:
        """Update the state with one record."""
        kind = record["kind"]
        if kind == "asked":
            self.trials[record["trial"]] = TrialState(record["trial"], record["config"], record["key"])
        elif kind == "target":
            self.target = record
        elif kind == "closed":
            self.closed = True
        elif kind == "stop":
            self.trials[record["trial"]].stop_reason = record["reason"]
        else:  # the job's next state: ``new`` (again), ``submitting``, ``live``, or its end
            trial = self.trials[record["trial"]]
            trial.state = kind
            trial.job = record.get("job", trial.job)
            trial.stop_reason = record.get("reason", trial.stop_reason)


class Journal:
    """The records of one sweep in a file; one process at a time may append."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal.jsonl"
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise BusyError(f"{directory}: another process controls this sweep") from None
        whole = self.path.read_bytes()
        os.ftruncate(self._file, whole.rfind(b"\n") + 1)  # drop a record that a killed process did not finish

    def append(self, record: Record) -> None:
        """Append one record; it is on the disk when this returns."""
        os.write(self._file, json.dumps(record).encode() + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        """Let another process append."""
        os.close(self._file)


def write_journal(directory: Path, records: Iterable[Record]) -> None:
    """Begin a journal, replacing one of a sweep that was never completed."""
    (directory / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def read_state(directory: Path) -> SweepState:
    """Return the state that the journal describes; raise InputError without a journal, or for a foreign line."""
    path = directory / "journal.jsonl"
    state = SweepState()
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): is this the directory of a sweep?") from None
    for number, line in enumerate(lines, 1):
        try:
            state.apply(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not a sweep's record: {error!r}") from None
    return state


class Reports:
    """Results that jobs append to their files; each read continues where the last one ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "reports"
        self._offsets: dict[int, int] = {}

    def path(self, number: int) -> Path:
        """Return the file of one trial's job."""
        return self.directory / f"{number}.jsonl"

    def read(self, trials: Iterable[TrialState]) -> list[tuple[TrialState, Record]]:
        """Add new reports to the trials and return them; other lines are skipped."""
        reports = [(trial, report) for trial in trials for report in self._new(trial.number)]
        for trial, report in reports:
            trial.points[report["step"]] = report["value"]
        return reports

    def _new(self, number: int) -> list[Record]:
        begin = self._offsets.get(number, 0)
        try:
            with self.path(number).open("rb") as file:
                file.seek(begin)
                new = file.read()
        except OSError:
            return []
        end = new.rfind(b"\n") + 1
        self._offsets[number] = begin + end
        return [report for line in new[:end].splitlines() if (report := _report(line)) is not None]


def _report(line: bytes) -> Record | None:
    """Return a line as a report, or None; jobs write these lines, so they may hold anything."""
    try:
        report = json.loads(line)
        return {"step": int(report["step"]), "value": float(report["value"]), "time_s": float(report["time_s"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
