"""A job that attaches and only sleeps: it starts in a moment and takes the same time however busy the machine is.

It stands in for a training script where a test is about who runs when. Its checkpoint is its step, in a file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from pathlib import Path

from cadenza.sidecar import client


class Claim:
    """Locks on a file for each GPU of this job while it uses them: a second user of a GPU ends with an error."""

    def __init__(self, folder: Path | None) -> None:
        self.paths = [folder / gpu for gpu in os.environ.get("SLURM_JOB_GPUS", "").split(",")] if folder else []
        self.files: list[int] = []

    def take(self) -> None:
        for path in self.paths:
            path.parent.mkdir(mode=0o1777, exist_ok=True)
            self.files.append(os.open(path, os.O_RDONLY | os.O_CREAT, 0o644))
            try:
                fcntl.flock(self.files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(f"{path}: the GPU is in use by another process")

    def release(self) -> None:
        while self.files:
            os.close(self.files.pop())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--iteration-s", type=float, default=0.02)
    parser.add_argument("--until", type=Path, help="end as soon as this file is there")
    parser.add_argument("--claim-dir", type=Path, help="lock a file in here for each GPU while using it")
    parser.add_argument("--checkpoint", type=Path, help="file for the step")
    options = parser.parse_args()
    os.umask(0)  # the directory of the locks is for all users
    gpus, step = Claim(options.claim_dir), 0
    if options.checkpoint and options.checkpoint.exists():
        step = int(options.checkpoint.read_text())

    def save() -> str:
        options.checkpoint.write_text(str(step))
        return str(options.checkpoint)

    session = client.attach()
    session.call(on_yield=gpus.release, on_resume=gpus.take, on_checkpoint=save if options.checkpoint else None)
    if step:
        session.restored(options.checkpoint, step)
    gpus.take()
    while step < options.iterations and not (options.until and options.until.exists()):
        time.sleep(options.iteration_s)
        step += 1
        client.boundary()
    print(json.dumps({"restart": int(os.environ.get("SLURM_RESTART_COUNT", "0"))}))


if __name__ == "__main__":
    main()
