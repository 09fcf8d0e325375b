"""Parts of a checkpoint: models, optimizers, everything with a state_dict; captured, checked, restored."""

from __future__ import annotations

import itertools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cadenza.sidecar.client.checkpoints.optimizers import OptimizerPart, is_standard
from cadenza.sidecar.client.checkpoints.staging import SHARDED, as_shards, is_shard, is_sharded
from cadenza.sidecar.client.errors import MismatchError, UsageError
from cadenza.sidecar.client.offload import device

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


class Part(Protocol):
    """One object of the job. ``check`` raises MismatchError; after it, ``restore`` changes the object in place."""

    @property
    def thing(self) -> Any:
        """The object."""

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
        self.thing: Any = self._module

    def capture(self) -> dict[str, Any]:
        """Return the module's state dict, with the versions of its modules' parts."""
        state = self._module.state_dict()
        for key, value in state.items():
            if is_lazy(value):
                raise UsageError(f"{self._name}: {key} has no shape yet: run the module once before the first save")
        trains = [name for name, param in self._module.named_parameters() if param.requires_grad]
        return {"state": dict(state), "versions": dict(getattr(state, "_metadata", {})), "trains": trains}

    def form(self) -> dict[str, Any]:
        """Return the names and shapes of its state, None for a shape that is still to come."""
        return {key: shape_of(value) for key, value in self._module.state_dict().items()}

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
            if isinstance(live[key], torch.Tensor) and not is_lazy(live[key]):
                _same_form(f"{self._name}: {key}", value, live[key])

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Copy the values into the module."""
        live = self._module.state_dict()
        state = OrderedDict((key, _as_live(value, live[key], read)) for key, value in saved["state"].items())
        state._metadata = OrderedDict(saved["versions"])  # type: ignore[attr-defined]  # noqa: SLF001 - where torch looks
        self._module.load_state_dict(state, strict=True)

    def freeze(self, saved: Mapping[str, Any]) -> None:
        """Have the same parameters trained as where the job was saved: its script may unfreeze some just once."""
        trains = {*saved["trains"]}
        for name, param in self._module.named_parameters():
            # Torch changes requires_grad of leaves only.
            if param.is_leaf and param.requires_grad != (name in trains):
                param.requires_grad_(name in trains)


class StatefulPart:
    """A GradScaler, an LR scheduler, or anything else with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name, self._thing = name, thing
        self.thing = thing

    def capture(self) -> dict[str, Any]:
        """Return the object's state and class name."""
        state = self._thing.state_dict()
        for key, value in _items(state):
            if not isinstance(value, torch.Tensor):
                _no_shards(f"{self._name}.{key}", value)
        return {"type": type(self._thing).__qualname__, "state": state, "devices": devices_of(state)}

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the live tensors where sharded ones were saved."""
        live = self._thing.state_dict() if _has_shards(saved["state"]) else {}
        return {value[SHARDED]: live[key] for key, value in _items(saved["state"]) if is_shard(value)}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare the class names, and whether a scaler is enabled."""
        here = type(self._thing).__qualname__
        if saved.get("type") != here:
            raise MismatchError(f"{self._name}: the checkpoint has a {saved.get('type')}, this job a {here}")
        # A scaler that is disabled has an empty state_dict(), which one that is enabled refuses.
        if isinstance(self._thing, torch.amp.GradScaler) and bool(saved["state"]) != self._thing.is_enabled():
            raise MismatchError(f"{self._name}: it is enabled in one of checkpoint and job, and not in the other")

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Load a copy of the state, so that the object keeps no part of the file."""
        state = saved["state"]
        if _has_shards(state):
            state = {key: read[value[SHARDED]] if is_shard(value) else value for key, value in state.items()}
        self._thing.load_state_dict(on_devices(state, saved.get("devices", ())))


class TensorPart:
    """A tensor of the job's own."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor = name, tensor
        self.thing: Any = tensor

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
    """A mapping of the job's own, such as ``{"best_loss": 0.3}``; it and what is inside stay the same objects."""

    def __init__(self, name: str, values: MutableMapping[str, Any]) -> None:
        self._name, self._values = name, values
        self.thing: Any = values

    def capture(self) -> dict[str, Any]:
        """Return the mapping's items."""
        _no_shards(self._name, self._values)
        return {"state": dict(self._values), "devices": devices_of(self._values)}

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:  # noqa: ARG002 - the protocol's
        """Return nothing: no value of a mapping is sharded."""
        return {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse anything but a mapping."""
        if not isinstance(saved["state"], Mapping):
            raise MismatchError(f"{self._name}: the checkpoint has something else here than a mapping of values")

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:  # noqa: ARG002
        """Set the mapping's items."""
        _refill(self._values, on_devices(dict(saved["state"]), saved.get("devices", ())), set())


class GeneratorPart:
    """A random number generator of the job's own: torch's, NumPy's or Python's; each rank keeps its state."""

    def __init__(self, name: str, generator: Any) -> None:
        self._name, self._generator = name, generator

    def capture(self) -> dict[str, Any]:
        """Return the generator's kind and state, as plain JSON values."""
        return {"type": type(self._generator).__qualname__, "state": _generator_state(self._generator)}

    def check(self, saved: Mapping[str, Any] | None) -> None:
        """Compare the kinds of generator, and of NumPy's bit generator."""
        here = self.capture()
        if saved is None:
            raise MismatchError(f"{self._name}: the checkpoint was saved without this generator")
        kinds = [(one["type"], one["state"].get("bit_generator")) for one in (saved, here)]
        if kinds[0] != kinds[1]:
            raise MismatchError(f"{self._name}: the checkpoint has a {_kind(*kinds[0])}, this job a {_kind(*kinds[1])}")

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the generator in place."""
        generator, state = self._generator, saved["state"]
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            version, internal, gauss = state["python"]
            generator.setstate((version, tuple(internal), gauss))
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = _arrays(state)
        else:
            generator.set_state(_arrays(state))

    def seed(self, seed: int) -> None:
        """Give it numbers of its own, on a rank that the saved job did not have."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed % (1 << 32))


def _generator_state(generator: Any) -> dict[str, Any]:
    """Return a generator's state as plain JSON values."""
    if isinstance(generator, torch.Generator):
        return {"torch": bytes(generator.get_state().tolist()).hex()}
    if isinstance(generator, random.Random):
        version, internal, gauss = generator.getstate()
        return {"python": [version, list(internal), gauss]}
    bits = getattr(generator, "bit_generator", None)
    state: dict[str, Any] = _lists(bits.state if bits is not None else generator.get_state(legacy=False))
    return state


def _lists(value: Any) -> Any:
    """Return a tree with NumPy's arrays and numbers as plain values."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ndarray):
        return {"array": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, numpy.generic) else value


def _arrays(value: Any) -> Any:
    """Return a tree with its arrays as NumPy's."""
    if isinstance(value, dict) and "array" in value:
        return sys.modules["numpy"].array(value["values"], dtype=value["array"])
    return {key: _arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def _kind(name: str, bits: str | None) -> str:
    """Name a kind of generator."""
    return f"{name} of {bits}" if bits else name


def _is_generator(thing: object) -> bool:
    """Return whether this is a random number generator."""
    numpy = sys.modules.get("numpy")
    numpys = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(thing, (torch.Generator, random.Random, *numpys))


def parts_of(kind: str, things: object) -> dict[str, Part]:
    """Return parts by name: the kind for one object, the kind and an index in brackets for several."""
    if things is None:
        return {}
    if isinstance(things, (list, tuple)):
        return {f"{kind}[{index}]": part_of(f"{kind}[{index}]", thing) for index, thing in enumerate(things)}
    return {kind: part_of(kind, things)}


def own_parts(things: object) -> tuple[dict[str, Part], dict[str, GeneratorPart]]:
    """Return the parts of the user's own objects, a mapping by name, a list, or one object; and the generators."""
    named = {"own": things}
    if isinstance(things, Mapping):
        named = {f"own[{name!r}]": thing for name, thing in things.items()}
    elif isinstance(things, (list, tuple)):
        named = {f"own[{index}]": thing for index, thing in enumerate(things)}
    elif things is None:
        named = {}
    generators = {name: GeneratorPart(name, thing) for name, thing in named.items() if _is_generator(thing)}
    return {name: part_of(name, thing) for name, thing in named.items() if name not in generators}, generators


def part_of(name: str, thing: Any) -> Part:
    """Return an object's part; raise UsageError when it has no state that can be restored."""
    kinds: Iterable[tuple[type[Any], Callable[[str, Any], Part]]] = (
        (nn.Module, ModelPart),
        (torch.optim.Optimizer, OptimizerPart),
        (torch.Tensor, TensorPart),
        (MutableMapping, ValuesPart),
    )
    for kind, make in kinds:
        if isinstance(thing, kind) and (make is not OptimizerPart or is_standard(thing)):
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


def _refill(live: Any, saved: Any, used: set[int]) -> Any:
    """Return a saved value, where possible in the live object: the script may hold it by another name, too."""
    again, kind = id(live) in used, type(live)
    used.add(id(live))
    if isinstance(live, MutableMapping) and isinstance(saved, Mapping) and not again:
        items = {key: _refill(live.get(key), item, used) for key, item in saved.items()}
        live.clear()
        live.update(items)
        return live
    if kind is list and isinstance(saved, list) and not again:
        live[:] = [_refill(old, item, used) for old, item in itertools.zip_longest(live[: len(saved)], saved)]
        return live
    if kind is not torch.Tensor or type(saved) is not torch.Tensor or again:
        return saved
    alike = (live.shape, live.dtype, live.device) == (saved.shape, saved.dtype, saved.device)
    plain = live.is_contiguous() and not (live.requires_grad or live.is_inference())
    return live.copy_(saved) if alike and plain else saved


def shape_of(value: Any) -> list[int] | None:
    """Return a tensor's shape; None for one that has none yet, and for anything else."""
    return None if not isinstance(value, torch.Tensor) or is_lazy(value) else list(value.shape)


def fits(before: Any, now: Any) -> bool:
    """Return whether two forms are the same, but for shapes that were still to come."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(fits(before[key], now[key]) for key in before)
    return before is None or bool(before == now)


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


def devices_of(state: Any) -> list[str]:
    """Return the kind of device of each tensor in a state, in the order of the tree."""
    return [value.device.type for value in tensors_in(state)]


def on_devices(state: Any, kinds: Iterable[str]) -> Any:
    """Return a copy of a saved state, its tensors on devices of the kinds that they had; the host's where none is."""
    left = iter(kinds)

    def placed(value: Any) -> Any:
        if is_sharded(value):
            next(left, "")
            return value
        if isinstance(value, torch.Tensor):
            accelerator = device.in_use()
            here = accelerator is not None and next(left, "cpu") == accelerator.kind
            return value.to(accelerator.kind, copy=True) if accelerator and here else value.clone()
        if isinstance(value, dict):
            return type(value)({key: placed(item) for key, item in value.items()})
        return type(value)(placed(item) for item in value) if type(value) in (list, tuple) else value

    return placed(state)


def tensors_in(state: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(state, torch.Tensor):
        yield state
    inside = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    for item in inside:
        yield from tensors_in(item)


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
