"""The demo's lists of jobs: one row a job, read from CSV and checked."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class WorkloadError(Exception):
    """A list is wrong; its author must correct the named line."""


@dataclass(frozen=True)
class Job:
    """One training job; ``submit_s`` counts from the start of the list, ``iteration_s`` is its pace."""

    job: str
    user: str
    submit_s: float
    gpus: int
    ranks: int
    model: str
    iterations: int
    iteration_s: float
    seed: int

    @property
    def work_s(self) -> float:
        """Seconds that its steps take when nothing gets in between."""
        return self.iterations * self.iteration_s


KINDS = {"submit_s": float, "iteration_s": float, "gpus": int, "ranks": int, "iterations": int, "seed": int}


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Return the jobs of a list in order of submission; raise WorkloadError naming file and line."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = set(Job.__dataclass_fields__) - set(reader.fieldnames or ())
        if missing:
            raise WorkloadError(f"{path}:1: column {min(missing)} is missing")
        jobs = [_job(row, f"{path}:{reader.line_num}") for row in reader]
    if len({job.job for job in jobs}) < len(jobs):
        raise WorkloadError(f"{path}: two jobs have the same name")
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


def _job(row: dict[str, str], where: str) -> Job:
    try:
        values = {name: KINDS.get(name, str)(row[name]) for name in Job.__dataclass_fields__}
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"{where}: {error}") from None
    job = Job(**values)
    if job.gpus < 1 or not 1 <= job.ranks <= job.gpus or job.iterations < 1:
        raise WorkloadError(f"{where}: {job.job} needs at least one GPU, rank and iteration, and a GPU for each rank")
    return job
