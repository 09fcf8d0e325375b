"""Facts of the script's DataLoaders for its checkpoints: workers that live on, and the ends of epochs."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

IDLE = 8
"""Boundaries in a row at which an iterator was at its end: the script keeps it, and takes no batches from it."""

LIVING = (
    "a DataLoader keeps its workers (persistent_workers=True): their random numbers would not come back, and it draws "
    "once more from torch's generator after a restore, so that the order of the data changes: use "
    "persistent_workers=False"
)


def living_workers() -> str:
    """Return the reason why a job cannot be moved if some DataLoader keeps its workers; it looks at all objects."""
    loaders = [one for one in gc.get_objects() if issubclass(type(one), DataLoader)]
    own_state = "load_state_dict"  # such a loader brings its workers' random numbers back by itself
    return LIVING if any(one.persistent_workers and not hasattr(one, own_state) for one in loaders) else ""


class LoaderEnds:
    """Says at boundaries whether a DataLoader has just handed out its last batch: work of that epoch is to come.

    It looks at all objects, so it is asked only where everything else is right for a checkpoint.
    """

    def __init__(self) -> None:
        self._ended: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        """Iterators that were at their end, and at how many boundaries."""

    def here(self) -> bool:
        """Return whether an iterator of this process is at its end, as far as it has a length."""
        if (known := accelerate_at_end()) is not None:
            return known
        elastic = sys.modules.get("cadenza.sidecar.client.data.elastic_loader")
        kinds = (_BaseDataLoaderIter, *([elastic.Epoch] if elastic else []))
        ended = [one for one in gc.get_objects() if issubclass(type(one), kinds) and _is_at_end(one)]
        for one in ended:
            self._ended[one] = self._ended.get(one, 0) + 1
        return any(self._ended[one] <= IDLE for one in ended)


def accelerate_at_end() -> bool | None:
    """Return whether Accelerate has handed out the last batch of an epoch; None outside of its loaders.

    It fetches a batch ahead, and so knows which is the last of data without a length, too.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not getattr(accelerate.GradientState, "_shared_state", None):
        return None
    state = accelerate.GradientState()
    return bool(state.end_of_dataloader) if state.in_dataloader else None


def _is_at_end(iterator: Any) -> bool:
    """Return whether an iterator has handed out all batches; one without a length has not."""
    try:
        # The iterator of a DataLoader counts the batches that it has handed out; those read ahead are not in it.
        return bool(iterator._num_yielded >= len(iterator))  # noqa: SLF001
    except (TypeError, NotImplementedError, AttributeError):
        return False
