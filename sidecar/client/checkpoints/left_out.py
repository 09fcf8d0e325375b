"""What trains and is in no keeper, such as an optimizer made later than it: a restore does not bring it back.

It is compared where the steps of all optimizers are followed for a few boundaries, seldom, and said once for each kind.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cadenza.sidecar.client.checkpoints.round_trip import NotTriedError, objects_in

SCHEDULERS = (LRScheduler, ReduceLROnPlateau)

_log = logging.getLogger("cadenza.client")
_told: set[str] = set()


class LeftOut:
    """Compares a process's training with what its keepers hold: at the first sample, and after twice as many again."""

    def __init__(self) -> None:
        self._samples = 0

    def look(self, stepping: Sequence[optim.Optimizer], held: Iterable[object]) -> None:
        """Warn of optimizers that step, of their schedulers and of their parameters that nothing held has."""
        self._samples += 1
        if self._samples & (self._samples - 1):
            return
        try:
            kept = _reached(held)
        except NotTriedError:
            return
        for optimizer in stepping:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            absent = sum(id(param) not in kept for param in params)
            if id(optimizer) not in kept:
                _tell(f"the state of an optimizer that steps ({type(optimizer).__qualname__}); give it as optimizer=")
            elif 0 < absent < len(params):  # where all are absent they are copies of its own
                _tell(f"{absent} parameters that {type(optimizer).__qualname__} trains; give their module as model=")
        ids = {id(optimizer) for optimizer in stepping}
        for thing in gc.get_objects():
            if issubclass(type(thing), SCHEDULERS) and id(thing) not in kept and id(thing.optimizer) in ids:
                _tell(f"the state of a {type(thing).__qualname__}; give it as scheduler=")


def _tell(what: str) -> None:
    """Warn once of something that a restore leaves out."""
    if what not in _told:
        _told.add(what)
        _log.warning("a restore will not bring back %s of client.checkpoint(), or make the keeper after it", what)


def _reached(held: Iterable[object]) -> set[int]:
    """Return the ids of all that the things held save: a module saves no optimizer that it refers to, for example."""
    found: set[int] = set()
    for thing in held:
        kinds: tuple[type, ...] = (optim.Optimizer, torch.Tensor, *SCHEDULERS)
        for kind, saves in ((nn.Module, torch.Tensor), (optim.Optimizer, optim.Optimizer), (SCHEDULERS, SCHEDULERS)):
            if isinstance(thing, kind):
                kinds = saves if isinstance(saves, tuple) else (saves,)
        found.add(id(thing))
        found.update(id(one) for kind in kinds for one in objects_in(thing, kind))
    return found
