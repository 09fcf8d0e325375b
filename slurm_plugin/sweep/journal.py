"""What a sweep has done so far: records appended to ``journal.jsonl``, and the trials that follow from them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cadenza.policies.sweep.learning_curve import Goal, Trial
from cadenza.slurm_plugin.sweep.configs import Config
from cadenza.slurm_plugin.sweep.errors import BusyError, InputError

State: TypeAlias = Literal["new", "submitting", "live", "done", "stopped", "failed", "cancelled", "gone"]
ENDED = frozenset({"done", "stopped", "failed", "cancelled", "gone"})
Record: TypeAlias = dict[str, Any]


@dataclass
class TrialState:
    """One configuration: what it is, its job, what it reported, and how it ended."""

    number: int
    config: Config
    key: int | None = None
    """The caller's own number for it, such as that of an Optuna trial."""
    state: State = "new"
    job: int | None = None
    slurm: str = ""
    """Slurm's word for the job's state, as it was last seen."""
    why: str = ""
    """Why it is to be stopped, or was; "" while nobody wants that."""
    points: dict[int, float] = field(default_factory=dict)
    behind: bool = False
    """Whether others have its GPU before it."""

    @property
    def ended(self) -> bool:
        """Whether its job is over, or never came to be."""
        return self.state in ENDED

    @property
    def values(self) -> list[tuple[int, float]]:
        """Return what it reported, (step, value), steps ascending."""
        return sorted(self.points.items())

    def best(self, goal: Goal) -> float | None:
        """Return the best value that it reported; None before the first that is finite."""
        finite = [value for value in self.points.values() if isfinite(value)]
        return (max if goal == "max" else min)(finite, default=None)

    def curve(self) -> Trial:
        """Return the trial as rules see it."""
        return Trial(self.number, tuple(self.values), not self.ended and not self.why, self.config)


@dataclass
class Book:
    """All trials, by number, and what the sweep found."""

    trials: dict[int, TrialState] = field(default_factory=dict)
    target: Record | None = None
    """Who reached the target: trial, step, value, time_s."""
    closed: bool = False
    """The user ended the sweep."""

    def apply(self, record: Record) -> None:
        """Bring the book up to date with one record."""
        kind = record["kind"]
        if kind == "asked":
            self.trials[record["trial"]] = TrialState(record["trial"], record["config"], record["key"])
        elif kind == "target":
            self.target = record
        elif kind == "closed":
            self.closed = True
        elif kind == "stop":
            self.trials[record["trial"]].why = record["why"]
        else:
            _step(self.trials[record["trial"]], record)


def _step(trial: TrialState, record: Record) -> None:
    """Take one step of a job's life: ``new`` (again), ``submitting``, ``live``, or how it ended."""
    trial.state = record["kind"]
    trial.job = record.get("job", trial.job)
    trial.why = record.get("why", trial.why)


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
        os.ftruncate(self._file, whole.rfind(b"\n") + 1)  # a record that a killed process did not finish

    def append(self, record: Record) -> None:
        """Write one record as a whole, on the disk when this returns."""
        os.write(self._file, json.dumps(record).encode() + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        """Let another process append."""
        os.close(self._file)


def write_journal(directory: Path, records: Iterable[Record]) -> None:
    """Begin a journal; what a sweep that never came to be has left there goes."""
    (directory / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def read_book(directory: Path) -> Book:
    """Return what the journal says; raise InputError when the directory has none, or a line that is not ours."""
    path = directory / "journal.jsonl"
    book = Book()
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): not the directory of a sweep?") from None
    for number, line in enumerate(lines, 1):
        try:
            book.apply(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}:{number}: not a sweep's record: {error!r}") from None
    return book


class Reports:
    """What jobs append to their files, read on from where the last look ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "reports"
        self._read: dict[int, int] = {}

    def path(self, number: int) -> Path:
        """Return the file that one trial's job writes."""
        return self.directory / f"{number}.jsonl"

    def look(self, trials: Iterable[TrialState]) -> list[tuple[TrialState, Record]]:
        """Add what is new to the trials and return it; a line that is no report is passed over."""
        found = [(trial, report) for trial in trials for report in self._new(trial.number)]
        for trial, report in found:
            trial.points[report["step"]] = report["value"]
        return found

    def _new(self, number: int) -> list[Record]:
        begin = self._read.get(number, 0)
        try:
            with self.path(number).open("rb") as file:
                file.seek(begin)
                new = file.read()
        except OSError:
            return []
        end = new.rfind(b"\n") + 1
        self._read[number] = begin + end
        return [report for line in new[:end].splitlines() if (report := _report(line)) is not None]


def _report(line: bytes) -> Record | None:
    """Return a line as a report; jobs write it, so it may be anything."""
    try:
        report = json.loads(line)
        return {"step": int(report["step"]), "value": float(report["value"]), "time_s": float(report["time_s"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
