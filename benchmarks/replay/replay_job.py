#!/usr/bin/env python3
"""One job of the replay, a process on each of its nodes: a training loop that sleeps.

It attaches, takes turns and moves as a real job does, and goes on after a requeue where it stopped: its progress is a
file. The first process puts on record, one JSON object a line, when the job runs and waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cadenza.sidecar import client

HERE = Path(__file__).resolve().parent
RANK = int(os.environ.get("SLURM_PROCID", "0"))


class Record:
    """The job's record of itself; processes other than the first keep none."""

    def __init__(self, name: str) -> None:
        self._path = HERE / "events" / f"{name}.jsonl"

    def write(self, what: str) -> None:
        """Put a line on record."""
        if RANK == 0:
            with self._path.open("a") as record:
                record.write(json.dumps({"at": time.time(), "what": what}) + "\n")


def train(options: argparse.Namespace, session: Any) -> None:
    """Run the iterations that are left."""
    progress = HERE / "progress" / f"{options.name}.{RANK}"
    with progress.open("r+" if progress.exists() else "w+") as file:
        done = int(file.read() or 0)
        if done:
            session.restored(HERE / "progress", done)
        for step in range(done, options.iterations):
            time.sleep(options.iteration_s)
            os.pwrite(file.fileno(), b"%d" % (step + 1), 0)
            session.boundary(1)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--iteration-s", type=float, required=True)
    return parser.parse_args()


def main() -> None:
    """Attach, train, and put on record how it ended."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    record = Record(options.name)
    record.write("up")
    session = client.attach()

    def saved() -> str:
        record.write("saved")
        return str(HERE / "progress")

    session.call(on_yield=lambda: record.write("waits"), on_resume=lambda: record.write("runs"))
    session.add_saver(saved, away=True)  # as client.checkpoint() does: its progress is on the disk at all times
    record.write("runs")
    what = "stopped"
    try:
        train(options, session)
        what = "ended"
    finally:
        record.write(what)
    with contextlib.suppress(Exception):
        client.detach()


if __name__ == "__main__":
    main()
