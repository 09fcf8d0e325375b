#!/usr/bin/env python3
"""Print how a training job's speed follows its CPUs when they go 1 → 2 → 1 in place; exit code 1 unless within 5 s.

A real agent, the service's end of the link, and a real job whose loader needs the CPUs (tests/agent/tuned_job.py).
For each change: the median time of a step in the second half of the stretch before and of the one after it, and how
long after the order the steps (the median of five) had come three quarters of the way from the one to the other. The
machine needs two CPUs of its own for that: what else runs on them is in the figures. Needs root for control groups.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Facts, JobFacts, Tune
from cadenza.slurm_plugin.service.agents.curve_keys import make_keys
from cadenza.slurm_plugin.service.agents.hub import Hub, HubSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from registered_job import registered

LIMIT_S = 5.0
WAY = 0.75
"""Part of the way to the new speed that counts as having followed."""
SMOOTH = 5
FIELDS = 4
"""Number of words in a line that the job writes: step, its end, loss, workers."""
JOB = 17
HOST = "bench"
SCRIPT = Path(__file__).parents[2] / "tests/agent/tuned_job.py"


class Step(NamedTuple):
    """One training step: when it ended, how long it took, the loader's workers; seconds."""

    at_s: float
    took_s: float
    workers: int


class Change(NamedTuple):
    """One change of CPUs. ``ratio``: step time after over before; ``followed_s`` is None when it never did."""

    cpus: str
    before_ms: float
    after_ms: float
    ratio: float
    followed_s: float | None
    limit_s: float = LIMIT_S


@contextmanager
def service(directory: Path) -> Iterator[Hub]:
    """Listen for the agent with keys of its own."""
    keys = directory / "keys"
    make_keys(keys, (HOST,))
    hub = Hub(HubSettings("tcp://127.0.0.1:*", keys), SystemClock())
    hub.start()
    try:
        yield hub
    finally:
        hub.close()


@contextmanager
def program(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and end it."""
    process: subprocess.Popen[bytes] = subprocess.Popen([sys.executable, *command], **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def agent(directory: Path, address: str) -> list[str]:
    """Write the agent's settings, and return how it is started."""
    tables = {
        "agent": {"keys": directory / "keys", "service": address},
        "expert": {"socket": directory / "agent.sock", "state_dir": directory / "state", "host": HOST},
    }
    lines = [
        f"{table}.{key} = {json.dumps(str(value))}" for table, values in tables.items() for key, value in values.items()
    ]
    (directory / "cadenza.toml").write_text("\n".join(lines))
    return ["-m", "cadenza.sidecar.agent", "--config", str(directory / "cadenza.toml")]


def steps(path: Path) -> list[Step]:
    """Return the steps so far."""
    rows = [line.split() for line in path.read_text().splitlines()]
    ends = [(float(row[1]), int(row[3])) for row in rows if len(row) == FIELDS]  # the last line may be half written
    return [Step(at, at - before, workers) for (before, _), (at, workers) in itertools.pairwise(ends)]


def change(name: str, found: Sequence[Step], began: float, ordered: float, ended: float) -> Change:
    """Return what an order did to the steps between two others."""
    before = [step.took_s for step in found if (began + ordered) / 2 < step.at_s < ordered]
    after = [step for step in found if ordered < step.at_s < ended]
    old = statistics.median(before)
    new = statistics.median(step.took_s for step in after[len(after) // 2 :])
    there = old + WAY * (new - old)
    followed = None
    for index in range(len(after) - SMOOTH):
        now = statistics.median(step.took_s for step in after[index : index + SMOOTH])
        if (now <= there) == (new < old):
            followed = after[index + SMOOTH - 1].at_s - ordered
            break
    return Change(name, old * 1e3, new * 1e3, new / old, followed)


def measure(directory: Path, stretch_s: float, work: int) -> list[Change]:
    """Run the job through its three stretches."""
    out = directory / "steps"
    environment = {**os.environ, "CADENZA_SOCKET": str(directory / "agent.sock"), "SLURM_JOB_ID": str(JOB)}
    with ExitStack() as stack:
        hub = stack.enter_context(service(directory))
        log = stack.enter_context((directory / "agent.log").open("wb"))
        stack.enter_context(program(agent(directory, hub.address), stderr=log))
        _until((directory / "agent.sock").exists)
        job = [sys.executable, str(SCRIPT), "--work", str(work), str(out)]
        command = registered(directory / "agent.sock", JOB, [], *job)[1:]
        stack.enter_context(program(command, stdin=subprocess.PIPE, env=environment))
        _until(lambda: out.exists() and len(steps(out)) > SMOOTH)
        fact = JobFacts(JOB, 0, managed=True, weight=1.0, priority=0, user="", hosts=1, cpus=1.0, memory_mb=1000)
        hub.send([(HOST, Facts(VERSION, (fact,), 60.0, share_between_users=False, enforce=True))])
        times = []
        for cpus in (1, 2, 1):
            times.append(time.monotonic())
            hub.send([(HOST, Tune(VERSION, JOB, 0, cpus))])
            time.sleep(stretch_s)
        found = steps(out)
    times.append(time.monotonic())
    return [change("1 to 2", found, *times[0:3]), change("2 to 1", found, *times[1:4])]


def _until(condition: Callable[[], bool]) -> None:
    """Wait for what takes a moment."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the agent or the job did not start within 60 s")
        time.sleep(0.05)


def main() -> int:
    """Measure, print, and say by the exit code whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stretch", type=float, default=15.0, help="seconds with each number of CPUs")
    parser.add_argument("--work", type=int, default=100_000, help="operations for one item of a batch of four")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        changes = measure(Path(directory), options.stretch, options.work)
    if options.json:
        print(json.dumps([one._asdict() for one in changes]))
    else:
        print(f"{'CPUs':8} {'before':>10} {'after':>10} {'ratio':>7} {'followed':>10} {'limit':>7}")
        for one in changes:
            followed = "never" if one.followed_s is None else f"{one.followed_s:.2f} s"
            times = f"{one.before_ms:7.1f} ms {one.after_ms:7.1f} ms {one.ratio:7.2f}"
            print(f"{one.cpus:8} {times} {followed:>10} {one.limit_s:5.0f} s")
    return 0 if all(one.followed_s is not None and one.followed_s <= one.limit_s for one in changes) else 1


if __name__ == "__main__":
    sys.exit(main())
