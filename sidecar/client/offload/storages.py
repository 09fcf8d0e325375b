"""Finds the storages behind models, optimizers and other state: each once, named, and checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cadenza.sidecar.client.offload import exports, fixed_addresses

Named: TypeAlias = tuple[str, torch.Tensor]

MOVED_DEVICES = frozenset({"cpu", "cuda"})
NO_MEMORY = frozenset({"meta"})
OPENED = (torch.optim.Optimizer, torch.amp.GradScaler)
"""What is opened wherever it is found; other objects only when they were given as such."""
REDUCER = "reducer"
HARMLESS = frozenset({"cpu", REDUCER})
"""Where storages may stay without refusing a stop: the host, and the buckets of a DDP reducer."""
SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
UNSEEN_LIMIT_BYTES = 256 * 2**20
"""GPU memory that may be in use although no state is known, before a stop is refused for it."""


@dataclass(frozen=True)
class Segment:
    """One storage that can be moved, under the name of the first tensor found in it."""

    name: str
    storage: torch.UntypedStorage
    nbytes: int


@dataclass(frozen=True)
class Kept:
    """One storage that cannot be released, and why not."""

    name: str
    reason: str
    nbytes: int
    device: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class Survey:
    """What would move and what would stay; ``refused`` is non-empty when nothing may move because of that."""

    segments: tuple[Segment, ...]
    resident: tuple[Kept, ...]
    refused: str
    spilled: bool = False
    """The move goes to a file, because host memory is short."""

    @property
    def host_bytes(self) -> int:
        """The host memory that the move needs."""
        return 0 if self.spilled else self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that would move."""
        return sum(segment.nbytes for segment in self.segments)


def survey(sources: Iterable[tuple[str, object]], *, refuse_resident: bool = False) -> Survey:
    """Find all storages of the sources and check each, moving nothing.

    With a GPU in play only device storages count: host memory gains nothing from a move. Without one, host
    storages are moved, which is the same path. A storage that cannot be released stays where it is; on a GPU,
    or with ``refuse_resident``, that refuses the stop: the memory would not be free for the next job.
    """
    found: dict[int, tuple[Segment, str]] = {}
    walk = Walk()
    for name, tensor in walk.tensors(sources):
        _enter(found, name, tensor)
    _mark_exports(found)
    _mark_overlaps(found)
    held, why = fixed_addresses.here()
    _mark_held(found, held)
    entries = list(found.values())
    if any(_device(segment) == "cuda" for segment, _ in entries):
        entries = [entry for entry in entries if _device(entry[0]) != "cpu"]
    segments = tuple(segment for segment, reason in entries if not reason)
    resident = tuple(
        Kept(segment.name, reason, segment.nbytes, _device(segment)) for segment, reason in entries if reason
    ) + tuple(walk.buckets)
    return Survey(segments, resident, why or _refusal(segments, resident, refuse_resident=refuse_resident))


