"""Shared by both workloads: a training step on a GPU, or on a stand-in for one where there is none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time  # noqa: TID251 (training scripts of a user, not part of the packages)
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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


class Device(NamedTuple):
    """A stand-in for a GPU: how long a step takes there at least, and for which part of it kernels run.

    With ``GPU_LOCKS`` in the environment, a folder, kernels hold a lock on a file for each of the job's GPUs, so that
    jobs which share a GPU wait for each other's as on a real one. In the rest of a step, launches and transfers,
    another job's may run.
    """

    step_s: float
    busy: float = 1.0

    def finish(self, began: float) -> None:
        """Wait for the end of a step that began at a time; takes no CPU."""
        kernels_s = self.step_s * self.busy
        time.sleep(max(0.0, began + self.step_s - kernels_s - time.monotonic()))
        with contextlib.ExitStack() as held:
            for path in gpu_locks():
                file = held.enter_context(os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)))
                fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(kernels_s if gpu_locks() else max(0.0, began + self.step_s - time.monotonic()))


def gpu_locks() -> list[Path]:
    """Return the lock file of each of the job's GPUs, always in the same order; none without ``GPU_LOCKS``."""
    gpus = sorted(int(index) for index in os.environ.get("SLURM_JOB_GPUS", "0").split(","))
    return [Path(folder) / str(index) for index in gpus] if (folder := os.environ.get("GPU_LOCKS")) else []


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], device: Device) -> None:
    """Train on one batch; without a GPU as long as the stand-in takes."""
    began = time.monotonic()
    inputs, classes = (part.to(DEVICE, non_blocking=True) for part in batch)
    nn.functional.cross_entropy(model(inputs), classes).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if DEVICE == "cpu":
        device.finish(began)
    else:
        torch.cuda.synchronize()
