#!/usr/bin/env python3
"""Print what a boundary adds to a step of 1 ms, with a keeper and without; exit code 1 if it is more than 1 % of it.

A step is one of a small model and its optimizer, and then a sleep to its end, so that caches are cold at the boundary.
Steps with a boundary and steps with nothing of Cadenza, neither the boundary nor its hook in torch, take turns. The
time is CPU time of the thread from the optimizer's step to the boundary's end: other processes' turns on its core are
not in it; the looks every 50 ms, and the samples of gradients, are. What comes once, such as the first sample with a
look at all objects, is not. The interval is that of 95 %. The hot loop has boundaries alone.

``python benchmarks/speed/boundary_price.py [--steps 8000]``
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from cadenza.sidecar import client

STEP_S = 0.001
WARM = 300
LOOP = 20_000
NORMAL_95 = 1.96
LIMIT = 0.01
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
KEEPERS = ("no keeper", "keeper", "keeper, at(step)")


class Training:
    """A model, its optimizer, and the CPU time of its steps."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], folder: str, keeper: str) -> None:
        self.model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = make(self.model.parameters())
        self.session = client.attach(self.model, self.optimizer)
        self.keeper = None
        if keeper != KEEPERS[0]:
            self.keeper = client.checkpoint(folder, model=self.model, optimizer=self.optimizer)
        self.names = keeper == KEEPERS[2]
        self.batch = torch.ones(8, 16)
        self.step = 0

    def run(self, *, with_boundary: bool) -> float:
        """Do a step; return the CPU time of its optimizer and its boundary, in seconds."""
        end = time.perf_counter() + STEP_S
        self.optimizer.zero_grad()
        self.model(self.batch).sum().backward()
        self.step += with_boundary
        time.sleep(max(0.0, end - time.perf_counter()))
        began = time.thread_time_ns()
        self.optimizer.step()
        if with_boundary:
            if self.names:
                self.keeper.at(self.step)  # type: ignore[union-attr]
            self.session.boundary(8)
        return (time.thread_time_ns() - began) / 1e9

    def pair(self) -> float:
        """Return the CPU time that a step with a boundary has more than one without."""
        hooks = dict(_global_optimizer_post_hooks)
        _global_optimizer_post_hooks.clear()
        without = self.run(with_boundary=False)
        _global_optimizer_post_hooks.update(hooks)
        return self.run(with_boundary=True) - without

    def hot(self) -> float:
        """Return the CPU time of a boundary in a loop of nothing else, in seconds."""
        began = time.thread_time_ns()
        for _ in range(LOOP):
            if self.names:
                self.step += 1
                self.keeper.at(self.step)  # type: ignore[union-attr]
            self.session.boundary(8)
        return (time.thread_time_ns() - began) / 1e9 / LOOP


def added(make: Callable[[Any], torch.optim.Optimizer], keeper: str, steps: int) -> tuple[float, float, float]:
    """Return the time that a boundary adds to a step, half of its interval, and a boundary's in a hot loop."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(make, folder, keeper)
        for _ in range(WARM):
            training.pair()
        if training.keeper is not None and not training.names:  # the library learns that a boundary is a step
            training.keeper.save(training.session.trained)
            for _ in range(WARM):
                training.pair()
        pairs = [training.pair() for _ in range(steps // 2)]
        hot = statistics.median(training.hot() for _ in range(9))
        client.detach()
    return statistics.fmean(pairs), NORMAL_95 * statistics.stdev(pairs) / len(pairs) ** 0.5, hot


def main() -> int:
    """Measure all kinds; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000, help="steps of each row (default %(default)s)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    missed = False
    for kind, make in KINDS.items():
        for keeper in KEEPERS:
            mean, half, hot = added(make, keeper, steps)
            missed |= mean - half > LIMIT * STEP_S
            verdict = "kept" if mean + half <= LIMIT * STEP_S else "MISSED" if mean - half > LIMIT * STEP_S else "open"
            print(
                f"{kind:18} {keeper:17} adds {mean * 1e6:5.2f} us (+-{half * 1e6:.2f}): "
                f"{mean / STEP_S:.2%} of a step of 1 ms; limit {LIMIT:.0%}: {verdict}; hot loop {hot * 1e6:.2f} us",
                flush=True,
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
