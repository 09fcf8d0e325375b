"""One pool of workers: torch's own DataLoader over whole batches, fed from a source that other pools share."""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from cadenza.sidecar.client.data.loader_worker import Numbered, Reader, Task, WorkerStart, collated, signals_blocked

PREFETCH = 2
"""Batches read ahead by each worker by default, as in DataLoader."""
JOIN_S = 5.0
"""Longest wait for a process whose end has begun."""


class Settings(Protocol):
    """Values that a pool takes from its loader; all are DataLoader's."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    pin_memory_device: str
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any
    persistent_workers: bool


class Feed:
    """An iterator over a source that can be cut off, so that another pool continues with the source."""

    def __init__(self, source: Iterator[Task]) -> None:
        self.source = source
        self.cut = False

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Task:
        if self.cut:
            raise StopIteration
        return next(self.source)


class WorkerPool:
    """A number of workers, which read ahead as DataLoader's do; without workers this process reads.

    After ``retire()`` it hands out the batches read ahead and ends. If making one raises OSError, nothing was taken
    from the source.
    """

    def __init__(self, settings: Settings, reader: Reader, source: Iterator[Task]) -> None:
        self.size = settings.num_workers
        self._feed = Feed(source)
        self._pid = os.getpid()
        # A generator of its own: the base seed that DataLoader draws must not move the user's random numbers.
        generator = torch.Generator()
        self._loader: DataLoader[Numbered] | None = DataLoader(
            reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._feed,
            collate_fn=collated,
            pin_memory=settings.pin_memory,
            pin_memory_device=settings.pin_memory_device,
            generator=generator,
            **(_with_workers(settings) if self.size else {}),
        )
        with signals_blocked():
            self._batches: Iterator[Numbered] | None = iter(self._loader)
        self._workers = _own_workers(self._batches)
        self._pids = tuple(worker.pid or 0 for worker in self._workers)
        for worker in self._workers:
            # They ignore SIGTERM, and DataLoader's last resort for one that hangs must not be ignored.
            worker.terminate = worker.kill  # type: ignore[method-assign]
        if self._workers:
            # The interpreter's own end would wait for workers that ignore SIGTERM.
            _open_pools.add(self)
            if not _exits:
                _exits.append(True)
                atexit.register(_close_all)

    def __next__(self) -> Numbered:
        if self._batches is None:
            raise StopIteration
        signal_handling._set_worker_pids(id(self), self._pids)  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]  # noqa: SLF001
            return next(self._batches)
        finally:
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]  # noqa: SLF001

    def restart(self, source: Iterator[Task]) -> None:
        """Begin an epoch with the same, persistent workers; batches left of the last epoch are dropped."""
        self._feed.source = source
        self._batches = iter(self._loader) if self._loader is not None else None

    def retire(self) -> None:
        """Take nothing more from the source."""
        self._feed.cut = True

    def dead(self, patience_s: float) -> list[str]:
        """Describe the workers that have ended; wait for one that may be about to end."""
        ending = wait([worker.sentinel for worker in self._workers], patience_s)
        for worker in self._workers:
            if worker.sentinel in ending:
                worker.join(JOIN_S)  # its files are closed, so it ends within microseconds
        ends = [(worker.pid, worker.exitcode or 0) for worker in self._workers if not worker.is_alive()]
        return [
            f"{pid} (exit code {code})" if code >= 0 else f"{pid} (killed by {signal.Signals(-code).name})"
            for pid, code in ends
        ]

    def close(self) -> None:
        """End the workers and wait for them, as DataLoader does; one that hangs for some seconds is killed."""
        batches, self._batches, self._loader = self._batches, None, None
        # DataLoader calls this when its iterator is deleted, which an exception's traceback may delay.
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None and self._pid == os.getpid():
            shutdown()
        self._workers = []

    def __del__(self) -> None:
        if getattr(self, "_workers", None):
            self.close()


def _with_workers(settings: Settings) -> dict[str, Any]:
    """Return the arguments that DataLoader accepts only together with workers."""
    return {
        "num_workers": settings.num_workers,
        "prefetch_factor": settings.prefetch_factor or PREFETCH,
        "timeout": settings.timeout,
        "worker_init_fn": WorkerStart(settings.worker_init_fn),
        "multiprocessing_context": settings.multiprocessing_context,
        "persistent_workers": settings.persistent_workers,
    }


def _own_workers(batches: Any) -> list[BaseProcess]:
    """Return the workers of DataLoader's iterator, and watch for their deaths in its place.

    The iterator would raise an error at any point of the training process when a worker dies, even in the middle of
    a step or of a move of its state. Here the error comes only while the process waits for a batch.
    """
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]  # noqa: SLF001
        batches._worker_pids_set = False  # noqa: SLF001
    return list(getattr(batches, "_workers", ()))


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_exits: list[bool] = []
"""Non-empty once the exit handler is registered."""


def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
