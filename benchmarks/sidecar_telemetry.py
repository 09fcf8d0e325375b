#!/usr/bin/env python3
"""Print what telemetry costs a training step, each figure with its limit; exit code 1 unless all are kept.

hot       boundaries in a loop, caches warm
in situ   one boundary after a real training step, caches cold, against an empty call at the same place
whole     stretches of training with and without a boundary, in turns; the extra time with its 95 % interval, whose
          upper end is held against the limit
import    ``import cadenza.sidecar.client`` in a fresh interpreter: time, torch, sockets' module, signal handlers

The page is a memfd like the agent's, and the loader's waiting time is told at each step. With a GPU the steps run
there, end with a wait for it, and ``whole`` is held to the limit in wall time. Without one they run on one core, and
``whole`` is held to it in CPU time: a boundary waits for nothing, so that this is what it would add to the wall time
of a core of its own, and other processes' turns on this machine's cores are not in it. Wall time is printed as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.telemetry.sampler import Sampler, Target
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session.job_session import Session
from cadenza.sidecar.client.session.step_page import MEMORY_EVERY, map_page
from cadenza.sidecar.clock import SystemClock

HOT_LIMIT_US = 1.0
IN_SITU_LIMIT_US = 15.0
WHOLE_LIMIT = 0.003
IMPORT_LIMIT_MS = 30.0
STEP_MS = 5.0
"""A real step takes at least this."""
MARGIN = 1.5
"""Steps are made this much longer: cores whose clock is low while that is tried are faster later."""
LOOP = 1000
ROUNDS = 200
STRETCH = 2
"""Steps of one stretch of the whole-run comparison."""
RESOLUTION = 0.0007
"""The comparison of whole runs ends when half its interval is this narrow, or its time is over."""
LOOK_S = 10.0
"""Time between two looks at the interval."""
NORMAL_95 = 1.96
SEED = 1
PROBE = """
import json, signal, sys
from time import perf_counter
before = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
started = perf_counter()
import cadenza.sidecar.client
spent = perf_counter() - started
after = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
print(json.dumps({"ms": spent * 1e3, "handlers": before != after, "torch": "torch" in sys.modules,
                  "socket": "socket" in sys.modules}))
"""


@dataclass(frozen=True)
class Figure:
    """One measured value; without a limit it is for information."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    note: str = ""
    interval: tuple[float, float] | None = None
    """95 % interval of the value; then all of it has to be within the limit."""

    @property
    def verdict(self) -> str:
        """Return whether the value is within its limit; nothing for one without."""
        if self.limit is None:
            return ""
        low, high = self.interval or (self.value, self.value)
        if high <= self.limit:
            return "kept"
        return "MISSED" if low > self.limit else "NOT RESOLVED: longer, or on a quieter machine"


def empty(samples: int = 0) -> None:
    """Do nothing, at the price of a call."""


def new_session() -> Session:
    """Return a session that counts in a page like an agent's, without an agent."""
    session = Session()
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, wire.PAGE_BYTES)
    session.switch_page(map_page(descriptor))
    return session


