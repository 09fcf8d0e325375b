#!/usr/bin/env python3
"""Print the price of one boundary without an order, beside an empty call of the same run.

Hot: boundaries in a loop, caches warm. In situ: one boundary after a real training step, caches cold. The page is
the process's own, which costs the same as an agent's: both are words in memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session import Session

LOOP = 1000
ROUNDS = 200
STEPS = 300


def empty(samples: int = 0) -> None:
    """Do nothing, at the price of a call."""


def hot_us(call: Callable[[], object]) -> float:
    """Return the median time of a call in a loop, microseconds."""
    rounds = []
    for _ in range(ROUNDS):
        started = monotonic_ns()
        for _ in range(LOOP):
            call()
        rounds.append((monotonic_ns() - started) / LOOP / 1e3)
    return statistics.median(rounds)


def in_situ_us(calls: list[Callable[[], object]]) -> list[float]:
    """Return each call's median time after a training step, microseconds; the calls take turns."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(64, 512)
    spent: list[list[int]] = [[] for _ in calls]
    for step in range(STEPS * len(calls)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        started = monotonic_ns()
        calls[step % len(calls)]()
        spent[step % len(calls)].append(monotonic_ns() - started)
    return [statistics.median(one) / 1e3 for one in spent]


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    session = Session()
    hot, hot_empty = hot_us(session.boundary), hot_us(empty)
    cold, cold_empty = in_situ_us([session.boundary, empty])
    print(f"hot loop:            boundary {hot:.2f} µs, empty call {hot_empty:.2f} µs")
    print(f"after a real step:   boundary {cold:.2f} µs, empty call {cold_empty:.2f} µs")


if __name__ == "__main__":
    main()
