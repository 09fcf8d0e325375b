"""Parts of a checkpoint: models, optimizers, everything with a state_dict; captured, checked, restored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn

from cadenza.sidecar.client.checkpoints.optimizers import OptimizerPart
from cadenza.sidecar.client.checkpoints.staging import SHARDED, as_shards, is_shard, is_sharded
from cadenza.sidecar.client.errors import MismatchError, UsageError

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


class Part(Protocol):
    """One object of the job. ``check`` raises MismatchError; after it, ``restore`` changes the object in place."""

    def capture(self) -> dict[str, Any]:
        """Return its state: the live tensors themselves, and plain values."""

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return tensors to read sharded ones into, by their saved names."""

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise MismatchError, naming the key, when the saved state does not fit."""

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Set the object to its saved state; ``read`` are the targets with their content."""


class ModelPart:
    """A module: parameters and buffers stay the same objects; each value is copied into its tensor."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, _unwrapped(name, module)

    def capture(self) -> dict[str, Any]:
        """Return the module's state dict, with the versions of its modules' parts."""
        state = self._module.state_dict()
        return {"state": dict(state), "versions": dict(getattr(state, "_metadata", {}))}

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the live tensors where sharded ones were saved."""
        live = self._module.state_dict()
        return {value[SHARDED]: live[key] for key, value in saved["state"].items() if is_shard(value)}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare names, shapes and dtypes."""
        live = self._module.state_dict()
        absent, added = saved["state"].keys() - live.keys(), live.keys() - saved["state"].keys()
        for keys, text in ((absent, "this job lacks"), (added, "it lacks")):
            if keys:
                more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
                raise MismatchError(f"{self._name}: the checkpoint does not fit, {text} {min(keys)}{more}")
        for key, value in saved["state"].items():
            if isinstance(live[key], torch.Tensor):
                _same_form(f"{self._name}: {key}", value, live[key])

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Copy the values into the module."""
        live = self._module.state_dict()
        state = OrderedDict((key, _as_live(value, live[key], read)) for key, value in saved["state"].items())
        state._metadata = OrderedDict(saved["versions"])  # type: ignore[attr-defined]  # noqa: SLF001 - where torch looks
        self._module.load_state_dict(state, strict=True)


