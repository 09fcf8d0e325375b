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
from cadenza.sidecar.client.data.errors import DataUsageError, NotStorableError
from cadenza.sidecar.client.data.item_store import Stats, Store, create
from cadenza.sidecar.client.data.shm_dirs import SHARED_MEMORY, Place, job_key
from cadenza.sidecar.client.session import resources

MIB = 1 << 20

_log = logging.getLogger("cadenza.client")


class CachedDataset(Dataset[Any]):
    """Items are kept on their first read while they fit into ``budget`` bytes, and stay: each epoch hits as many.

    That is MinIO, the cache of CoorDL (Mohan et al., VLDB 2021), which Synergy builds on. ``directory`` is a
    file system in memory or on the node's own disk; the files lie below it in ``cadenza-UID-JOB/NAME``, mode 0700,
    one copy for all processes of the job on this node. They are gone when the last rank has ended or has called
    ``close()``, and with :func:`.places.remove`. Memory there counts as the job's: the budget is part of the job's
    memory. The first rank's budget counts; ``resize()`` changes it for all. When the agent gives the job an amount
    for its caches the budget follows in place: the job's caches share it in proportion to what they asked for.
    Each rank must open the same caches then.

    Wrap what costs time and is the same each time: reading and decoding. ``transform`` is applied behind the cache
    to each item read, so put random augmentation there. Items that the format (:mod:`.codec`) does not know are
    served uncached, with a warning once. Items are named by their index, from 0 to ``len - 1``.

    Raises CacheUnsafeError when the place is not this user's alone, DataUsageError when the job has another
    dataset under this name. Where there is no room for the cache's files at all it warns, and caches nothing.
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
        self._asked = _budget(budget)
        self._follows = False
        """Whether the agent says what the caches may take; when it does not any more, they have what they asked for."""
        place = Place(directory, job or job_key(), name)
        self._store = self._open(place, self._asked)
        self._leave = weakref.finalize(self, place.leave)
        """Runs at the end of this object or of the process; a forked child's place has been left already."""
        _caches.add(self)
        resources.register(self)
        for cache in list(_caches):
            resources.update(cache)  # the others' shares are smaller now

    def _open(self, place: Place, budget: int) -> Store | None:
        """Come to use the shared files, made if this is the first process to; None when that is impossible."""
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
        """Return what a spawned worker needs; it uses the rank's place, and does not keep it."""
        return {**vars(self), "_leave": _nothing}

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch's items; those that are not cached are read together if the dataset can do that."""
        self._check_store()
        numbers = [self._number(index) for index in indices]
        items = [self._cached(number) for number in numbers]
        missing = [at for at, item in enumerate(items) if item is _ABSENT]
        unfit = 0
        for at, item in zip(missing, self._read([indices[at] for at in missing]), strict=True):
            items[at] = item
            unfit += not self._keep(numbers[at], item)
        if self._store is not None:
            self._store.count(len(items) - len(missing), len(missing), unfit)
        return items if self.transform is None else [self.transform(item) for item in items]

    def _check_store(self) -> None:
        """Open the files in a new process; go on without them when somebody has removed them."""
        if self._store is None:
            return
        try:
            self._store.open()
        except OSError as error:
            _log.warning("nothing is cached any more: %s", error)
            self._store = None

    def _number(self, index: object) -> int:
        """Return an index as the number that the cache knows an item by; -1 for one that it does not."""
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except TypeError:
            return -1
        return number if 0 <= number < self._length else -1

    def _cached(self, number: int) -> Any:
        """Return an item from the cache, or _ABSENT."""
        payload = self._store.read(number) if self._store is not None and number >= 0 else None
        return _ABSENT if payload is None else item_codec.decode(payload)

    def _read(self, indices: list[Any]) -> Sequence[Any]:
        """Return items of the dataset itself."""
        together = getattr(self.dataset, "__getitems__", None)
        if together and indices:
            return together(indices)  # type: ignore[no-any-return]
        return [self.dataset[index] for index in indices]

    def _keep(self, number: int, item: object) -> bool:
        """Offer an item to the cache; False when its format cannot hold it."""
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

        A lower one frees the memory at once: the items that came last go, until the rest fits. A higher one, or the
        same again after memory ran short, admits further items as they are read.
        """
        budget = _budget(budget)
        if self._store is not None:
            self._store.resize(budget)

    def tuned(self, tuning: resources.Tuning, ranks: int) -> None:  # noqa: ARG002 (a node's ranks have one copy)
        """Follow what the job has for its caches on this node."""
        if self._store is None or (tuning.cache_mb is None and not self._follows):
            return
        self._follows = tuning.cache_mb is not None
        asked = sum(cache._asked for cache in _caches if cache._store is not None)  # noqa: SLF001
        amount = asked if tuning.cache_mb is None else tuning.cache_mb * MIB
        budget = amount * self._asked // max(1, asked)
        try:
            if budget != self._store.stats().budget:
                self._store.resize(budget)
        except OSError as error:
            _log.warning("the budget of a cache stays as it was: %s", error)

    def stats(self) -> Stats:
        """Return what is cached and how often it helped, of all processes on this node together."""
        if self._store is None:
            return Stats(self._length, items=0, used=0, budget=0, hits=0, misses=0, unfit=0, short=True)
        return self._store.stats()

    def close(self) -> None:
        """Use the cache no more: reads go to the dataset. The last rank to close removes the files."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self._leave()


def _budget(budget: int) -> int:
    """Return a budget in bytes; raise DataUsageError for none."""
    if budget < 0:
        raise DataUsageError(f"a cache's budget is a number of bytes from 0 on, not {budget}")
    return int(budget)


def _nothing() -> None:
    """Leave nothing: for a copy in another process."""


_ABSENT = object()
_caches: weakref.WeakSet[CachedDataset] = weakref.WeakSet()
"""Those of this process."""
