#!/usr/bin/env python3
"""Three training jobs that take turns on one GPU, against the same jobs one after the other; at most 1 % may be lost.

A real agent rotates the lease by itself, in slices of 60 s (Gandiva, OSDI'18, §4.1, loses less than 2 % that way).
First and last each job trains alone, without an agent. A job's iterations in turns are worth as many seconds as they
took alone; what is missing to the seconds that passed is lost. Without a GPU the jobs train on the CPU, one thread
each: that is not the GPU's figure, and says so. Needs root, as only root registers jobs with an agent. Exit status 1
when the limit is missed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

from registered_job import registered

from cadenza.sidecar import wire

LIMIT = 0.01
SLICE_S = 60.0
"""An agent's own, without a service that says otherwise."""
KINDS = ("ResNet-18, SGD momentum", "transformer, AdamW, AMP", "gradient accumulation")
WARM = 20
"""Iterations before the first that counts: kernels are chosen, and memory is taken."""
PATIENCE_S = 600.0
POLL_S = 0.02


class Job:
    """One training process; ``done`` counts its iterations, read from a file that both have mapped."""

    def __init__(self, folder: Path, kind: str, number: int, agent: Path | None) -> None:
        path = folder / f"{number}.{time.monotonic_ns()}"
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._count = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
        command = [sys.executable, __file__, "--train", kind, "--count", str(path)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CADENZA_"))}
        if agent is not None:
            environment |= {"SLURM_JOB_ID": str(number), wire.SOCKET_ENV: str(agent)}
            command = registered(agent, number, [0], *command)
        self.process = subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"})

    @property
    def done(self) -> int:
        """Return the iterations so far."""
        if self.process.poll() is not None:
            raise RuntimeError(f"a training job has ended with {self.process.returncode}")
        return int(self._count[0])

    def warm(self) -> bool:
        """Return whether the first iterations are over."""
        return self.done >= WARM

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def train(kind: str, count: Path) -> None:
    """Train for ever, and count; the job's end is the parent's matter."""
    import torch  # noqa: PLC0415 - the parent needs none
    from offload_jobs import JOBS, Place  # noqa: PLC0415

    from cadenza.sidecar import client  # noqa: PLC0415

    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    job = JOBS[kind](Place(torch.device("cuda" if cuda else "cpu"), 1.0 if cuda else 0.25))
    client.attach(*[thing for _, thing in job.sources])  # type: ignore[arg-type]
    with count.open("r+b") as file:
        done = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    while True:
        job.step()
        if cuda:
            torch.cuda.synchronize()  # or the count runs ahead of the GPU
        done[0] += 1
        client.boundary()


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until a condition holds; raise TimeoutError when it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(POLL_S)


@contextmanager
def running(folder: Path, numbers: Sequence[int], agent: Path | None = None) -> Iterator[list[Job]]:
    """Run jobs, and end them."""
    jobs = [Job(folder, KINDS[number - 1], number, agent) for number in numbers]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.stop()


@contextmanager
def agent(folder: Path) -> Iterator[Path]:
    """Run an agent without a service, with the three jobs on GPU 0 registered as by SPANK; yield its socket."""
    place = folder / "agent.sock"
    settings = {"expert.socket": str(place), "expert.state_dir": str(folder / "state"), "agent.keys": str(folder)}
    lines = ['expert.host = "bench"', *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    (folder / "cadenza.toml").write_text("\n".join([*lines, ""]))
    command = [sys.executable, "-m", "cadenza.sidecar.agent", "--config", str(folder / "cadenza.toml")]
    with (folder / "agent.log").open("ab") as log, ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stderr=log))
        stack.callback(process.terminate)
        until(lambda: answers(place), "an answer of the agent")
        for number in range(1, len(KINDS) + 1):
            stack.enter_context(register(place, number))
        yield place


def answers(place: Path) -> bool:
    """Return whether a process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(str(place)) == 0


def register(place: Path, number: int) -> socket.socket:
    """Register a job that may share GPU 0."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(str(place))
    who = {"uid": os.getuid(), "user": "bench", "node": "bench", "managed": True, "step": 0}
    end.send(wire.encode("start", job=number, restart=0, gpus=[0], hosts=1, lane=0, **who))
    end.recv(wire.MAX_PACKET)
    return end


def alone(folder: Path, seconds: float) -> list[float]:
    """Return each job's iterations a second, one after the other."""
    return [_alone(folder, number, seconds) for number in range(1, len(KINDS) + 1)]


def _alone(folder: Path, number: int, seconds: float) -> float:
    with running(folder, [number]) as (job,):
        until(job.warm, f"{KINDS[number - 1]}: the first iterations")
        return measured([job], seconds)[0]


def together(folder: Path, turns: int) -> list[float]:
    """Return each job's iterations a second of all the time, over as many turns of each."""
    with agent(folder) as place, running(folder, range(1, len(KINDS) + 1), place) as jobs:
        until(lambda: all(job.warm() for job in jobs), "a first turn of each job")
        return measured(jobs, turns * SLICE_S * len(jobs))


def measured(jobs: Sequence[Job], seconds: float) -> list[float]:
    """Return the jobs' iterations a second over some seconds."""
    first, began = [job.done for job in jobs], time.monotonic()
    time.sleep(seconds)
    last, ended = [job.done for job in jobs], time.monotonic()
    return [(after - before) / (ended - began) for before, after in zip(first, last, strict=True)]


def main() -> int:
    """Print the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="turns of each job (default %(default)s)")
    parser.add_argument("--alone-s", type=float, default=30.0, help="seconds of each run alone, of which there are two")
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.count)
    if os.geteuid():
        print("not run: needs root, as only root registers jobs with an agent")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = alone(folder, options.alone_s)
        turns = together(folder, options.turns)
        after = alone(folder, options.alone_s)
    return report(before, turns, after)


def report(before: Sequence[float], turns: Sequence[float], after: Sequence[float]) -> int:
    """Print what was measured; return the exit status."""
    import torch  # noqa: PLC0415 - late, so that its start-up does not overlap a measurement

    cuda = torch.cuda.is_available()
    rates = [fmean(pair) for pair in zip(before, after, strict=True)]
    for kind, rate, share in zip(KINDS, rates, turns, strict=True):
        print(f"{kind:28} alone {rate:8.2f} iterations/s, in turns {share:8.2f} ({share / rate:.1%} of alone)")
    lost = 1 - sum(share / rate for share, rate in zip(turns, rates, strict=True))
    drift = max(abs(second / first - 1) for first, second in zip(before, after, strict=True))
    print(f"lost {lost:.2%} of the throughput, limit {LIMIT:.0%}: {'met' if lost <= LIMIT else 'MISSED'}")
    print(f"a job alone, the second time against the first: {drift:.1%} apart at most")
    print(torch.cuda.get_device_name() if cuda else "on the CPU, which is not a GPU's figure; on a GPU: not run")
    print(json.dumps({"lost": lost, "limit": LIMIT, "drift": drift, "alone": rates, "turns": list(turns), "gpu": cuda}))
    return int(lost > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
