"""Reads of state that is away: functions of torch use the host copy in place of tensors without memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.offload.storages import SPARSE_PARTS

SAVERS = (
    ("torch.serialization", "_save"),
    ("torch.serialization", "_legacy_save"),
    ("torch.distributed.checkpoint.state_dict_saver", "_stateful_to_state_dict"),  # async_save stages its result
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
    ("torch.distributed.checkpoint.filesystem", "_write_files_from_queue"),  # in each of the writer's threads
    ("safetensors.torch", "save"),
    ("safetensors.torch", "save_file"),
)
"""Functions behind ``torch.save`` and other savers, by the names under which they are looked up at each call."""
ACCESSORS = frozenset({"__get__", "__set__", "__delete__"})
"""Names of the functions behind a tensor's attributes, such as its shape and its gradient; none reads its memory."""


class HostCopies(TorchFunctionMode):
    """While it is active, functions of torch use the host copy of tensors that are away (docs: torch.overrides).

    So ``state_dict()``, ``item()``, ``torch.save`` and a copy to another device see the content, without a GPU. A
    change in place changes the host copy, and comes back with it. It is for the thread that enters it.
    """

    def __init__(self, find: Callable[[torch.UntypedStorage], torch.UntypedStorage | None]) -> None:
        """``find`` returns the host copy of a storage, None for one that is not away."""
        super().__init__()
        self._find = find

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with host copies in place of tensors that are away."""
        named = kwargs or {}
        # A gradient that is set must land on the tensor itself and not on a copy that ends with this call.
        if getattr(func, "__name__", "") in ACCESSORS:
            return func(*args, **named)
        return func(*map(self._present, args), **{key: self._present(value) for key, value in named.items()})

    def _present(self, value: Any) -> Any:
        """Return an argument with host copies in it."""
        if isinstance(value, torch.Tensor):
            return self.of(value)
        return type(value)(map(self._present, value)) if type(value) in (list, tuple) else value

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's host copy, the tensor itself if it is not away; UsageError for a sparse one that is."""
        wrapped: Any = tensor
        if is_traceable_wrapper_subclass(wrapped):
            names, context = wrapped.__tensor_flatten__()
            inner = {name: self.of(getattr(wrapped, name)) for name in names}
            same = all(part is getattr(wrapped, name) for name, part in inner.items())
            whole = (inner, context, tensor.size(), tensor.stride())
            return tensor if same else type(wrapped).__tensor_unflatten__(*whole)
        if tensor.layout in SPARSE_PARTS:
            plain = tensor.detach()
            parts = [getattr(plain, name)() for name in SPARSE_PARTS[tensor.layout]]
            if any(self.of(part) is not part for part in parts):
                raise UsageError(f"a tensor of layout {tensor.layout} cannot be read while the job's state is away")
            return tensor
        try:
            storage = self._find(tensor.untyped_storage())
        except (RuntimeError, ValueError):  # lazy and opaque tensors have no storage, and stay
            return tensor
        if storage is None:
            return tensor
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        copy = copy.conj() if tensor.is_conj() else copy
        return torch._neg_view(copy) if tensor.is_neg() else copy  # noqa: SLF001


class GuardedSavers:
    """Savers that read host copies while the state is away, as in a signal handler or after one has ended the wait."""

    def __init__(self, copies: Callable[[], HostCopies]) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        for module_name, name in SAVERS:
            module = sys.modules.get(module_name)
            original = getattr(module, name, None)
            if original is not None:
                self._originals.append((module, name, original))
                setattr(module, name, _reading(copies, original))

    def remove(self) -> None:
        """Put the savers back."""
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()


def _reading(copies: Callable[[], HostCopies], saver: Callable[..., Any]) -> Callable[..., Any]:
    """Return a saver that reads host copies, and returns them for tensors that are away."""

    @functools.wraps(saver)
    def save(*args: Any, **kwargs: Any) -> Any:
        mode = copies()
        with mode:
            result = saver(*args, **kwargs)
        return tree_map_only(torch.Tensor, mode.of, result)

    return save
