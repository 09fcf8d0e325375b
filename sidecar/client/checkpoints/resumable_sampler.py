"""A sampler whose position can be saved: the same samples in the same order on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.utils.data import Sampler

from cadenza.sidecar.client.errors import MismatchError, UsageError

T = TypeVar("T")

_log = logging.getLogger("cadenza.client")
_latest: list[weakref.ref[ResumableSampler]] = []
"""The sampler of this process whose samples were counted last."""


def latest() -> ResumableSampler | None:
    """Return the sampler of this process whose samples were counted last, if it is still there."""
    return _latest[0]() if _latest else None


class ResumableSampler(Sampler[int]):
    """Indices of successive epochs, distributed over the ranks, from a position that can be saved.

    ``source`` is a dataset or its length (``shuffle`` then makes the order random), or a sampler with an order of its
    own. The order is a function of seed and epoch alone. Sample p of an epoch goes to rank p modulo the number of
    ranks, so a step's global batch is the same set of samples on any number of ranks that divides it. When the
    remaining samples cannot be divided by the ranks, the last ones are dropped with ``drop_last``; otherwise the
    epoch's first ones are repeated, as in torch's DistributedSampler.

    A loader reads ahead, so the training itself must count its samples: iterate with :meth:`batches`, or call
    :meth:`advance`. After the last batch the sampler stays at the end of its epoch until the training asks for the
    next one. One that is restored there yields nothing for that epoch: its own work, such as a scheduler's step, runs
    then. Rank and world size are those of torch.distributed unless ``ranks`` gives them.
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
        self._epoch = 0
        self.gives_epochs = False
        """The script has read ``epoch``: its loop over epochs resumes by it, and not by the step of a checkpoint."""
        self.position = 0
        """Number of this epoch's samples that all ranks together have trained; at its end the length."""
        self._start = 0
        """Position at which this process began the epoch."""
        self.left_early = False
        """The script's loop leaves an epoch before its end: what ends it, such as a limit of batches, is not known."""
        self.handed_out = 0
        """Number of batches that ``batches()`` has handed out in this process."""
        self.on_next: Callable[[], object] = bool
        """Called before ``batches()`` hands out a batch, or ends: all of the step before is done."""
        self.resume: Callable[[], object] | None = None
        """Called once, before the first batch after a restore: what the script does before it was done already."""
        self.kept = False
        """A keeper has it."""
        self.used = False
        """Samples were counted: the script takes its data by this sampler."""
        self._ranks = ranks
        self._unaccounted = False
        self._counts = 0
        """Calls of ``advance`` in this epoch."""
        self._by_batches = False
        self._warned = False

    @property
    def epoch(self) -> int:
        """Epoch of the next sample; ``for epoch in range(sampler.epoch, EPOCHS)`` resumes."""
        self.gives_epochs = True
        return self._epoch

    @property
    def length(self) -> int:
        """Number of samples in an epoch."""
        return self._source if isinstance(self._source, int) else len(self._source)

    @property
    def at_epoch_end(self) -> bool:
        """True from the last batch of an epoch with several on, until the training asks for the next one."""
        return self._counts > 1 and self.position >= self.length

    @property
    def in_batches(self) -> bool:
        """True while a training takes its batches from ``batches()``."""
        return self._by_batches and self.position > 0

    def __len__(self) -> int:
        """Return the number of samples that this process has for this rank in this epoch, from its beginning on.

        So the loader's length is right throughout an epoch: ``if i + 1 == len(loader)`` is its last batch.
        """
        return self._share(self.length - self._start)

    def _share(self, samples: int) -> int:
        """Return this rank's share of a number of samples."""
        size = self._world()[1]
        return samples // size if self.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's part of the rest of the epoch; nothing, once, where it was restored at its end."""
        self._leave_end()
        rank, size = self._world()
        order, count, start = self._order(), self._share(self.length - self.position), self.position + rank
        mine = order[start::size][:count]
        self._unaccounted = count > 0
        yield from mine.tolist() if isinstance(mine, torch.Tensor) else mine
        for turn in range(len(mine), count):
            yield int(order[(start + turn * size) % len(order)])
        if not count:
            self._counts = 1  # the next one is of the next epoch

    def advance(self, samples: int) -> None:
        """Count further samples as trained by this rank, and as many by each other rank.

        The first sample of an epoch follows the last one of the epoch before. Once the work at the end of an epoch is
        done, call ``set_epoch`` with the next one before you save; :meth:`batches` does that by itself.
        """
        self._leave_end()
        self._by_batches = False
        self._count(samples)

    def _count(self, samples: int) -> None:
        size = self._world()[1]
        self._unaccounted, self.used = False, True
        _latest[:] = [weakref.ref(self)]
        self._counts += 1
        self.position += samples * size
        if self.length - self.position < (size if self.drop_last else 1):
            self.position = self.length

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches of the rest of this epoch; each counts as trained when it is handed out.

        So save after the step of the batch at hand. The next epoch begins when the batch after the last one is asked
        for, which is at the end of a ``for`` loop. The loader must have a ``batch_size``; with another kind of batch
        sampler call ``advance`` instead.
        """
        size = getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            raise UsageError("batches() needs a loader with a batch_size; else call advance(samples) after each step")
        self.on_next()
        self._leave_end()
        self._look_back()
        resume, self.resume = self.resume, None
        if resume is not None and self.position:
            resume()
        self._by_batches = True
        drops = bool(getattr(loader, "drop_last", False))
        left = self._share(self.length - self.position)
        if left >= (size if drops else 1):  # with more ranks than before, or at the epoch's end, no batch may be left
            # Starting a DataLoader draws its base seed from torch's generator. In the middle of an epoch, where the
            # uninterrupted run would not draw one, this is undone.
            with torch.random.fork_rng([]) if self.position else contextlib.nullcontext():
                iterator = iter(loader)
            for batch in iterator:
                last = left < 2 * size if drops else left <= size
                self._count(left if last else size)
                left -= size
                self.handed_out += 1
                yield batch
                self.on_next()
        self._go_to(self._epoch + 1)

    def _leave_end(self) -> None:
        """Go to the next epoch if this process has come to the end of one, which its training has left now."""
        if self._counts and self.position >= self.length:
            self._go_to(self._epoch + 1)

    def _look_back(self) -> None:
        """Note whether the loop that took batches before has left its epoch in the middle."""
        if self._by_batches and self._counts and self.position < self.length:
            if self._start and not self.left_early and self.gives_epochs:
                _log.warning(
                    "the loop has left epoch %d, which this start began in the middle, before its end: if that was "
                    "after a number of batches, it has counted those of this start only", self._epoch,
                )  # fmt: skip
            self.left_early = True

    def _go_to(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._epoch, self.position, self._start, self._counts = epoch, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch; in the epoch at hand the position stays."""
        if epoch != self._epoch:
            self._look_back()
            self._go_to(epoch)

    def state_dict(self) -> dict[str, int | bool]:
        """Return seed, epoch and position; raise UsageError when the training has not counted its samples."""
        if self._unaccounted:
            raise UsageError("the sampler was read but no sample counted as trained: use batches() or advance()")
        if self.position >= self.length and not self._by_batches and not self._warned:
            self._warned = True
            _log.warning(
                "the sampler is at the end of epoch %d: after a restore the work at its end is done again; if it is "
                "done already, call sampler.set_epoch(%d) before you save", self._epoch, self._epoch + 1,
            )  # fmt: skip
        names = ("seed", "position", "length", "shuffle")
        return {"epoch": self._epoch, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raise MismatchError when the dataset has another length."""
        if state["length"] != self.length:
            raise MismatchError(f"sampler: the checkpoint has {state['length']} samples, this job has {self.length}")
        for name in ("seed", "position", "shuffle"):
            setattr(self, name, state[name])
        self._epoch, self._start = state["epoch"], state["position"]
        self.used |= bool(self._epoch or self.position)
        self._unaccounted = False
        self._counts = 0

    def _world(self) -> tuple[int, int]:
        """Return the rank of this process and the number of ranks."""
        if self._ranks is not None:
            return self._ranks
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    def _order(self) -> Any:
        """Return the epoch's order; a sampler draws it from torch's generator, seeded for this epoch."""
        generator = torch.Generator().manual_seed((self.seed + self._epoch) % (1 << 63))
        if not isinstance(self._source, Sampler):
            return torch.randperm(self.length, generator=generator) if self.shuffle else range(self.length)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
        # An empty list of devices: by default fork_rng saves the generators of all GPUs, and so starts CUDA.
        with torch.random.fork_rng([]):
            torch.set_rng_state(generator.get_state())
            return list(self._source)
