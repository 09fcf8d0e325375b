"""What frameworks keep on a device beside parameters and buffers: containers in modules, batches, wrappers."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch

CONTAINERS = (list, tuple, dict, set)


def containers(module: torch.nn.Module) -> dict[str, object]:
    """Return the lists, dicts and tuples that a module and its children keep as plain attributes, by name.

    Metrics that collect, and the outputs that a LightningModule gathers for the end of an epoch, are kept so.
    """
    return {
        f"{path}.{key}" if path else key: value
        for path, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, CONTAINERS) and value and not key.startswith("_")
    }


def wrapper(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the DistributedDataParallel around a module, whose gradient buckets a stop must know of, if any."""
    kind = torch.nn.parallel.DistributedDataParallel
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), kind))
    return next((one for one in found if one.module is module), None)


def samples_in(batch: object) -> int:
    """Return the length of a batch's first tensor, 0 when it has none.

    >>> samples_in({"text": torch.zeros(4, 7), "label": torch.zeros(4)})
    4
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, (list, tuple)):
        return next(filter(None, map(samples_in, parts)), 0)
    return 0
