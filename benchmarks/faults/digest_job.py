#!/usr/bin/env python3
"""One job of the fault runs: a deterministic loop with a digest, which a requeue or a killed process costs little.

Its state is a chain of hashes, so that a lost, repeated or skipped step changes the digest. While it uses its GPUs it
has a shared lock on a file of the host for each: it never refuses a second user, it lets the host see one. The ranks of
a job of two hosts go in step, and end when one of them is dead, as those of a data-parallel training do: Slurm ends the
others only if slurmctld knows the step, and a slurmctld that was killed as the step began does not.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path

GPUS = Path("/dev/shm/gpus")  # noqa: S108 (of the host, as its GPUs are)
SAVE_EVERY = 100
"""Iterations between two checkpoints that no order asked for."""
POLL_S = 0.005
STALLED = "stalled"
"""File in the folder of all jobs: while it is there, no checkpoint is done, as on a file server that hangs."""


def digest_after(name: str, iterations: int) -> str:
    """Return the digest of a job that nothing disturbs."""
    state = hashlib.sha256(name.encode()).hexdigest()
    for step in range(iterations):
        state = next_state(state, step)
    return state


def next_state(state: str, step: int) -> str:
    """Return the state after one more iteration."""
    return hashlib.sha256(f"{state}:{step}".encode()).hexdigest()


class Gpus:
    """Shared locks on the files of this rank's GPUs while it uses them."""

    def __init__(self) -> None:
        text = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
        self.paths = [GPUS / index for index in text.split(",") if index]
        self.files: list[int] = []

    def take(self) -> None:
        """Lock them; the folder and the files are for all users."""
        for path in self.paths:
            path.parent.mkdir(mode=0o1777, exist_ok=True)
            self.files.append(os.open(path, os.O_RDONLY | os.O_CREAT, 0o644))
            fcntl.flock(self.files[-1], fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlock them."""
        while self.files:
            os.close(self.files.pop())


class Ranks:
    """Steps of all ranks of this attempt, in one file that they share; each has a lock on its own while it lives."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ.get("SLURM_PROCID", "0"))
        self.size = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
        self._file = None
        if self.size > 1:
            path = folder / f"steps-{os.environ['SLURM_JOB_ID']}-{os.environ['ATTEMPT']}"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(self._file, fcntl.LOCK_EX, 8, 8 * self.rank)

    def reach(self, step: int) -> None:
        """Say that this rank begins ``step`` (from 1 on), and wait until all ranks do; raise SystemExit without one."""
        if self._file is None:
            return
        os.pwrite(self._file, step.to_bytes(8, "little"), 8 * self.rank)
        while True:
            gone = [rank for rank in range(self.size) if rank != self.rank and not self._lives(self._file, rank)]
            content = os.pread(self._file, 8 * self.size, 0).ljust(8 * self.size, b"\0")
            steps = [int.from_bytes(content[8 * rank : 8 * rank + 8], "little") for rank in range(self.size)]
            if min(steps) >= step:
                return
            if any(steps[rank] for rank in gone):  # one that has not begun yet has no step either
                raise SystemExit(f"rank {gone[0]} is dead")
            time.sleep(POLL_S)

    @staticmethod
    def _lives(file: int, rank: int) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, 8 * rank)
        except BlockingIOError:
            return True
        fcntl.lockf(file, fcntl.LOCK_UN, 8, 8 * rank)
        return False


class Checkpoint:
    """The step and the state after it, replaced as one; written by the first rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, name: str) -> tuple[int, str]:
        """Return the step and the state to go on from."""
        if self.path.exists():
            step, state = json.loads(self.path.read_text())
            return int(step), str(state)
        return 0, digest_after(name, 0)

    def save(self, step: int, state: str) -> str:
        """Write both; return the path."""
        replace(self.path, json.dumps([step, state]))
        return str(self.path)


def replace(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.environ.get('SLURM_JOB_ID', '')}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def train(options: argparse.Namespace, ranks: Ranks, gpus: Gpus) -> None:
    """Attach, go on from the checkpoint to the end, and write the result."""
    from cadenza.sidecar import client  # noqa: PLC0415 - the driver of a run imports this module too, for ``digest_after``

    checkpoint = Checkpoint(options.folder / "checkpoints" / options.name)
    step, state = checkpoint.load(options.name)

    def save() -> str:
        while (options.folder / STALLED).exists():
            time.sleep(POLL_S)
        return checkpoint.save(step, state) if ranks.rank == 0 else str(checkpoint.path)

    session = client.attach()
    session.call(on_yield=gpus.release, on_resume=gpus.take, on_checkpoint=save)
    if step:
        session.restored(checkpoint.path, step)
    gpus.take()
    while step < options.iterations:
        ranks.reach(step + 1)
        time.sleep(options.iteration_s)
        step, state = step + 1, next_state(state, step)
        if step % SAVE_EVERY == 0:
            save()
        client.boundary()
    gpus.release()
    if ranks.rank == 0:
        found = {"digest": state, "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")), "ended_s": time.time()}
        replace(options.folder / "results" / options.name, json.dumps(found))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--iteration-s", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints/, results/ and the ranks' steps")
    options = parser.parse_args()
    os.umask(0)
    train(options, Ranks(options.folder), Gpus())


if __name__ == "__main__":
    main()
