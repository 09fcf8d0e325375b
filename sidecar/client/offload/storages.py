"""Storages behind models, optimizers and other state: each once, named, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cadenza.sidecar.client.offload import device, device_streams, exports, fixed_addresses, unregistered
from cadenza.sidecar.client.offload.copy_plan import AddressPlan, aligned
from cadenza.sidecar.client.offload.process_look import ProcessLook

Named = tuple[str, torch.Tensor]

NO_MEMORY = frozenset({"meta"})
SEARCHED_TYPES = (torch.optim.Optimizer, torch.amp.GradScaler)
"""Classes whose objects are searched wherever they occur; other objects only when they were given themselves."""
REDUCER = "reducer"
HARMLESS_PLACES = frozenset({"cpu", REDUCER})
"""Places where a storage may stay without refusing a stop: the host, and the buckets of a DDP reducer."""
SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
"""Attributes of every module, which hold its parts and hooks."""
OPENED = (list, tuple, set, frozenset, dict)
"""Containers that are searched where they are attributes of modules and tensors."""


@dataclass(frozen=True)
class Segment:
    """One storage that can be moved, under the name of the first tensor found in it."""

    name: str
    storage: torch.UntypedStorage
    nbytes: int
    stream: int = 0
    """Device stream whose blocks hold it (``cudaStream_t``); the allocator hands a freed block on in its order."""


@dataclass(frozen=True)
class Resident:
    """One storage that cannot be released, with the reason."""

    name: str
    reason: str
    nbytes: int
    device: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class Survey:
    """Storages that would move and storages that would stay; ``refusal`` is set when nothing may move."""

    segments: tuple[Segment, ...]
    resident: tuple[Resident, ...]
    refusal: str | None
    spilled: bool = False
    """The move goes to a file, because host memory is short."""
    in_place: AddressPlan | None = None
    """In place of segments: all that torch has on the GPUs moves, and its addresses stay."""

    @property
    def host_bytes(self) -> int:
        """Host memory that the move needs."""
        if self.in_place is not None:
            return self.in_place.host_bytes
        return 0 if self.spilled else self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that would move."""
        if self.in_place is not None:
            return self.in_place.nbytes
        return sum(segment.nbytes for segment in self.segments)


def survey(
    sources: Iterable[tuple[str, object]],
    *,
    refuse_resident: bool = False,
    everything: bool = False,
    before: ProcessLook | None = None,
) -> Survey:
    """Find all storages of the sources and check each, moving nothing.

    If any storage is on a GPU, only device storages count: host memory gains nothing from a move. Otherwise host
    storages move, on the same path. A storage that cannot be released stays where it is; on a GPU, or with
    ``refuse_resident``, it refuses the stop, because the memory would not be free for the next job. So does memory
    of a GPU that belongs to nothing in the sources, above a limit; with ``everything`` all tensors that Python can see
    there move as well. ``before`` is a look of a moment ago, after which only what is new in the process is looked for.
    """
    # 1. Find each storage once, under the name of the first tensor in it.
    segments: dict[int, Segment] = {}
    reasons: dict[int, str | None] = {}
    walk = Walk()
    for name, tensor in walk.tensors(sources):
        storage = _storage_of(tensor)
        # Views, tied weights and gradients in buckets share a storage; `_cdata`, its address in C++, identifies it.
        if storage is not None and storage._cdata not in segments:  # noqa: SLF001
            segments[storage._cdata] = Segment(name, storage, storage.nbytes())  # noqa: SLF001
            reasons[storage._cdata] = _reason_to_stay(storage, tensor)  # noqa: SLF001
    # 2. Find the other tensors on the GPUs in use, if they move too or are too much to stay.
    look = ProcessLook(before)
    memory = unregistered.in_use()
    others = _others(segments, memory, look) if everything else {}
    segments |= others
    reasons |= dict.fromkeys(others)
    unknown = unregistered.excess(memory, _known_bytes(segments.values(), walk.buckets, memory))
    named = {one.name: one.nbytes for one in (_others(segments, memory, look) if unknown else {}).values()}
    # 3. Keep storages to which others have a pointer, and those that share memory or lie at fixed addresses.
    exported = exports.reasons()
    overlaps = _overlaps(segments)
    private, refusal = fixed_addresses.inspect_process(look)
    for key, segment in segments.items():
        owner = None
        if private and device.of(segment.storage.device):
            owner = fixed_addresses.owner_of(private, segment.storage.data_ptr())
        reasons[key] = reasons[key] or exported.get(key) or overlaps.get(key) or (f"in {owner}" if owner else None)
    # 4. With a GPU in use, leave host storages out.
    on_gpu = any(device.of(segment.storage.device) for segment in segments.values())
    entries = [(one, reasons[key]) for key, one in segments.items() if not (on_gpu and _device(one) == "cpu")]
    # 5. Divide them into those that move and those that stay, and decide whether the stop is refused.
    side = device_streams.streams(look.snapshot) if refusal is None else []
    moving = tuple(_with_stream(segment, side) for segment, reason in entries if not reason)
    resident = (
        *(Resident(one.name, reason, one.nbytes, _device(one)) for one, reason in entries if reason),
        *walk.buckets,
    )
    refusal = refusal or _refusal(resident, refuse_resident=refuse_resident)
    return Survey(moving, resident, refusal or unregistered.refusal(unknown, named))


