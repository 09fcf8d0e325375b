"""Staging of state dicts: tensors are copied to host memory, other values are checked to be safe to load."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Any

import torch

from cadenza.sidecar.client.checkpoints.step_units import Restored
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.offload import device

SHARDED = "cadenza.sharded"
"""Key of a mapping that stands for a sharded tensor, which is saved elsewhere under the key's value."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Staging:
    """Copies of tensors in host memory; with ``keep``, the live tensors may change while the copies are written.

    With ``keep`` the next save reuses the memory, which is pinned for tensors on a GPU: it costs one copy of the
    state. Without it, only tensors that are not in host memory, or are parts of a larger storage, are copied.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._copies: dict[str, torch.Tensor] = {}
        self._taken: dict[tuple[Any, ...], torch.Tensor] = {}
        self.sharded: dict[str, torch.Tensor] = {}
        """The DTensors of the last state taken, by name."""

    @property
    def keeps(self) -> bool:
        """True if the live tensors may change while the copies are written."""
        return self._keep

    def begin(self) -> None:
        """Forget the tensors of the last state, to take another one."""
        self._taken, self.sharded = {}, {}

    def finish(self) -> None:
        """Wait until all copies are complete."""
        for place in {key[0] for key in self._taken}:
            if accelerator := device.of(place):
                accelerator.synchronize(place)
        self._taken = {}

    def take(self, value: Any, name: str) -> Any:
        """Return a value's copy; raise UsageError for a type that ``torch.load(weights_only=True)`` would refuse."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), name)
        if type(value) in (dict, OrderedDict, Counter) or _is_default_dict(value):
            kind = dict if _is_default_dict(value) else type(value)
            return kind({_plain(key, name): self.take(item, f"{name}.{key}") for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(self.take(item, f"{name}[{index}]") for index, item in enumerate(value))
        return _plain(value, name)

    def _tensor(self, tensor: torch.Tensor, name: str) -> Any:
        """Return a tensor's copy, one for all tensors with the same memory; a sharded one is saved separately."""
        if is_sharded(tensor):
            # With ``keep`` its local part must not change during the write.
            copy = tensor if not self._keep else tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
            self.sharded[name] = copy
            return {SHARDED: name, "dtype": tensor.dtype, "size": list(tensor.shape)}
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
            kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else str(tensor.layout)
            raise UsageError(f"{name} is a tensor of a kind that cannot be saved ({kind} on {tensor.device})")
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._taken or not tensor.numel():
            self._taken[key] = self._copy(tensor, name)
        return self._taken[key]

    def _copy(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a copy in host memory, complete after ``finish``, or the tensor itself if it needs no copy."""
        if not self._keep:
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            return tensor if tensor.device.type == "cpu" and whole else tensor.to("cpu", copy=True)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.stride(), copy.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            pinned = device.of(tensor.device) is not None
            copy = self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        # Only a copy to pinned memory runs while the host goes on.
        return copy.copy_(tensor, non_blocking=True)


def is_sharded(tensor: object) -> bool:
    """Return whether this is a DTensor; there are none before torch.distributed.tensor is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_shard(value: object) -> bool:
    """Return whether a value stands for a sharded tensor."""
    return isinstance(value, dict) and SHARDED in value


def as_shards(value: torch.Tensor, live: Any) -> torch.Tensor:
    """Return a plain tensor, the same on every rank, cut like a DTensor."""
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - loaded, as live is one

    mesh = live.device_mesh
    # Without a source rank torch makes no collective of it: each rank has read the whole tensor.
    return distribute_tensor(value.to(mesh.device_type), mesh, live.placements, src_data_rank=None)


def _is_default_dict(value: object) -> bool:
    """Return whether this is a defaultdict, which optimizers return and a dict can replace."""
    return type(value).__name__ == "defaultdict" and isinstance(value, dict)


def _plain(value: Any, name: str) -> Any:
    """Return a plain value, with numpy's scalars as Python's."""
    if type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value)):
        return value
    if isinstance(value, Restored):  # as a script keeps the step at which it went on
        return int(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    raise UsageError(
        f"{name} is a {type(value).__qualname__}, which cannot be restored without running code from the file; "
        "make state_dict() return tensors, numbers, text, and lists or dicts of these"
    )
