"""Data loading in a job: a DataLoader whose number of workers changes in mid-epoch, and a cache that never evicts.

    from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader

Importing this package does not import torch; the names do on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.sidecar.client.data.cache import CachedDataset
    from cadenza.sidecar.client.data.elastic_loader import ElasticDataLoader, workers_for
    from cadenza.sidecar.client.data.item_store import Stats
    from cadenza.sidecar.client.data.shm_dirs import remove

__all__ = ["CachedDataset", "ElasticDataLoader", "Stats", "remove", "workers_for"]

_HOMES = {
    "CachedDataset": "cache",
    "ElasticDataLoader": "elastic_loader",
    "Stats": "item_store",
    "remove": "shm_dirs",
    "workers_for": "elastic_loader",
}


def __getattr__(name: str) -> object:
    """Import a public name's module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
