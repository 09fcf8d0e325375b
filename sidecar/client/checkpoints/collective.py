"""All ranks of the job at one table: each phase of a save or restore succeeds on all of them or fails on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from cadenza.sidecar.client.checkpoints.errors import CheckpointError

T = TypeVar("T")

PATIENCE = timedelta(hours=6)
"""How long a rank waits for one that still writes. One that died ends the wait at once: its connection closes."""


class Ranks:
    """One rank and the others; without an initialised torch.distributed there are no others.

    Making it is a collective call: it makes a gloo group of its own, so that a save in a thread never meets
    the collectives of the training.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.group: distributed.ProcessGroup | None = None
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
            self.group = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def meet(self, patience: timedelta) -> None:
        """Wait until all ranks have come here; CheckpointError names those that have not in time.

        For calls that nobody but an agent's word makes collective: where one rank did not hear it, the others must
        not wait in a collective while it waits for them in one of the training.
        """
        if self.group is None:
            return
        try:
            distributed.monitored_barrier(self.group, timeout=patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(f"not all ranks came to save: {str(error).splitlines()[0]}") from error

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of ranks, on every rank."""
        if self.group is None:
            return [value]
        told: list[Any] = [None] * self.size
        distributed.all_gather_object(told, value, group=self.group)
        return told

    def together(self, work: Callable[[], T]) -> T:
        """Do something without collectives on every rank; return its value here.

        When it fails anywhere it raises everywhere: the rank's own error where it failed, else a
        CheckpointError that names the rank and the cause.
        """
        value, failure = _attempt(work)
        failures = self.gather("" if failure is None else str(failure) or repr(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")
        return value  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 only, and return its value on every rank; it fails as ``together`` does."""
        value = self.together(lambda: work() if self.rank == 0 else None)
        found: T = self.gather(value)[0]  # type: ignore[assignment]
        return found


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what the work returns, or the error that it raises."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - every error must reach the other ranks, which wait
        return None, error
