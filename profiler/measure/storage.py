"""Inputs of the memory axis: the size of the dataset, the bandwidths of storage and of memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cadenza.policies.core.errors import InputError
from cadenza.sidecar.clock import Clock

BLOCK = 4 << 20
READ_S = 3.0
"""As long as ``hdparm -t`` reads."""
COPIES = 8
MB = 1 << 20
ALIGNMENT = 4096


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
            if size % ALIGNMENT:
                return
    finally:
        os.close(descriptor)


def memory_mb_s(clock: Clock) -> float:
    """Return how fast one thread copies from memory to memory: what a cache in memory gives, at least."""
    source = np.ones(16 * MB, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    began = clock.monotonic()
    for _ in range(COPIES):
        np.copyto(target, source)
    return COPIES * 16 / max(clock.monotonic() - began, 1e-9)
