"""Checkpoints of a training job: for requeue, for another node, for another number of ranks."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from cadenza.sidecar.client.bootstrap.rehearsal_record import place
from cadenza.sidecar.client.checkpoints.checkpoint import Checkpoint
from cadenza.sidecar.client.checkpoints.collective import PATIENCE_S
from cadenza.sidecar.client.checkpoints.parts import own_parts, parts_of
from cadenza.sidecar.client.checkpoints.resumable_sampler import ResumableSampler
from cadenza.sidecar.client.checkpoints.step_units import Restored
from cadenza.sidecar.client.errors import (
    CheckpointError,
    DamagedError,
    InUseError,
    LostCheckpointError,
    MismatchError,
    OtherJobError,
    SaveError,
    VersionError,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedError",
    "InUseError",
    "LostCheckpointError",
    "MismatchError",
    "OtherJobError",
    "Restored",
    "ResumableSampler",
    "SaveError",
    "VersionError",
    "checkpoint",
]

_log = logging.getLogger("cadenza.client")
_told: list[bool] = []


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
    patience_s: float = PATIENCE_S,
) -> Checkpoint:
    """Return the checkpoint of a job in a directory: ``restore()`` before training, ``save(step)`` between steps.

    ``model``, ``optimizer``, ``scaler`` (a GradScaler) and ``scheduler`` are one object or a list. ``own`` is further
    state, by name in a mapping or in a list: modules such as an EMA copy, tensors, mutable mappings of plain values,
    random number generators (torch's, NumPy's and Python's), and anything with ``state_dict`` and
    ``load_state_dict``. ``sampler`` is a ResumableSampler, or anything with
    these two methods whose state is plain JSON. The global random number generators are always saved.

    The state is the same on every rank (DDP) or consists of DTensors (``fully_shard``), except for random numbers and
    positions. With several ranks this and all methods are collective calls after init_process_group, and all nodes
    see the directory; it belongs to one job, and one process of it writes at a time. ``background`` writes while
    training continues, and takes one more copy of the state in host memory. Raises UsageError for an object without
    state, and CheckpointError, which names the rank, when one does not call this, or a later method, within
    ``patience_s``: set it where one rank alone does something longer before, such as an evaluation.
    """
    given = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    parts = {name: part for kind, things in given.items() for name, part in parts_of(kind, things).items()}
    others, generators = own_parts(own)
    parts.update(others)
    folder = place(Path(directory).absolute())
    made = Checkpoint(folder, parts, generators, sampler, background=background, patience_s=patience_s)
    _tell_once(sampler, own)
    return made


def _tell_once(sampler: Any, own: Any) -> None:
    """Say, at a job's first keeper, what a restore will not bring back; a requeue does not say it again."""
    if _told or (os.environ.get("SLURM_RESTART_COUNT") or "0") != "0":
        return
    _told.append(True)
    loaders = [one for one in gc.get_objects() if type(one) is DataLoader] if sampler is None else []
    seeded = any(one.generator is not None or getattr(one.sampler, "generator", None) is not None for one in loaders)
    absent = ["the position in the data (sampler=)"] if sampler is None else []
    absent += ["the generator of a DataLoader (own=)"] if seeded and own is None else []
    absent += (
        ["anything else of the script's own, such as best values, an EMA, generators or a batch fetched ahead (own=)"]
        if own is None
        else []
    )
    if absent:
        _log.log(
            logging.WARNING if loaders else logging.INFO,
            "a restore brings back what this checkpoint was given, and not %s",
            "; nor ".join(absent),
        )
