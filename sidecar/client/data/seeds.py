"""Random numbers of one batch, seeded by its number; the training process's own are preserved."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

np: Any
try:
    import numpy as np
except ImportError:  # torch runs without it
    np = None

__all__ = ["BatchKey", "generators_preserved", "np"]

SEED_BYTES = 8
NUMPY_WORDS = 4


@dataclass(frozen=True)
class BatchKey:
    """Source of a batch's random numbers; the worker and the number of workers have no influence.

    ``base`` is the seed that DataLoader calls base_seed, drawn from the loader's generator (else from torch's
    global one) as DataLoader draws it: once an epoch, or only once with persistent workers. ``round``
    counts the epochs since it was drawn, and ``number`` the batches of the epoch.
    """

    base: int
    round: int
    number: int

    def seed(self) -> None:
        """Seed torch's CPU generator, ``random`` and numpy's global generator, if numpy is there.

        The seeds are the first 8 bytes of BLAKE2b over ``base:round:number`` for torch and ``random``, and the
        next 16 as four words for numpy. A dataset's own generators are not seeded.
        """
        text = f"{self.base}:{self.round}:{self.number}".encode()
        digest = blake2b(text, digest_size=SEED_BYTES + 4 * NUMPY_WORDS).digest()
        seed = int.from_bytes(digest[:SEED_BYTES], "little")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if np is not None:
            words = digest[SEED_BYTES:]
            np.random.seed([int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)])


@contextlib.contextmanager
def generators_preserved() -> Iterator[None]:
    """Preserve the global generators while a batch is read in the training process.

    numpy's generator is replaced by another for that time, because copying its state takes a hundred times as long.
    It drops the second number of a pair that ``np.random.randn`` may have kept.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    usual = np and np.random.get_bit_generator()
    if np is not None:
        np.random.set_bit_generator(_spare_numpy())
    try:
        yield
    finally:
        if np is not None:
            np.random.set_bit_generator(usual)
        torch.set_rng_state(torch_state)
        random.setstate(python_state)


@functools.cache
def _spare_numpy() -> Any:
    """Return the generator for numpy while a batch is read in the training process."""
    return np.random.MT19937(0)
