"""A sampler whose position can be saved: the same samples in the same order on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.utils.data import Sampler

from cadenza.sidecar.client.errors import MismatchError, UsageError

T = TypeVar("T")


class ResumableSampler(Sampler[int]):
    """Indices of successive epochs, distributed over the ranks, from a position that can be saved.

    ``source`` is a dataset or its length (``shuffle`` then makes the order random), or a sampler with an order of its
    own. The order is a function of seed and epoch alone. Sample p of an epoch goes to rank p modulo the number of
    ranks, so a step's global batch is the same set of samples on any number of ranks that divides it. When the
    remaining samples cannot be divided by the ranks, the last ones are dropped with ``drop_last``; otherwise the
    epoch's first ones are repeated, as in torch's DistributedSampler.

    A loader reads ahead, so the training itself must count its samples: iterate with :meth:`batches`, or call
    :meth:`advance`. Rank and world size are those of torch.distributed unless ``ranks`` gives them.
    """

    def __init__(
        self,
        source: int | Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        ranks: tuple[int, int] | None = None,
    ) -> None:
        self._source = source
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        """Epoch of the next sample; ``for epoch in range(sampler.epoch, EPOCHS)`` resumes."""
        self.position = 0
        """Number of this epoch's samples that all ranks together have trained."""
        self._ranks = ranks
        self._unaccounted = False

    @property
    def length(self) -> int:
        """Number of samples in an epoch."""
        return self._source if isinstance(self._source, int) else len(self._source)

    def __len__(self) -> int:
        """Return the number of this epoch's samples that are left for this rank."""
        size, left = self._world()[1], self.length - self.position
        return left // size if self.drop_last else -(-left // size)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's part of the rest of the epoch."""
        rank, size = self._world()
        order, count, start = self._order(), len(self), self.position + rank
        mine = order[start::size][:count]
        self._unaccounted = count > 0
        yield from mine.tolist() if isinstance(mine, torch.Tensor) else mine
        for turn in range(len(mine), count):
            yield int(order[(start + turn * size) % len(order)])

    def advance(self, samples: int) -> None:
        """Count further samples as trained by this rank, and as many by each other rank.

        The first sample of an epoch follows the last one of the epoch before.
        """
        size = self._world()[1]
        self._unaccounted = False
        self.position += samples * size
        if self.length - self.position < (size if self.drop_last else 1):
            self.epoch, self.position = self.epoch + 1, 0

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches of the rest of this epoch; each counts as trained when it is handed out.

        So save after the step of the batch at hand. Starting a DataLoader draws a number from torch's generator. In
        the middle of an epoch, where the uninterrupted run would not draw one, this is undone. The loader must have
        a ``batch_size``; with another kind of batch sampler call ``advance`` instead.
        """
        size = getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            raise UsageError("batches() needs a loader with a batch_size; else call advance(samples) after each step")
        drops = bool(getattr(loader, "drop_last", False))
        left = len(self)
        if left < (size if drops else 1):  # with more ranks than before, no batch may be left
            self.advance(left)
            return
        with torch.random.fork_rng([]) if self.position else contextlib.nullcontext():
            iterator = iter(loader)
        for batch in iterator:
            last = left < 2 * size if drops else left <= size
            self.advance(left if last else size)
            left -= size
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch; in the epoch at hand the position stays."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int | bool]:
        """Return seed, epoch and position; raise UsageError when the training has not counted its samples."""
        if self._unaccounted:
            raise UsageError("the sampler was read but no sample counted as trained: use batches() or advance()")
        names = ("seed", "epoch", "position", "length", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raise MismatchError when the dataset has another length."""
        if state["length"] != self.length:
            raise MismatchError(f"sampler: the checkpoint has {state['length']} samples, this job has {self.length}")
        for name in ("seed", "epoch", "position", "shuffle"):
            setattr(self, name, state[name])
        self._unaccounted = False

    def _world(self) -> tuple[int, int]:
        """Return the rank of this process and the number of ranks."""
        if self._ranks is not None:
            return self._ranks
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    def _order(self) -> Any:
        """Return the epoch's order; a sampler draws it from torch's generator, seeded for this epoch."""
        generator = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
        if not isinstance(self._source, Sampler):
            return torch.randperm(self.length, generator=generator) if self.shuffle else range(self.length)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self.epoch)
        with torch.random.fork_rng([]):
            torch.set_rng_state(generator.get_state())
            return list(self._source)
