"""Defaults of a profile's subject: the node, its GPUs, and the bandwidth at which the dataset can be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Reference
from cadenza.policies.inputs.csv_table import positive
from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.measure.gpu_use import visible
from cadenza.profiler.measure.storage import memory_mb_s, size_gb, storage_mb_s
from cadenza.profiler.model.memory import Data
from cadenza.sidecar.clock import Clock


def this_node(gpus: int) -> Reference:
    """Return this machine as the server of the share; without visible GPUs it has as many as the job."""
    count = max(len(visible({})), gpus)
    return Reference(count, float(os.cpu_count() or 1), psutil.virtual_memory().total / 2**30)


def parse_node(text: str) -> Reference:
    """Return the server that ``GPUS:CPUS:MEMORY_GB`` describes; raise InputError.

    >>> parse_node("8:24:500")
    Reference(gpus=8, cpus=24.0, memory_gb=500.0)
    """
    if not re.fullmatch(r"[1-9]\d*:[^:]+:[^:]+", text):
        raise InputError(f"--node {text!r}: must be GPUS:CPUS:MEMORY_GB, as in 8:24:500")
    gpus, cpus, memory = text.split(":")
    return Reference(int(gpus), positive(cpus, "--node, CPUs"), positive(memory, "--node, GB"))


def parse_list(text: str, option: str) -> tuple[float, ...]:
    """Return ascending numbers above 0 from ``1,2,4``; raise InputError naming the option.

    >>> parse_list("2,0.5", "--cpus")
    (0.5, 2.0)
    """
    return tuple(sorted({positive(part.strip(), option) for part in text.split(",")}))


def model_of(words: tuple[str, ...]) -> str:
    """Return a name for a command that was given none: its script's.

    >>> model_of(("torchrun", "--nproc-per-node=2", "train/resnet.py", "--epochs", "3"))
    'resnet'
    """
    script = next((word for word in words if word.endswith(".py")), words[0])
    return Path(script).stem


def data_of(
    state: State, dataset: Path, samples: int | None, steps: int | None, clock: Clock
) -> Data:
    """Return the data that the memory axis is computed from; missing bandwidths are measured and kept in the state.

    Raise InputError when the part of the dataset that a step reads is unknown.
    """
    seen = max(point.samples for point in state.points)
    if steps is None and not (samples and seen):
        raise InputError(
            "--dataset needs --steps-per-epoch N, or --samples N of the dataset and a script that tells "
            "boundary(samples): otherwise the part of it that a step reads is unknown"
        )
    gb = size_gb(dataset)
    known = state.bandwidth
    if "storage_mb_s" not in known:
        known["storage_mb_s"] = storage_mb_s(dataset, clock)
    if "memory_mb_s" not in known:
        known["memory_mb_s"] = memory_mb_s(clock)
    part = 1 / steps if steps else seen / (samples or 1)
    cached = min((point.memory_gb for point in state.points), default=0.0)
    return Data(gb, gb * 1024 * part, cached, **state.bandwidth)
