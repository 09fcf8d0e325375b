"""Defaults of a profile's subject: the node, its GPUs, and the bandwidth at which the dataset can be read."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Reference
from cadenza.policies.inputs.csv_table import positive
from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.measure.gpu_use import visible
from cadenza.profiler.model.memory import Data
from cadenza.sidecar.clock import Clock

BLOCK = 4 << 20
READ_S = 3.0
"""As long as ``hdparm -t`` reads."""
COPIES = 8
MB = 1 << 20
ALIGNMENT = 4096
MODULE = "-m"
ENV_ARGUMENTS = frozenset({"-u", "--unset", "-C", "--chdir", "-S", "--split-string"})
"""Options of env(1) that are followed by a word."""


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
    """Return a name for a command that was given none: its script's, else its module's, else its program's.

    >>> model_of(("torchrun", "--nproc-per-node=2", "train/resnet.py", "--epochs", "3"))
    'resnet'
    >>> model_of(("env", "-u", "HOME", "TOKENIZERS_PARALLELISM=false", "python3", "-m", "vision.train"))
    'train'
    """
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None:
        return Path(script).stem
    if MODULE in words[1:-1]:
        return words[words.index(MODULE, 1) + 1].rpartition(".")[2]
    command = list(words)
    if Path(command[0]).name == "env":  # env(1): options, then variables, then the command
        del command[0]
        while command and (command[0].startswith("-") or "=" in command[0]):
            del command[: 1 + (command[0] in ENV_ARGUMENTS)]
    return Path(command[0] if command else words[0]).stem


def data_of(state: State, dataset: Path, samples: int | None, steps: int | None, clock: Clock) -> Data:
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


def files(dataset: Path) -> list[Path]:
    """Return the files of a dataset, largest first; raise InputError when there are none."""
    found = [dataset] if dataset.is_file() else [path for path in dataset.rglob("*") if path.is_file()]
    if not found:
        raise InputError(f"--dataset {dataset}: there is no file")
    return sorted(found, key=lambda path: (-path.stat().st_size, path))


def size_gb(dataset: Path) -> float:
    """Return the bytes of a dataset's files, in GB."""
    return sum(path.stat().st_size for path in files(dataset)) / 2**30


def storage_mb_s(dataset: Path, clock: Clock, most_s: float = READ_S) -> float:
    """Return how fast the dataset's files come from storage, read one after the other past the page cache.

    O_DIRECT does that; a file system that has none is asked to drop the file's pages first (posix_fadvise(2)),
    which it does not for pages that others use.
    """
    buffer = mmap.mmap(-1, BLOCK)  # aligned to a page, as O_DIRECT wants it
    began = clock.monotonic()
    total = 0
    for path in files(dataset):
        for size in _blocks(path, buffer):
            total += size
            if clock.monotonic() - began > most_s:
                return total / MB / (clock.monotonic() - began)
    return total / MB / max(clock.monotonic() - began, 1e-9)


def _blocks(path: Path, buffer: mmap.mmap) -> Iterator[int]:
    """Read a file block by block and yield the bytes of each."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        while size := os.readv(descriptor, [buffer]):
            yield size
            # A short read is the end of the file, and O_DIRECT reads on from aligned positions only.
            if size % ALIGNMENT:
                return
    finally:
        os.close(descriptor)


def memory_mb_s(clock: Clock) -> float:
    """Return how fast one thread copies from memory to memory: what a cache in memory gives, at least."""
    source = np.ones(16 * MB, dtype=np.uint8)
    target = np.empty_like(source)
    # The first copy also has the kernel provide the target's pages, and is not timed.
    np.copyto(target, source)
    began = clock.monotonic()
    for _ in range(COPIES):
        np.copyto(target, source)
    return COPIES * 16 / max(clock.monotonic() - began, 1e-9)
