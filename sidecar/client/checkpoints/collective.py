"""Collective work of the job's ranks: each phase of a save or restore succeeds on all of them or fails on all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from cadenza.sidecar.client.errors import CheckpointError

T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""Longest wait for a rank that still writes. A dead rank ends the wait at once, because its connection closes."""
PATIENCE_S = 60.0
"""Longest wait for a rank that has not come to a collective call, by default."""
SCRIPT = "script"
"""The series of the calls that the script itself makes."""
MAX_NAMED = 8
"""Ranks that an error names."""
_MET = "met"
_COLLECTIVE = "it is a collective call, which all ranks must make"
_REMEDY = (
    "; where one rank does something alone before it, such as an evaluation, have all wait for that in "
    "torch.distributed.barrier(), or give client.checkpoint() a longer patience_s"
)
_made = itertools.count(1)
"""Numbers of this process's keepers, the same on every rank."""


class Ranks:
    """The process's rank and the others; without an initialized torch.distributed there are no others.

    The constructor is a collective call. It makes a separate gloo group, so that a save in a thread never mixes with
    the collectives of the training.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience = timedelta(seconds=patience_s)
        self.rank, self.size = 0, 1
        self.group: distributed.ProcessGroup | None = None
        self._store: Any = None
        self._calls: dict[str, int] = {}
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
            if self.size > 1:
                store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
                self._store = distributed.distributed_c10d.PrefixStore(f"cadenza.checkpoint/{next(_made)}", store)
                self.roll_call("client.checkpoint()")
            # gloo needs no GPU: a job saves also while its state is away from there.
            self.group = distributed.new_group(backend="gloo", timeout=TIMEOUT)

    def roll_call(self, call: str, *, series: str = SCRIPT) -> None:
        """Wait until all ranks have made this collective call; CheckpointError names the one that has not in time.

        It needs no collective, which the missing rank may be in as a part of its training, but the store of the
        process group. All ranks come to one verdict: a rank that is late gets the same error. Calls that only the
        agent's message makes collective are a ``series`` of their own.
        """
        if self._store is None:
            return
        number = self._calls[series] = self._calls.get(series, 0) + 1
        try:
            verdict = self._verdict(self._store, f"{series}/{number}", call, _REMEDY if series == SCRIPT else "")
            if verdict == _MET and self.rank == 0 and number > 1:  # all have left the call before
                for name in ("call", "count", "verdict", *map(str, range(self.size))):
                    self._store.delete_key(f"{series}/{number - 1}/{name}")
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise CheckpointError(f"{call}: the store of the process group does not answer: {text}") from error
        if verdict != _MET:
            raise CheckpointError(verdict)

    def _verdict(self, store: Any, key: str, call: str, remedy: str) -> str:
        """Make a rank's call known, and return what became of it: _MET, or an error's text."""
        patience = self.patience
        store.set(f"{key}/{self.rank}", call)
        if (first := _text(store.compare_set(f"{key}/call", "", call))) != call:
            text = f"rank {self.rank} called {call} where another rank called {first}: {_COLLECTIVE}"
            return _text(store.compare_set(f"{key}/verdict", "", text))
        if store.add(f"{key}/count", 1) == self.size:
            return _text(store.compare_set(f"{key}/verdict", "", _MET))
        try:
            store.wait([f"{key}/verdict"], patience)
        except RuntimeError:
            absent = [str(rank) for rank in range(self.size) if not store.check([f"{key}/{rank}"])]
            ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent[:MAX_NAMED])}"
            have = "has" if len(absent) == 1 else "have"
            text = f"{ranks} {have} not called {call} within {patience.total_seconds():g} s: {_COLLECTIVE}{remedy}"
            return _text(store.compare_set(f"{key}/verdict", "", text if absent else _MET))
        return _text(store.get(f"{key}/verdict"))

    # --- a message that no rank waits for ------------------------------------------------------------------

    def publish(self, name: str, value: int) -> None:
        """Let all ranks know a number, without a collective."""
        if self._store is not None:
            self._store.set(f"published/{name}", str(value))

    def published(self, name: str) -> int | None:
        """Return a number that a rank has published, None if there is none yet."""
        key = f"published/{name}"
        if self._store is None or not self._store.check([key]):
            return None
        return int(_text(self._store.get(key)))

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


def _text(value: bytes | str) -> str:
    """Return a store's value as text."""
    return value if isinstance(value, str) else value.decode()
