"""Workers of a DataLoader that live on from epoch to epoch, whose random numbers no checkpoint can bring back."""

from __future__ import annotations

import gc

from torch.utils.data import DataLoader

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
