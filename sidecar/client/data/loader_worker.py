"""The worker's side of a loader: reads one batch, seeded by its number in every process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from cadenza.sidecar.client.data.seeds import BatchKey, generators_preserved

Task = tuple[BatchKey, Any]
"""A batch's key and the sampler's indices: a list, or one index when batching is off."""
Numbered = tuple[int, Any]
"""A batch's number in its epoch, and the batch."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals meant for the training process only."""


class Reader:
    """A dataset of whole batches, indexed by tasks, for the workers of torch's own DataLoader."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched

    def __getitem__(self, task: Task) -> Numbered:
        """Return a task's batch. In the training process the random numbers are left unchanged."""
        key, indices = task
        if get_worker_info() is not None:
            return key.number, self._read(key, indices)
        with generators_preserved():
            return key.number, self._read(key, indices)

    def _read(self, key: BatchKey, indices: Any) -> Any:
        """Seed, read and collate, as DataLoader's own fetcher does for map-style datasets."""
        key.seed()
        if not self._batched:
            return self._collate(self.dataset[indices])
        read_together = getattr(self.dataset, "__getitems__", None)
        samples = read_together(indices) if read_together else [self.dataset[index] for index in indices]
        return self._collate(samples)


class WorkerStart:
    """First action of each worker, before the user's own ``worker_init_fn``."""

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Ignore STOP_SIGNALS, which were blocked until now, and show the user's dataset as torch does.

        Slurm signals every process of a step: a worker that ended by the signal would be missing before the training
        process could write its checkpoint.
        """
        for number in STOP_SIGNALS:
            # Programs that the dataset runs do not inherit a handler, unlike SIG_IGN (execve(2)).
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Reader):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # its class forbids assignment
        if self._then is not None:
            self._then(worker)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block STOP_SIGNALS in this thread and in the processes that it starts, until each of them ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def collated(batch: Any) -> Any:
    """Return a batch unchanged: the reader has collated it."""
    return batch
