"""A sampler whose position can be saved: the same samples in the same order, whatever the number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.utils.data import Sampler

from cadenza.sidecar.client.checkpoints.errors import MismatchError
from cadenza.sidecar.client.errors import UsageError

T = TypeVar("T")


class ResumableSampler(Sampler[int]):
    """Indices of one epoch after the other, dealt to the ranks in turn, from a position that can be saved.

    ``source`` is a dataset or its length (then ``shuffle`` says whether the order is drawn), or a sampler, whose
    order is taken. The order is a function of seed and epoch alone. Sample p of an epoch goes to rank p modulo
    the number of ranks, so that a step's global batch is the same set of samples on any number of ranks that
    divides it. When the samples left do not divide by the ranks, the last ones are dropped with ``drop_last``,
    else the epoch's first ones are repeated, as torch's DistributedSampler does.

    A loader reads ahead, so only the training can say what it has trained: iterate with :meth:`batches`, or
    call :meth:`advance`. ``rank`` and ``world_size`` are those of torch.distributed unless given.
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
        """The epoch that the next sample is of; ``for epoch in range(sampler.epoch, EPOCHS)`` resumes."""
        self.position = 0
        """Samples of this epoch that have been trained, by all ranks together."""
        self._ranks = ranks
        self._unaccounted = False

    @property
    def length(self) -> int:
        """Return the samples of an epoch."""
        return self._source if isinstance(self._source, int) else len(self._source)

    def __len__(self) -> int:
        """Return how many samples of this epoch are left for this rank."""
        size, left = self._world()[1], self.length - self.position
        return left // size if self.drop_last else -(-left // size)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's part of what is left of the epoch."""
        rank, size = self._world()
        order, count, start = self._order(), len(self), self.position + rank
        mine = order[start::size][:count]
        self._unaccounted = count > 0
        yield from mine.tolist() if isinstance(mine, torch.Tensor) else mine
        for turn in range(len(mine), count):
            yield int(order[(start + turn * size) % len(order)])

    def advance(self, samples: int) -> None:
        """Say that this rank has trained this many samples more, and so have all others.

        Behind the last sample of an epoch stands the first of the next.
        """
        size = self._world()[1]
        self._unaccounted = False
        self.position += samples * size
        if self.length - self.position < (size if self.drop_last else 1):
            self.epoch, self.position = self.epoch + 1, 0

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches of what is left of this epoch, each counted as trained when it is handed out.

        So save after the step of the batch at hand. Starting a DataLoader draws a number from torch's generator;
        in the middle of an epoch, where the uninterrupted run would not draw one, that is undone. The loader must
        have a ``batch_size``; with a batch sampler of another kind call ``advance`` instead.
        """
        size = getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            raise UsageError("batches() needs a loader with a batch_size; else call advance(samples) after each step")
        drops = bool(getattr(loader, "drop_last", False))
        left = len(self)
        if left < (size if drops else 1):  # with more ranks than before it may be that no batch is left
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
        """Return seed, epoch and position; raise UsageError when nobody has said what was trained."""
        if self._unaccounted:
            raise UsageError("the sampler was read and nobody says what was trained: use batches() or advance()")
        names = ("seed", "epoch", "position", "length", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; raise MismatchError when the dataset has another length."""
        if state["length"] != self.length:
            raise MismatchError(f"sampler: the checkpoint is of {state['length']} samples, this job has {self.length}")
        for name in ("seed", "epoch", "position", "shuffle"):
            setattr(self, name, state[name])
        self._unaccounted = False

    def _world(self) -> tuple[int, int]:
        """Return this rank and the number of ranks."""
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
