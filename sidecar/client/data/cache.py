"""CachedDataset: a cache that never evicts, over any map-style dataset, shared by a job's ranks and workers."""

from __future__ import annotations

import logging
import operator
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from cadenza.sidecar.client.data import item_codec
from cadenza.sidecar.client.data.item_store import Stats, Store, create
from cadenza.sidecar.client.data.shm_dirs import SHARED_MEMORY, CacheDirectory, job_key
from cadenza.sidecar.client.errors import DataUsageError, NotStorableError
from cadenza.sidecar.client.session import resources
from cadenza.sidecar.client.zip_equal import zip_equal

MIB = 1 << 20

_log = logging.getLogger("cadenza.client")


class CachedDataset(Dataset[Any]):
    """A cache that keeps items from their first read while they fit into ``budget`` bytes, so each epoch hits as many.

    It is MinIO, the cache of CoorDL (Mohan et al., VLDB 2021), which Synergy builds on. ``directory`` is a
    file system in memory or on the node's own disk; the files lie below it in ``cadenza-UID-JOB/NAME``, mode 0700,
    one copy for all processes of the job on this node. They are removed when the last rank has ended or called
    ``close()``, and by :func:`.shm_dirs.remove`. Memory there counts as the job's: the budget is part of the job's
    memory. The first rank's budget counts; ``resize()`` changes it for all. When the agent sets an amount for the
    job's caches, the budget follows in place: the caches share the amount in proportion to their requested budgets,
    and each rank must open the same caches.

    Wrap steps that take time and have the same result each time: reading and decoding. ``transform`` is applied
    behind the cache to each item read, so put random augmentation there. Items that the format (:mod:`.item_codec`)
    cannot store are served uncached, with one warning. Items are named by their index, from 0 to ``len - 1``.

    Raises CacheUnsafeError when other users can reach the directory, DataUsageError when the job has another
    dataset under this name. If there is no room for the cache's files at all, it warns and caches nothing.
    """

    def __init__(
        self,
        dataset: Any,
        budget: int,
        directory: str | Path = SHARED_MEMORY,
        *,
        name: str = "data",
        job: str | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self._length = len(dataset)
        self._warned = False
        self._requested = _checked_budget(budget)
        self._follows = False
        """True while the agent sets the caches' amount; afterwards they have their requested budgets again."""
        place = CacheDirectory(directory, job or job_key(), name)
        self._store = self._open(place, self._requested)
        self._leave = weakref.finalize(self, place.leave)
        """Runs at the end of this object or of the process; a forked child has left the directory already."""
        _caches.add(self)
        resources.register(self)
        for cache in list(_caches):
            resources.update(cache)  # the others' shares are smaller now

    def _open(self, place: CacheDirectory, budget: int) -> Store | None:
        """Open the shared files, and make them in the first process; return None when that is impossible."""
        label = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"
        kind = zlib.crc32(label.encode())
        try:
            place.enter(lambda path: create(path, self._length, kind, budget))
            store = Store(place.path)
            store.check(self._length, kind, label)
        except OSError as error:
            _log.warning("nothing is cached, %s cannot be used: %s", place.path, error)
            place.leave()
            return None
        except DataUsageError:
            place.leave()
            raise
        return store

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, which uses the rank's directory without keeping it."""
        return {**vars(self), "_leave": _leave_nothing}

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch's items; those that are not cached are read together if the dataset can do that."""
        # 1. Open the files in a new process; continue without them if they were removed.
        if self._store is not None:
            try:
                self._store.open()
            except OSError as error:
                _log.warning("nothing is cached any more: %s", error)
                self._store = None
        # 2. Take the cached items.
        numbers = [self._number(index) for index in indices]
        payloads = [self._store.read(number) if self._store is not None and number >= 0 else None for number in numbers]
        items = [_ABSENT if payload is None else item_codec.decode(payload) for payload in payloads]
        missing = [at for at, item in enumerate(items) if item is _ABSENT]
        # 3. Read the others from the dataset, together if it can do that, and offer them to the cache.
        read_together = getattr(self.dataset, "__getitems__", None)
        wanted = [indices[at] for at in missing]
        fresh = read_together(wanted) if read_together and wanted else [self.dataset[index] for index in wanted]
        unfit = 0
        for at, item in zip_equal(missing, fresh):
            items[at] = item
            unfit += not self._keep(numbers[at], item)
        # 4. Count hits and misses, and apply the transform.
        if self._store is not None:
            self._store.count(len(items) - len(missing), len(missing), unfit)
        return items if self.transform is None else [self.transform(item) for item in items]

    def _number(self, index: object) -> int:
        """Return the cache's number of an index; -1 for an index that it does not have."""
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except TypeError:
            return -1
        return number if 0 <= number < self._length else -1

    def _keep(self, number: int, item: object) -> bool:
        """Offer an item to the cache; return False when its format cannot store it."""
        if self._store is None or number < 0 or not self._store.room:
            return True
        try:
            self._store.offer(number, item_codec.encode(item))
        except NotStorableError as error:
            if not self._warned:
                _log.warning("item %d, and others like it, are not cached: they contain %s", number, error)
            self._warned = True
            return False
        return True

    def resize(self, budget: int) -> None:
        """Change the budget in place, in bytes, for all processes of the job on this node.

        A lower budget frees the memory at once: the items added last go, until the rest fits. A higher one, or the
        same one after memory ran short, admits further items as they are read.
        """
        budget = _checked_budget(budget)
        if self._store is not None:
            self._store.resize(budget)

    def tuned(self, tuning: resources.Tuning, ranks: int) -> None:  # noqa: ARG002 (a node's ranks have one copy)
        """Follow the amount for the job's caches on this node."""
        if self._store is None or (tuning.cache_mb is None and not self._follows):
            return
        self._follows = tuning.cache_mb is not None
        requested = sum(cache._requested for cache in _caches if cache._store is not None)  # noqa: SLF001
        amount = requested if tuning.cache_mb is None else tuning.cache_mb * MIB
        budget = amount * self._requested // max(1, requested)
        try:
            if budget != self._store.stats().budget:
                self._store.resize(budget)
        except OSError as error:
            _log.warning("the budget of a cache stays as it was: %s", error)

    def stats(self) -> Stats:
        """Return the cache's contents and hits, of all processes on this node together."""
        if self._store is None:
            return Stats(self._length, items=0, used=0, budget=0, hits=0, misses=0, unfit=0, short=True)
        return self._store.stats()

    def close(self) -> None:
        """Stop using the cache: reads go to the dataset. The last rank to close removes the files."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self._leave()


def _checked_budget(budget: int) -> int:
    """Return a budget in bytes; raise DataUsageError for a negative one."""
    if budget < 0:
        raise DataUsageError(f"a cache's budget is a number of bytes from 0 on, not {budget}")
    return int(budget)


def _leave_nothing() -> None:
    """Do nothing at the end of a copy in another process."""


_ABSENT = object()
_caches: weakref.WeakSet[CachedDataset] = weakref.WeakSet()
"""The caches of this process."""
