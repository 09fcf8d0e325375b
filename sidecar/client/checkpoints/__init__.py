"""Checkpoints of a training job: for requeue, for another node, for another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.checkpoints.checkpoint import Checkpoint
from cadenza.sidecar.client.checkpoints.parts import own_parts, parts_of
from cadenza.sidecar.client.checkpoints.resumable_sampler import ResumableSampler
from cadenza.sidecar.client.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    SaveError,
    VersionError,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedError",
    "MismatchError",
    "ResumableSampler",
    "SaveError",
    "VersionError",
    "checkpoint",
]


def checkpoint(  # noqa: PLR0913 - one for each kind of thing that a job has
    directory: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    scheduler: Any = None,
    sampler: Any = None,
    own: Any = None,
    background: bool = False,
) -> Checkpoint:
    """Return the checkpoint of a job in a directory: ``restore()`` before training, ``save(step)`` between steps.

    ``model``, ``optimizer``, ``scaler`` (a GradScaler) and ``scheduler`` are one object or a list. ``own`` is further
    state, by name in a mapping or in a list: modules such as an EMA copy, tensors, mutable mappings of plain values,
    and anything with ``state_dict`` and ``load_state_dict``. ``sampler`` is a ResumableSampler, or anything with
    these two methods whose state is plain JSON. Random number generators are always saved.

    The state is the same on every rank (DDP) or consists of DTensors (``fully_shard``), except for random numbers and
    positions. With several ranks this and all methods are collective calls after init_process_group, and all nodes
    see the directory; one job uses it at a time. ``background`` writes while training continues, and takes one more
    copy of the state in host memory. Raises UsageError for an object without state.
    """
    given = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    parts = {name: part for kind, things in given.items() for name, part in parts_of(kind, things).items()}
    parts.update(own_parts(own))
    return Checkpoint(Path(directory), parts, sampler, background=background)