class Training:
    """Steps of at least STEP_MS: Adam on two layers.

    Wide layers leave the caches cold; narrow ones with as large a batch as it takes disturb each other's time least.
    """

    def __init__(self, *, wide: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        width, batch = (256, 64) if wide else (128, 64)
        while True:
            self._build(width, batch)
            if self.step_ms() >= MARGIN * STEP_MS:
                return
            width, batch = (int(width * 1.25), batch) if wide else (width, int(batch * 1.25))

    def _build(self, width: int, batch: int) -> None:
        layers = [torch.nn.Linear(512, width), torch.nn.ReLU(), torch.nn.Linear(width, 512)]
        self.model = torch.nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.batch = torch.randn(batch, 512, device=self.device)

    def step(self) -> None:
        """Train one step, and wait for the device."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step_ms(self) -> float:
        """Return the time of the fastest of some steps: what a busy machine adds does not make a step real."""
        spent = []
        for _ in range(40):
            started = monotonic_ns()
            self.step()
            spent.append((monotonic_ns() - started) / 1e6)
        return min(spent)

    def __str__(self) -> str:
        return f"{self.device.type}, fastest step {self.step_ms():.1f} ms"


def hot_us(call: Callable[[], object]) -> float:
    """Return the median time of a call in a loop, microseconds."""
    rounds = []
    for _ in range(ROUNDS):
        started = monotonic_ns()
        for _ in range(LOOP):
            call()
        rounds.append((monotonic_ns() - started) / LOOP / 1e3)
    return statistics.median(rounds)


def in_situ_us(training: Training, calls: Sequence[Callable[[int], object]], steps: int) -> list[float]:
    """Return each call's median time after a training step, microseconds; the calls take turns."""
    spent: list[list[int]] = [[] for _ in calls]
    for step in range(steps * len(calls)):
        training.step()
        started = monotonic_ns()
        calls[step % len(calls)](64)
        spent[step % len(calls)].append(monotonic_ns() - started)
    return [statistics.median(one) / 1e3 for one in spent]


class Spent(NamedTuple):
    """Nanoseconds of one stretch, or shares of extra time of one pair."""

    wall: float
    cpu: float


def stretch_ns(training: Training, session: Session | None) -> Spent:
    """Return the time of one stretch of training, with a boundary and a loader's word each step or without."""
    wall, cpu = monotonic_ns(), time.process_time_ns()
    for _ in range(STRETCH):
        training.step()
        if session is not None:
            session.waited(0.0001)
            session.boundary(64)
    return Spent(monotonic_ns() - wall, time.process_time_ns() - cpu)


def pair(training: Training, session: Session, draw: random.Random) -> Spent:
    """Return the extra time of one of two neighboring stretches, as shares; which goes first is drawn."""
    order = [None, session]
    draw.shuffle(order)
    spent = {one is session: stretch_ns(training, one) for one in order}
    return Spent(*(ours / bare - 1 for ours, bare in zip(spent[True], spent[False], strict=True)))


def pairs(training: Training, session: Session, seconds: float) -> list[Spent]:
    """Return the extra time of as many pairs as RESOLUTION takes and ``seconds`` allow."""
    draw = random.Random(SEED)
    found: list[Spent] = []
    began = looked = monotonic_ns()
    while monotonic_ns() - began < seconds * 1e9:
        found.append(pair(training, session, draw))
        if monotonic_ns() - looked > LOOK_S * 1e9:
            looked = monotonic_ns()
            low, high = interval([held(one, training) for one in found])
            if high - low <= 2 * RESOLUTION:
                break
    return found


def held(extra: Spent, training: Training) -> float:
    """Return what the limit is for: wall time on a GPU, CPU time without one."""
    return extra.wall if training.device.type == "cuda" else extra.cpu


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half: what another process took from one stretch is not in it."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the trimmed mean, by the spread of the winsorized values (Tukey, McLaughlin 1963)."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    low, high = ordered[cut], ordered[-cut - 1]
    error = statistics.stdev(min(max(value, low), high) for value in ordered) / (0.5 * math.sqrt(len(ordered)))
    mean = trimmed_mean(values)
    return mean - NORMAL_95 * error, mean + NORMAL_95 * error


def import_figures(times: int = 9) -> list[Figure]:
    """Measure importing the client in fresh interpreters, and what it brings along."""
    seen = [
        json.loads(subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout)
        for _ in range(times)
    ]
    return [
        Figure("import", statistics.median(one["ms"] for one in seen), "ms", IMPORT_LIMIT_MS),
        Figure("import: signal handlers changed", float(any(one["handlers"] for one in seen)), "", 0),
        Figure("import: torch loaded", float(any(one["torch"] for one in seen)), "", 0),
        Figure("import: socket loaded", float(any(one["socket"] for one in seen)), "", 0),
    ]


def whole(name: str, extra: Sequence[float], training: Training, *, limited: bool) -> Figure:
    """Return the extra time of whole stretches with its interval."""
    low, high = interval(extra)
    note = f"95 % [{low:+.3%}, {high:+.3%}], {len(extra)} pairs of {STRETCH} steps; {training}"
    limit = WHOLE_LIMIT * 100 if limited else None
    return Figure(name, trimmed_mean(extra) * 100, "%", limit, note, (low * 100, high * 100))


def step_figures(seconds: float, steps: int) -> list[Figure]:
    """Measure what a step pays."""
    session = new_session()
    hot, hot_empty = hot_us(session.boundary), hot_us(empty)
    wide, narrow = Training(wide=True), Training(wide=False)
    cold, cold_empty = in_situ_us(wide, [session.boundary, empty], steps)
    extra = pairs(narrow, session, seconds)
    on_gpu = wide.device.type == "cuda"
    return [
        Figure("hot", hot, "µs", HOT_LIMIT_US, f"empty call {hot_empty:.2f} µs"),
        Figure("in situ", cold - cold_empty, "µs", IN_SITU_LIMIT_US,
               f"boundary {cold:.2f}, empty call {cold_empty:.2f} µs; {wide}"),
        whole("whole, wall time", [one.wall for one in extra], narrow, limited=on_gpu),
        whole("whole, CPU time", [one.cpu for one in extra], narrow, limited=not on_gpu),
        Figure("look at the GPU's memory", hot_us(session.sample_memory), "µs",
               note=f"once in {MEMORY_EVERY} steps{'' if torch.cuda.is_available() else '; no GPU here: not run'}"),
    ]  # fmt: skip


def agent_figure() -> Figure:
    """Measure one sample of the agent's, which runs along with the jobs."""
    sampler = Sampler(SystemClock(), tuple)
    target = Target(JobKey(1, 0), (os.getpid(),))
    spent = []
    for _ in range(10):
        started = monotonic_ns()
        sampler.sample([target])
        spent.append((monotonic_ns() - started) / 1e6)
    return Figure("agent: one sample", statistics.median(spent), "ms", note="every telemetry_s, in a thread of its own")


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    for one in figures:
        limit = "" if one.limit is None else f"limit {one.limit:g} {one.unit}".rstrip()
        print(f"{one.name:32} {one.value:9.3f} {one.unit:3} {limit:14} {one.verdict:6} {one.note}".rstrip())


def main() -> int:
    """Measure, print, and say by the exit code whether every limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="most time for the comparison of whole runs")
    parser.add_argument("--steps", type=int, default=300, help="steps of each arm in situ")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = [*step_figures(options.seconds, options.steps), *import_figures(), agent_figure()]
    if options.json:
        print(json.dumps([{**asdict(one), "verdict": one.verdict} for one in figures], ensure_ascii=False))
    else:
        show(figures)
    return 0 if all(one.verdict in {"", "kept"} for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
