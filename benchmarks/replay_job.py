#!/usr/bin/env python3
"""One job of the replay, in its batch script: a training loop that sleeps for as long as its profile says.

An iteration takes ``iteration_s / (speed with the CPUs that it has now)``, times the jobs that run on its GPUs at once.
It attaches, takes turns and is tuned as a real job is, and goes on after a requeue where it stopped: its progress is a
file. What it holds and when is in a file of its own, one JSON object a line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

from cadenza.sidecar import client

HERE = Path(__file__).resolve().parent
NEARLY = 1e-6
SIGNS = Path("/dev/shm/replay")  # noqa: S108 (of the node, and gone with it)


class Speed:
    """A profile along its CPUs."""

    def __init__(self, text: str, model: str) -> None:
        found = next(one for one in json.loads(text)["profiles"] if one["model"] == model)
        self.cpus: list[float] = found["cpus_per_gpu"]
        self.speed: list[float] = [row[0] for row in found["throughput"]]

    def at(self, cpus_per_gpu: float) -> float:
        """Return the speed relative to the proportional share, as the policies read it off a profile."""
        row = bisect_right(self.cpus, cpus_per_gpu + NEARLY) - 1
        return self.speed[row] if row >= 0 else self.speed[0] * cpus_per_gpu / self.cpus[0]


class Holding:
    """The GPUs that this job uses at this moment, for the record and for the jobs that are packed with it."""

    def __init__(self, name: str) -> None:
        text = os.environ.get("SLURM_JOB_GPUS", "")
        self.gpus = [int(part) for part in text.split(",") if part.isdigit()]
        self._record = HERE / "events" / f"{name}.jsonl"
        self._mine = f"{os.getpid()}"
        SIGNS.mkdir(exist_ok=True)

    def enter(self) -> None:
        """Say that the GPUs are ours from now on."""
        for gpu in self.gpus:
            (SIGNS / f"{gpu}.{self._mine}").touch()
        self.say("runs")

    def leave(self, what: str = "waits") -> None:
        """Say that they are not any more."""
        for gpu in self.gpus:
            (SIGNS / f"{gpu}.{self._mine}").unlink(missing_ok=True)
        self.say(what)

    def sharers(self) -> int:
        """Return how many jobs, this one among them, run on the busiest of its GPUs."""
        signs = [sign.name.split(".") for sign in SIGNS.iterdir()]
        live = [int(gpu) for gpu, pid in signs if pid == self._mine or Path(f"/proc/{pid}").exists()]
        return max((live.count(gpu) for gpu in self.gpus), default=1)

    def say(self, what: str) -> None:
        """Put a line on record."""
        job = int(os.environ["SLURM_JOB_ID"])
        line = {"at": time.time(), "what": what, "job": job, "node": socket.gethostname(), "gpus": self.gpus}
        with self._record.open("a") as record:
            record.write(json.dumps(line) + "\n")


def cpus_now(session: Any, node_cpus: int) -> float:
    """Return the CPUs, as Slurm counts them, that the job has now: what it was tuned to, else its allocation.

    The agent tells parts of the machine's own CPUs, of which a node of the replay claims many more.
    """
    tuning = session.tuning()
    if tuning is None:
        return float(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    return max(1.0, round(tuning.cpus * node_cpus / (os.cpu_count() or 1)))


def train(options: argparse.Namespace, holding: Holding, session: Any) -> None:
    """Run the iterations that are left."""
    speed = Speed((HERE / "profiles.json").read_text(), options.model)
    gpus = max(len(holding.gpus), 1)
    progress = HERE / "progress" / options.name
    with progress.open("r+" if progress.exists() else "w+") as file:
        for step in range(int(file.read() or 0), options.iterations):
            alone_s = options.iteration_s / speed.at(cpus_now(session, options.node_cpus) / gpus)
            time.sleep(alone_s * holding.sharers())
            os.pwrite(file.fileno(), b"%d" % (step + 1), 0)
            session.boundary(1)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--iteration-s", type=float, required=True)
    parser.add_argument("--node-cpus", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    """Attach, train, and say how it ended."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    holding = Holding(options.name)
    holding.say("up")
    session = client.attach()

    def saved() -> str:
        holding.say("saved")
        return str(HERE / "progress" / options.name)

    session.call(on_yield=holding.leave, on_resume=holding.enter, on_checkpoint=saved)
    holding.enter()
    what = "stopped"
    try:
        train(options, holding, session)
        what = "ended"
    finally:
        holding.leave(what)
    with contextlib.suppress(Exception):
        client.detach()


if __name__ == "__main__":
    main()