class Walk:
    """One pass over named things; then ``buckets`` lists the gradient buckets that no tensor leads to."""

    def __init__(self) -> None:
        self.buckets: list[Resident] = []
        self._names: dict[int, str] = {}
        self._visited: set[int] = set()

    def tensors(self, sources: Iterable[tuple[str, object]]) -> Iterator[Named]:
        """Yield every dense tensor of the sources, gradients included; one may come more than once."""
        for name, thing in sources:
            for path, tensor in self._inside(name, thing, top=True):
                self._names.setdefault(id(tensor), path)
                yield from _plain(path, tensor)
                # Torch warns at each look at the .grad of a tensor that is no leaf.
                grad = tensor.grad if tensor.is_leaf else None
                if grad is not None:
                    yield from _plain(f"{path}.grad", grad)

    def _inside(self, name: str, thing: object, *, top: bool = False) -> Iterator[Named]:
        """Yield the tensors in modules, optimizers and containers; other objects only at the top level."""
        if isinstance(thing, torch.Tensor):
            yield name, thing
            attributes = getattr(thing, "__dict__", None)
            if attributes and id(thing) not in self._visited:
                self._visited.add(id(thing))
                for key, value in list(attributes.items()):
                    if isinstance(value, (torch.Tensor, *OPENED)):
                        yield from self._inside(f"{name}.{key}", value)
        elif id(thing) not in self._visited:
            self._visited.add(id(thing))
            for path, child in self._children(name, thing, top=top):
                yield from self._inside(path, child)

    def _children(self, name: str, thing: object, *, top: bool) -> Iterable[tuple[str, object]]:
        """Return the parts of a thing by name, none for a thing that is not searched."""
        if isinstance(thing, torch.nn.Module):
            return self._module(name, thing)
        if isinstance(thing, Mapping):
            return self._mapping(name, thing)
        if isinstance(thing, (list, tuple, set, frozenset)):
            return [(f"{name}[{index}]", child) for index, child in enumerate(thing)]
        if top and callable(thing):
            return [(name, thing())]
        if isinstance(thing, SEARCHED_TYPES) or (top and hasattr(thing, "__dict__")):
            return [(f"{name}.{key}", child) for key, child in vars(thing).items()]
        return ()

    def _module(self, name: str, module: torch.nn.Module) -> Iterator[tuple[str, object]]:
        """Yield a module's and its children's parameters, buffers, and attributes that are tensors or containers."""
        for path, child in module.named_modules(prefix=name):
            # Plain attributes are in no state_dict(), and take GPU memory all the same.
            for part in (child._parameters, child._buffers, vars(child)):  # noqa: SLF001
                for key, value in part.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{path}.{key}", value
            # The buckets belong to C++'s reducer, out of Python's reach. They are as large as the trained parameters.
            if isinstance(child, torch.nn.parallel.DistributedDataParallel):
                parameters = [parameter for parameter in child.parameters() if parameter.requires_grad]
                if child.gradient_as_bucket_view and any(parameter.grad is not None for parameter in parameters):
                    continue  # the gradients are views of the buckets, which leads to their storages
                reason = "owned by the reducer; gradient_as_bucket_view=True makes it movable while gradients exist"
                nbytes = sum(parameter.nbytes for parameter in parameters)
                self.buckets.append(Resident(f"{path}: gradient buckets", reason, nbytes, REDUCER))
        for path, child in module.named_modules(prefix=name):
            for key, value in list(vars(child).items()):
                if key not in OWN_ATTRIBUTES and isinstance(value, OPENED):
                    yield f"{path}.{key}", value

    def _mapping(self, name: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
        """Yield a mapping's values, and keys that are tensors: optimizer state is named by its parameter."""
        for index, (key, value) in enumerate(list(mapping.items())):
            label = key
            if isinstance(key, torch.Tensor):
                label = self._names.get(id(key), index)
                yield f"{name}[{label}].key", key
            yield f"{name}[{label}]", value


def _plain(name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """Yield the dense tensors in a sparse or wrapping tensor (DTensor, nested), or the tensor itself."""
    parts: list[tuple[str, Any]] = []
    wrapped: Any = tensor
    if is_traceable_wrapper_subclass(wrapped):
        # A DTensor and its like are shells without a storage of their own: the memory is that of the tensors inside.
        parts = [(key, getattr(wrapped, key)) for key in wrapped.__tensor_flatten__()[0]]
    elif tensor.layout in SPARSE_PARTS:
        plain = tensor.detach()
        parts = [(key.strip("_"), getattr(plain, key)()) for key in SPARSE_PARTS[tensor.layout]]
    else:
        yield name, tensor
    for key, part in parts:
        if isinstance(part, torch.Tensor):
            yield from _plain(f"{name}.{key}", part)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, None if it has no memory."""
    if tensor.device.type in NO_MEMORY:
        return None
    try:
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() else None
    except (RuntimeError, ValueError):  # lazy parameters and opaque layouts (mkldnn) have none to show
        return None


def _reason_to_stay(storage: torch.UntypedStorage, tensor: torch.Tensor) -> str | None:
    """Return the reason why a storage cannot be released, if there is one."""
    kind = storage.device.type
    if kind != "cpu" and device.of(storage.device) is None:
        return device.never_ran(kind)
    # Measured on torch 2.13: a storage in shared memory calls itself resizable, and growing it again after a release
    # crashes the process. A CUDA storage always calls itself shared.
    if kind == "cpu" and storage.is_shared():
        return "in shared memory or mapped from a file"
    if torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]  # noqa: SLF001
        tensor.data_ptr()  # asking for the address makes a lazy clone's memory its own
    # Storages from NumPy, frombuffer, files, torch.load and DLPack are not resizable, nor is one that NumPy once saw.
    if not storage.resizable():
        return "not resizable: NumPy, a buffer, a file, torch.load or another library owns the memory"
    return None


def _overlaps(segments: Mapping[int, Segment]) -> dict[int, str]:
    """Return the storages that share memory with another one (DLPack), which a release would leave dangling."""
    reasons: dict[int, str] = {}
    order = sorted((segment.storage.data_ptr(), key) for key, segment in segments.items())
    for (start, key), (next_start, next_key) in zip(order, order[1:]):
        first, second = segments[key], segments[next_key]
        if start + first.nbytes > next_start and first.storage.device == second.storage.device:
            reasons.setdefault(key, f"shares memory with {second.name}")
            reasons.setdefault(next_key, f"shares memory with {first.name}")
    return reasons


def _with_stream(segment: Segment, side: list[tuple[int, int, int]]) -> Segment:
    """Return a segment with the side stream whose blocks hold it, if any does."""
    stream = device_streams.stream_of(side, segment.storage.data_ptr()) if side else 0
    return replace(segment, stream=stream) if stream else segment


def _device(segment: Segment) -> str:
    """Return the type of a storage's device."""
    return str(segment.storage.device.type)


def _others(
    segments: Mapping[int, Segment], devices: Mapping[torch.device, unregistered.DeviceMemory], look: ProcessLook
) -> dict[int, Segment]:
    """Return the storages on some devices that Python can see, can be moved and are none of the segments."""
    found: dict[int, Segment] = {}
    for thing in look.tensors if devices else ():
        for part, tensor in _plain("", thing):
            storage = _storage_of(tensor)
            if storage is None or storage.device not in devices:
                continue
            key = storage._cdata  # noqa: SLF001
            if key not in segments and not _reason_to_stay(storage, tensor):
                name = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{part}"
                found.setdefault(key, Segment(name, storage, storage.nbytes()))
    return found


def _known_bytes(
    segments: Iterable[Segment], buckets: Iterable[Resident], devices: Iterable[torch.device]
) -> dict[torch.device, int]:
    """Return the memory of each device that belongs to segments, as the allocator rounds it, and to DDP's buckets."""
    known = dict.fromkeys(devices, sum(bucket.nbytes for bucket in buckets))
    for segment in segments:
        if segment.storage.device in known:
            known[segment.storage.device] += aligned(segment.nbytes)
    return known


def _refusal(resident: tuple[Resident, ...], *, refuse_resident: bool) -> str | None:
    """Return the reason why storages that stay forbid a move, if they do."""
    stuck = [one for one in resident if refuse_resident or one.device not in HARMLESS_PLACES]
    if not stuck:
        return None
    more = f" and {len(stuck) - 3} more" if stuck[3:] else ""
    return f"cannot release {', '.join(map(str, stuck[:3]))}{more}"