class Walk:
    """One pass over named things; then ``buckets`` lists the gradient buckets that no tensor leads to."""

    def __init__(self) -> None:
        self.buckets: list[Kept] = []
        self._names: dict[int, str] = {}
        self._seen: set[int] = set()

    def tensors(self, sources: Iterable[tuple[str, object]]) -> Iterator[Named]:
        """Yield every dense tensor of the sources, gradients included; one may come more than once."""
        for name, thing in sources:
            for path, tensor in self._inside(name, thing, top=True):
                self._names.setdefault(id(tensor), path)
                yield from _plain(path, tensor)
                grad = tensor.grad if tensor.is_leaf else None
                if grad is not None:
                    yield from _plain(f"{path}.grad", grad)

    def _inside(self, name: str, thing: object, *, top: bool = False) -> Iterator[Named]:
        """Yield the tensors in modules, optimizers and containers; other objects only at the top level."""
        if isinstance(thing, torch.Tensor):
            yield name, thing
        elif id(thing) not in self._seen:
            self._seen.add(id(thing))
            for path, child in self._children(name, thing, top=top):
                yield from self._inside(path, child)

    def _children(self, name: str, thing: object, *, top: bool) -> Iterable[tuple[str, object]]:
        """Return what a thing consists of, named; nothing for what is not opened."""
        if isinstance(thing, torch.nn.Module):
            return self._module(name, thing)
        if isinstance(thing, Mapping):
            return self._mapping(name, thing)
        if isinstance(thing, (list, tuple, set, frozenset)):
            return [(f"{name}[{index}]", child) for index, child in enumerate(thing)]
        if top and callable(thing):
            return [(name, thing())]
        if isinstance(thing, OPENED) or (top and hasattr(thing, "__dict__")):
            return [(f"{name}.{key}", child) for key, child in vars(thing).items()]
        return ()

    def _module(self, name: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
        """Yield parameters, buffers and tensors that are plain attributes of a module or its children."""
        for path, child in module.named_modules(prefix=name):
            for part in (child._parameters, child._buffers, vars(child)):  # noqa: SLF001
                for key, value in part.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{path}.{key}", value
            if isinstance(child, torch.nn.parallel.DistributedDataParallel):
                self._note_buckets(path, child)

    def _note_buckets(self, path: str, module: torch.nn.parallel.DistributedDataParallel) -> None:
        """Name a reducer's buckets, unless gradients are views of them, which leads to their storages."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if module.gradient_as_bucket_view and any(parameter.grad is not None for parameter in parameters):
            return
        reason = "the reducer's own; gradient_as_bucket_view=True makes it movable while gradients exist"
        nbytes = sum(parameter.nbytes for parameter in parameters)
        self.buckets.append(Kept(f"{path}: gradient buckets", reason, nbytes, REDUCER))

    def _mapping(self, name: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
        """Yield a mapping's values, and keys that are tensors: optimizer state is named by its parameter."""
        for index, (key, value) in enumerate(list(mapping.items())):
            label = key
            if isinstance(key, torch.Tensor):
                label = self._names.get(id(key), index)
                yield f"{name}[{label}].key", key
            yield f"{name}[{label}]", value


def _plain(name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """Yield the dense tensors that a sparse or wrapping tensor (DTensor, nested) is made of."""
    parts: list[tuple[str, Any]] = []
    wrapped: Any = tensor
    if is_traceable_wrapper_subclass(wrapped):
        parts = [(key, getattr(wrapped, key)) for key in wrapped.__tensor_flatten__()[0]]
    elif tensor.layout in SPARSE_PARTS:
        plain = tensor.detach()
        parts = [(key.strip("_"), getattr(plain, key)()) for key in SPARSE_PARTS[tensor.layout]]
    else:
        yield name, tensor
    for key, part in parts:
        if isinstance(part, torch.Tensor):
            yield from _plain(f"{name}.{key}", part)


def _enter(found: dict[int, tuple[Segment, str]], name: str, tensor: torch.Tensor) -> None:
    """Note a tensor's storage when it is seen first, with the reason why it cannot move, else ""."""
    if tensor.device.type in NO_MEMORY:
        return
    try:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
    except (RuntimeError, ValueError):  # lazy parameters and opaque layouts (mkldnn) have none to show
        return
    if nbytes and storage._cdata not in found:  # noqa: SLF001
        found[storage._cdata] = Segment(name, storage, nbytes), _reason(storage, tensor)  # noqa: SLF001


def _reason(storage: torch.UntypedStorage, tensor: torch.Tensor) -> str:
    """Return why a storage cannot be released, or "".

    Measured on torch 2.13: a storage in shared memory calls itself resizable, and growing it again after a
    release crashes the process; those from NumPy, ``frombuffer``, files, ``torch.load`` and DLPack, and any
    that was exported to NumPy once, are not resizable. A CUDA storage calls itself shared always.
    """
    device = storage.device.type
    if device not in MOVED_DEVICES:
        return f"a device of type {device}"
    if device == "cpu" and storage.is_shared():
        return "in shared memory or mapped from a file"
    if torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]  # noqa: SLF001
        tensor.data_ptr()  # asking for the address makes a lazy clone's memory its own
    if not storage.resizable():
        return "not resizable: NumPy, a buffer, a file, torch.load or another library owns the memory"
    return ""


def _mark_exports(found: dict[int, tuple[Segment, str]]) -> None:
    """Keep storages to which another library or process was given a pointer."""
    for key, user in exports.users().items():
        if key in found:
            segment, reason = found[key]
            found[key] = segment, reason or user


def _mark_overlaps(found: dict[int, tuple[Segment, str]]) -> None:
    """Keep storages that share memory with another one (DLPack), which a release would leave dangling."""
    order = sorted((segment.storage.data_ptr(), key) for key, (segment, _) in found.items())
    for (start, before), (next_start, after) in itertools.pairwise(order):
        first, second = found[before], found[after]
        if start + first[0].nbytes > next_start and first[0].storage.device == second[0].storage.device:
            found[before] = first[0], first[1] or f"shares memory with {second[0].name}"
            found[after] = second[0], second[1] or f"shares memory with {first[0].name}"


def _mark_held(found: dict[int, tuple[Segment, str]], held: list[fixed_addresses.Held]) -> None:
    """Keep storages whose device memory belongs to a private pool."""
    for key, (segment, reason) in found.items() if held else ():
        if _device(segment) == "cuda" and (owner := fixed_addresses.owner(held, segment.storage.data_ptr())):
            found[key] = segment, reason or f"in {owner}"


def _device(segment: Segment) -> str:
    """Return the type of a storage's device."""
    return str(segment.storage.device.type)


def _refusal(segments: tuple[Segment, ...], resident: tuple[Kept, ...], *, refuse_resident: bool) -> str:
    """Return why nothing may move, or ""."""
    stuck = [kept for kept in resident if refuse_resident or kept.device not in HARMLESS]
    if stuck:
        more = f" and {len(stuck) - 3} more" if stuck[3:] else ""
        return f"cannot release {', '.join(map(str, stuck[:3]))}{more}"
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    used = torch.cuda.memory_allocated()
    if not segments and used > UNSEEN_LIMIT_BYTES:
        return f"{used >> 20} MiB of GPU memory belong to nothing that was given to attach(): pass the model"
    return ""
