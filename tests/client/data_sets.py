"""Small datasets for the tests of data loading: plain ones, random ones, and some that misbehave."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class Squares:
    """Item i is i and a tensor of i and its square; ``reads`` are those of this process."""

    def __init__(self, length: int = 53) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.reads.append(int(index))
        return int(index), torch.tensor([index, index * index])


class Together(Squares):
    """Reads whole batches."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        return [(index, torch.tensor([-index])) for index in indices]


class Augmented(Squares):
    """Draws from all three global generators for each item."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002, S311


class Deadly(Squares):
    """The process that reads item 11 dies."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Broken(Squares):
    """Item 11 cannot be read."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 11:
            raise RuntimeError("item 11 is damaged")
        return super().__getitem__(index)


class Sockets(Squares):
    """Each item lists the open sockets of the reading process."""

    def __getitem__(self, index: int) -> list[str]:
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if open_here(name)]
        return [link for link in links if link.startswith("socket:")]


def open_here(name: str) -> bool:
    """Return whether a descriptor is still open; the one that listed them is not."""
    return os.path.lexists(f"/proc/self/fd/{name}")


class Uneven:
    """A batch sampler with batches of different sizes."""

    def __init__(self, length: int = 53) -> None:
        self.length = length

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size % 4 + 1


class Bulky:
    """Items of one size each, whose bytes identify them."""

    def __init__(self, length: int = 40, nbytes: int = 1000) -> None:
        self.length, self.nbytes = length, nbytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> bytes:
        return index.to_bytes(4, "little") * (self.nbytes // 4)


def generator(seed: int = 4) -> torch.Generator:
    """Return a new generator."""
    return torch.Generator().manual_seed(seed)


def equal(one: Any, other: Any) -> bool:
    """Return whether two batches are the same in type and content, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