class StatefulPart:
    """A GradScaler, an LR scheduler, or anything else with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name, self._thing = name, thing

    def capture(self) -> dict[str, Any]:
        """Return the object's state and class name."""
        state = self._thing.state_dict()
        for key, value in _items(state):
            if not isinstance(value, torch.Tensor):
                _no_shards(f"{self._name}.{key}", value)
        return {"type": type(self._thing).__qualname__, "state": state}

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the live tensors where sharded ones were saved."""
        live = self._thing.state_dict() if _has_shards(saved["state"]) else {}
        return {value[SHARDED]: live[key] for key, value in _items(saved["state"]) if is_shard(value)}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare the class names, and whether a scaler is enabled."""
        here = type(self._thing).__qualname__
        if saved.get("type") != here:
            raise MismatchError(f"{self._name}: the checkpoint has a {saved.get('type')}, this job a {here}")
        if isinstance(self._thing, torch.amp.GradScaler) and bool(saved["state"]) != self._thing.is_enabled():
            raise MismatchError(f"{self._name}: it is enabled in one of checkpoint and job, and not in the other")

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Load a copy of the state, so that the object keeps no part of the file."""
        state = saved["state"]
        if _has_shards(state):
            state = {key: read[value[SHARDED]] if is_shard(value) else value for key, value in state.items()}
        self._thing.load_state_dict(_copied(state))


class TensorPart:
    """A tensor of the job's own."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor = name, tensor

    def capture(self) -> dict[str, Any]:
        """Return the tensor."""
        return {"state": self._tensor}

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensor if it was saved as a sharded one."""
        return {saved["state"][SHARDED]: self._tensor} if is_shard(saved["state"]) else {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare shape and dtype."""
        _same_form(self._name, saved["state"], self._tensor)

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Copy the value into the tensor."""
        with torch.no_grad():
            self._tensor.copy_(_as_live(saved["state"], self._tensor, read))


class ValuesPart:
    """A mapping of the job's own, such as ``{"best_loss": 0.3}``; it stays the same object."""

    def __init__(self, name: str, values: MutableMapping[str, Any]) -> None:
        self._name, self._values = name, values

    def capture(self) -> dict[str, Any]:
        """Return the mapping's items."""
        _no_shards(self._name, self._values)
        return {"state": dict(self._values)}

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:  # noqa: ARG002 - the protocol's
        """Return nothing: the values of a mapping are replaced."""
        return {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse anything but a mapping."""
        if not isinstance(saved["state"], Mapping):
            raise MismatchError(f"{self._name}: the checkpoint has something else here than a mapping of values")

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:  # noqa: ARG002
        """Replace the mapping's items."""
        self._values.clear()
        self._values.update(_copied(saved["state"]))


def parts_of(kind: str, things: object) -> dict[str, Part]:
    """Return parts by name: the kind for one object, the kind and an index in brackets for several."""
    if things is None:
        return {}
    if isinstance(things, (list, tuple)):
        return {f"{kind}[{index}]": part_of(f"{kind}[{index}]", thing) for index, thing in enumerate(things)}
    return {kind: part_of(kind, things)}


def own_parts(things: object) -> dict[str, Part]:
    """Return the parts of the user's own objects: a mapping by name, a list, or one object."""
    if isinstance(things, Mapping):
        return {f"own[{name!r}]": part_of(f"own[{name!r}]", thing) for name, thing in things.items()}
    return parts_of("own", things)


def part_of(name: str, thing: Any) -> Part:
    """Return an object's part; raise UsageError when it has no state that can be restored."""
    kinds: Iterable[tuple[type, Callable[[str, Any], Part]]] = (
        (nn.Module, ModelPart),
        (torch.optim.Optimizer, OptimizerPart),
        (torch.Tensor, TensorPart),
        (MutableMapping, ValuesPart),
    )
    for kind, make in kinds:
        if isinstance(thing, kind):
            return make(name, thing)
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return StatefulPart(name, thing)
    raise UsageError(f"{name}: a {type(thing).__qualname__} has no state_dict() and load_state_dict()")


def _unwrapped(name: str, module: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile, so that its names are those of a plain one."""
    if type(module).__name__ == "FullyShardedDataParallel":
        raise UsageError(f"{name}: FullyShardedDataParallel keeps flat shards; wrap the model with fully_shard()")
    inside = _WRAPPERS.get(type(module).__name__)
    return module if inside is None else _unwrapped(name, getattr(module, inside))


def _same_form(name: str, saved: Any, live: torch.Tensor) -> None:
    """Raise MismatchError unless a saved tensor has the shape and dtype of the live one."""
    if not (is_shard(saved) or isinstance(saved, torch.Tensor)):
        raise MismatchError(f"{name}: the checkpoint has a {type(saved).__name__}, this job a tensor")
    shape, dtype = (saved["size"], saved["dtype"]) if is_shard(saved) else (list(saved.shape), saved.dtype)
    if (shape, dtype) != (list(live.shape), live.dtype):
        raise MismatchError(
            f"{name}: the checkpoint has shape {shape} of {dtype}, this job {list(live.shape)} of {live.dtype}"
        )


def _as_live(value: Any, live: Any, read: Mapping[str, torch.Tensor]) -> Any:
    """Return a saved value in the live one's form: sharded tensors as read, plain ones cut into shards."""
    if is_shard(value):
        return read[value[SHARDED]]
    if not isinstance(live, torch.Tensor):
        return _copied(value)
    if is_sharded(live) and isinstance(value, torch.Tensor):
        return as_shards(value, live)
    return value


def _copied(value: Any) -> Any:
    """Return a deep copy: the restored object must not hold the checkpoint's file."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({key: _copied(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _no_shards(name: str, value: object) -> None:
    """Raise UsageError for sharded tensors that could not be restored."""
    if is_sharded(value):
        raise UsageError(f"{name} is a sharded tensor inside other values; register it as a tensor of its own")
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in inside:
        _no_shards(name, item)


def _items(state: Any) -> Iterable[tuple[Any, Any]]:
    """Return a state's items, none if it is not a mapping."""
    return state.items() if isinstance(state, Mapping) else ()


def _has_shards(state: Any) -> bool:
    """Return whether a state directly contains a sharded tensor."""
    return any(is_shard(value) for _, value in _items(state))
