"""An optimizer's part of a checkpoint: state by parameter, and groups that stay the same objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cadenza.sidecar.client.checkpoints.staging import SHARDED, as_shards, is_shard, is_sharded
from cadenza.sidecar.client.errors import MismatchError
from cadenza.sidecar.client.zip_equal import zip_equal


def is_standard(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's state dict, and the loading of one, are those of torch's base class.

    Another ``load_state_dict`` may keep state elsewhere, such as in an optimizer inside: such an object gets its whole
    state dict back through its own method (``parts.StatefulPart``), and nothing is put in place past it.
    """
    names = ("state_dict", "load_state_dict")
    if any(getattr(type(optimizer), name) is not getattr(torch.optim.Optimizer, name) for name in names):
        return False
    hooks = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    if any(vars(optimizer).get(f"_optimizer_{name}_hooks") for name in hooks) or {*names} & vars(optimizer).keys():
        return False
    groups = vars(optimizer).get("param_groups")  # a property would lead to another optimizer's
    return isinstance(groups, list) and isinstance(vars(optimizer).get("state"), dict)


class OptimizerPart:
    """An optimizer with the base class's state dict. Its groups, parameters and tensors stay the same objects.

    State that the optimizer has already is overwritten in place: a second copy may not fit on the GPU.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self.thing: Any = optimizer
        self.modules: Sequence[torch.nn.Module] = ()
        """Modules of the same checkpoint, which name its parameters."""

    def capture(self) -> dict[str, Any]:
        """Return the state dict, with the optimizer's class and the shapes and names of its parameters."""
        shapes = [[list(param.shape) for param in group["params"]] for group in self._optimizer.param_groups]
        described = {"type": type(self._optimizer).__qualname__, "shapes": shapes, "names": self._names()}
        return {**described, "state": self._optimizer.state_dict()}

    def _names(self) -> list[list[str]]:
        """Return the names of its parameters by group, "" where none is known."""
        named = ((f"{number}.{name}", param) for number, one in enumerate(self.modules)
                 for name, param in one.named_parameters())  # fmt: skip
        names = {id(param): name for name, param in named}
        return [[names.get(id(param), "") for param in group["params"]] for group in self._optimizer.param_groups]

    def _in_order_here(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the saved state with each group's parameters in this process's order.

        A script that collects them in a set of names has another order in each process.
        """
        groups, shapes, given = [], [], saved["state"]["param_groups"]
        for number, here in enumerate(self._names()):
            group, sizes, there = given[number], saved["shapes"][number], saved["names"][number]
            places = {name: place for place, name in enumerate(there) if name}
            order = [places[name] for name in here] if len(here) == len(places) and {*here} == places.keys() else None
            groups.append(group if order is None else {**group, "params": [group["params"][place] for place in order]})
            shapes.append(sizes if order is None else [sizes[place] for place in order])
        return {**saved, "shapes": shapes, "state": {**saved["state"], "param_groups": groups}}

    def form(self) -> dict[int, dict[int, list[int] | None]]:
        """Return the shapes of its parameters by group, None for one that is still to come."""
        groups = [[None if is_lazy(one) else list(one.shape) for one in group["params"]]
                  for group in self._optimizer.param_groups]  # fmt: skip
        return {number: dict(enumerate(shapes)) for number, shapes in enumerate(groups)}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare class, groups and the shapes of the parameters."""
        here = type(self._optimizer).__qualname__
        if saved["type"] != here:
            raise MismatchError(f"{self._name}: the checkpoint has a {saved['type']}, this job a {here}")
        if "shapes" not in saved:
            raise MismatchError(f"{self._name}: the checkpoint has a {here} with a state dict of another form")
        groups, shapes = self._optimizer.param_groups, saved["shapes"]
        if [len(group["params"]) for group in groups] != [len(group) for group in shapes]:
            there, counted = [len(group) for group in shapes], [len(group["params"]) for group in groups]
            raise MismatchError(f"{self._name}: the checkpoint has groups of {there} parameters, this job {counted}")
        shapes = self._in_order_here(saved)["shapes"]
        for number, (group, saved_shapes) in enumerate(zip_equal(groups, shapes)):
            for index, (param, shape) in enumerate(zip_equal(group["params"], saved_shapes)):
                if not is_lazy(param) and list(param.shape) != shape:
                    key = f"{self._name}: group {number}, parameter {index}"
                    raise MismatchError(f"{key}: the checkpoint has shape {shape}, this job {list(param.shape)}")

    def targets(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return new tensors, placed like their parameters, for the state that was saved sharded."""
        targets, saved = {}, self._in_order_here(saved)
        for index, param in self._params(saved):
            for key, value in saved["state"]["state"].get(index, {}).items():
                if is_shard(value):
                    if list(param.shape) != value["size"]:  # other shapes have no placement here
                        raise MismatchError(
                            f"{self._name}: state {key} of parameter {index}: is sharded with shape {value['size']}, "
                            f"its parameter has {list(param.shape)}"
                        )
                    empty = torch.empty_like(param, dtype=value["dtype"], requires_grad=False)
                    targets[value[SHARDED]] = empty
        return targets

    def restore(self, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor]) -> None:
        """Load the state dict; then put the objects back that load_state_dict replaces."""
        optimizer, groups, state = self._optimizer, self._optimizer.param_groups, self._optimizer.state
        saved = self._in_order_here(saved)
        wanted = {index: self._placed(index, saved, read, param) for index, param in self._params(saved)}
        state.clear()
        saved_state = {index: values for index, values in wanted.items() if values is not None}
        optimizer.load_state_dict({"state": saved_state, "param_groups": saved["state"]["param_groups"]})
        # Undo its cast of state to the parameter's dtype: float32 moments of bfloat16 stay exact.
        for index, param in self._params(saved):
            for key, value in (wanted[index] or {}).items():
                loaded = optimizer.state[param]
                if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)
        state.update(optimizer.state)
        for old, new in zip_equal(groups, optimizer.param_groups):
            _replace_items(old, new)
        optimizer.state, optimizer.param_groups = state, groups

    def _params(self, saved: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
        """Return the parameters with the indices of their saved state."""
        pairs = zip_equal(self._optimizer.param_groups, saved["state"]["param_groups"])
        return [
            (index, param)
            for group, saved_group in pairs
            for param, index in zip_equal(group["params"], saved_group["params"])
        ]

    def _placed(
        self, index: Any, saved: Mapping[str, Any], read: Mapping[str, torch.Tensor], param: torch.Tensor
    ) -> Any:
        """Return a parameter's saved state without references to the checkpoint's file, None if it has none."""
        state, live = saved["state"]["state"].get(index), self._optimizer.state.get(param, {})
        if state is None:
            return None
        placed = {}
        for key, value in state.items():
            # Torch's optimizers make their state at the first step: before, there is nothing here to overwrite.
            old = live.get(key)
            if type(value) is torch.Tensor is type(old) and (value.shape, value.dtype) == (old.shape, old.dtype):
                with torch.no_grad():
                    placed[key] = old.copy_(value)
            else:
                placed[key] = _placed(value, read, param)
        return placed


def _placed(value: Any, read: Mapping[str, torch.Tensor], param: torch.Tensor) -> Any:
    """Return one value of the state, on its parameter's device if it has the parameter's shape."""
    if is_shard(value):
        return read[value[SHARDED]]
    if isinstance(value, torch.Tensor):
        if is_sharded(param) and value.shape == param.shape:
            return as_shards(value, param)
        # load_state_dict moves the tensor `step` to the GPU, for capturable and fused optimizers only.
        return value.to(param.device, copy=True) if value.shape == param.shape and value.dim() else value.clone()
    if isinstance(value, dict):
        return {key: _placed(item, read, param) for key, item in value.items()}
    return type(value)(_placed(item, read, param) for item in value) if type(value) in (list, tuple) else value


def _replace_items(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Make one group equal to another but keep its tensors, whose addresses captured graphs contain."""
    for key, value in new.items():
        live = old.get(key)
        both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
        if both and live.shape == value.shape:  # type: ignore[union-attr]
            live.copy_(value)  # type: ignore[union-attr]
        else:
            old[key] = value
    for key in old.keys() - new.keys():
        del old[key]
