"""Collective work of the job's ranks: each phase of a save or restore succeeds on all of them or fails on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from cadenza.sidecar.client.errors import CheckpointError

T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""Longest wait for a rank that still writes. A dead rank ends the wait at once, because its connection closes."""


class Ranks:
    """The process's rank and the others; without an initialized torch.distributed there are no others.

    The constructor is a collective call. It makes a separate gloo group, so that a save in a thread never mixes with
    the collectives of the training.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.group: distributed.ProcessGroup | None = None
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
            self.group = distributed.new_group(backend="gloo", timeout=TIMEOUT)

    def barrier(self, timeout: timedelta) -> None:
        """Wait until all ranks have come here; CheckpointError names those that have not in time.

        It is for calls that only the agent's message makes collective. If one rank did not receive the message, the
        others must not wait in a collective while that rank waits for them in one of the training.
        """
        if self.group is None:
            return
        try:
            distributed.monitored_barrier(self.group, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(f"not all ranks came to save: {str(error).splitlines()[0]}") from error

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of ranks, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def all_ranks(self, work: Callable[[], T]) -> T:
        """Do work without collectives on every rank; return its value here.

        A failure on any rank raises on every rank: the rank's own error where the work failed, elsewhere a
        CheckpointError that names the rank and the cause.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - every error must reach the other ranks, which wait
            failure = error
        failures = self.gather("" if failure is None else str(failure) or repr(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")
        return value  # type: ignore[return-value]

    def rank_0(self, work: Callable[[], T]) -> T:
        """Do work on rank 0 only, and return its value on every rank; it fails like ``all_ranks``."""
        value = self.all_ranks(lambda: work() if self.rank == 0 else None)
        result: T = self.gather(value)[0]  # type: ignore[assignment]
        return result
