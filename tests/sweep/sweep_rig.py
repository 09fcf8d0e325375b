"""Slurm's commands as a sweep sees them, in memory: jobs run at once, and report when a test says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cadenza.slurm_plugin.errors import SlurmUnavailable, SubmitError
from cadenza.slurm_plugin.sweep.slurm_commands import Queued, Slurm, Written


@dataclass
class FakeSlurm:
    """The user's side of Slurm; it outlives the sweeps that use it."""

    jobs: dict[int, Queued] = field(default_factory=dict)
    submitted: list[tuple[list[str], Mapping[str, str]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    away: bool = False
    refuse: str = ""
    before_write: Callable[[], None] | None = None
    """Called after a sweep has read comments and before it writes them."""

    def submit(self, words: Sequence[str], name: str, comment: str, env: Mapping[str, str], folder: Path) -> int:
        self._answer()
        if self.refuse and self.refuse in words:
            raise SubmitError("no such partition")
        job = 100 + len(self.jobs)
        self.jobs[job] = Queued(job, name, "RUNNING", comment)
        self.submitted.append((list(words), env))
        return job

    def queue(self, prefix: str) -> list[Queued]:
        self._answer()
        return [job for job in self.jobs.values() if job.name.startswith(prefix)]

    def final_states(self, jobs: Sequence[int]) -> dict[int, str]:
        return dict.fromkeys(jobs, "COMPLETED")

    failure = Slurm().failure

    def cancel(self, jobs: Iterable[int]) -> None:
        self._answer()
        for job in jobs:
            self.cancelled.append(job)
            self.end(job, "CANCELLED")

    def set_comment(self, seen: Mapping[int, str], comment: str) -> Written:
        self._answer()
        if self.before_write is not None:
            self.before_write()
        lost = frozenset(job for job, text in seen.items() if self.jobs[job].comment != text)
        for job in seen.keys() - lost:
            self.jobs[job] = replace(self.jobs[job], comment=comment)
        return Written(frozenset(seen) - lost, lost)

    def end(self, job: int, state: str = "COMPLETED") -> None:
        self.jobs[job] = replace(self.jobs[job], state=state)

    def priority(self, job: int) -> int:
        return int(json.loads(self.jobs[job].comment)["cadenza"].get("priority", 0))

    def report(self, number: int, *points: tuple[int, float]) -> None:
        """Have the job of a trial report."""
        path = Path(self.submitted[number][1]["CADENZA_SWEEP_REPORT"])
        with path.open("a") as file:
            for step, value in points:
                file.write(json.dumps({"step": step, "value": value, "time_s": 1.0}) + "\n")

    def _answer(self) -> None:
        if self.away:
            raise SlurmUnavailable("squeue: slurmctld does not answer")
