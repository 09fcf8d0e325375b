"""Simulations of a what-if as one array of Slurm: a task each, in a folder that the array's nodes share.

The folder has ``task-N.json.gz`` and ``result-N.json.gz`` of each simulation, and the number of the last array. The
same command again submits the tasks without a result, or with all of them goes on to the verdict. A task is run by
``python -m cadenza.slurm_plugin.simulations.array FOLDER N``.
"""

from __future__ import annotations

import gzip
import shlex
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.errors import SlurmUnavailable, SubmitError
from cadenza.slurm_plugin.gateway.slurm_gateway import answer_of
from cadenza.slurm_plugin.simulations.run_pool import Outcome, Task, run_task
from cadenza.slurm_plugin.sweep.slurm_commands import Slurm

T = TypeVar("T")
MEMORY = "2G"
"""Memory of a task: a simulation of 20,000 jobs has 100 MB."""
TIMEOUT_S = 60.0


class Submitted(Exception):  # noqa: N818 (no error: the message says what Slurm runs now)
    """Not all results are there yet."""


def collect(folder: Path, tasks: Sequence[Task]) -> list[Outcome]:
    """Return the outcomes of all tasks; raise Submitted while some are missing, which are then in Slurm's queue."""
    # 1. What is to be run; a folder belongs to one what-if.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, task in enumerate(tasks):
            file, data = folder / f"task-{number}.json.gz", _packed(task)
            if not file.exists():
                _write(file, data)
            elif file.read_bytes() != data:
                raise InputError(f"--array: {str(folder)!r} has another what-if; name another folder")
        missing = [number for number in range(len(tasks)) if not _result(folder, number).exists()]
        # 2. With all results there is nothing to submit.
        if not missing:
            return [_decoded(_result(folder, number), Outcome) for number in range(len(tasks))]
        over = f"{len(tasks) - len(missing)} of {len(tasks)} simulations are over"
        if (job := _submitted(folder)) is not None:
            raise Submitted(f"{over}; job {job} runs the others, and then the same command shows the verdict")
        again = (
            f"; {folder}/log-{missing[0]}.txt says why it came to nothing before" if (folder / "job").exists() else ""
        )
        job = _submit(folder, missing)
    except OSError as error:
        raise InputError(f"--array: {str(folder)!r}: {error.strerror}") from None
    raise Submitted(f"{over}; job {job} runs {len(missing)}{again}; once it is over the same command shows the verdict")


def run_one(folder: Path, number: int) -> None:
    """Run one task, and write its result."""
    task = _decoded(folder / f"task-{number}.json.gz", Task)
    _write(_result(folder, number), _packed(run_task(task)))


def _result(folder: Path, number: int) -> Path:
    return folder / f"result-{number}.json.gz"


def _packed(value: object) -> bytes:
    """Return the same bytes for the same value in each process."""
    return gzip.compress(msgspec.json.encode(value, order="deterministic"), 6, mtime=0)


def _decoded(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(gzip.decompress(file.read_bytes()), type=kind)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise InputError(f"{file}: {error}") from None


def _write(file: Path, data: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(data)
    new.replace(file)


def _submitted(folder: Path) -> int | None:
    """Return the last array if tasks of it wait or run."""
    file = folder / "job"
    if not file.exists():
        return None
    try:
        job = int(file.read_text())
    except ValueError:
        raise InputError(f"{file}: it is not the number of a job") from None
    try:
        left = answer_of(("squeue", "--noheader", f"--jobs={job}", "--format=%i"), TIMEOUT_S)
    except SlurmUnavailable:  # Slurm has forgotten it
        return None
    return job if left.strip() else None


def _submit(folder: Path, missing: Sequence[int]) -> int:
    """Submit the tasks."""
    command = shlex.join((sys.executable, "-m", __spec__.name, str(folder.resolve())))
    script = folder / "task.sh"
    # SBATCH_PARTITION, SBATCH_MEM_PER_NODE and the like of the user go before the script's own lines (sbatch(1)).
    asks = f"#SBATCH --ntasks=1 --cpus-per-task=1 --mem={MEMORY}"
    script.write_text(f'#!/bin/sh\n{asks}\nexec {command} "$SLURM_ARRAY_TASK_ID"\n')
    numbers = ",".join(map(str, missing))
    words = (f"--array={numbers}", f"--output={folder.resolve()}/log-%a.txt", str(script.resolve()))
    try:
        job = Slurm().submit(words, "cadenza-whatif", "", {}, folder)
    except SubmitError as error:
        raise InputError(f"--array: sbatch: {error}") from None
    _write(folder / "job", str(job).encode())
    return job


if __name__ == "__main__":
    run_one(Path(sys.argv[1]), int(sys.argv[2]))
