"""What both workloads share: a training step on a GPU, or on a stand-in for one where there is none."""

from __future__ import annotations

import os
import time  # noqa: TID251 (training scripts of a user, not part of the packages)
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def workers() -> int:
    """Return how many loader workers to start: one for each CPU at the start, as told by `cadenza profile run`."""
    cpus = float(os.environ.get("CADENZA_PROFILE_CPUS", len(os.sched_getaffinity(0))))
    return max(1, round(cpus))


def forever(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches epoch after epoch."""
    while True:
        yield from loader


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], device_s: float) -> None:
    """Train on one batch; without a GPU wait until ``device_s`` have passed, which takes no CPU either."""
    began = time.monotonic()
    inputs, classes = (part.to(DEVICE, non_blocking=True) for part in batch)
    nn.functional.cross_entropy(model(inputs), classes).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if DEVICE == "cpu":
        time.sleep(max(0.0, began + device_s - time.monotonic()))
    else:
        torch.cuda.synchronize()
