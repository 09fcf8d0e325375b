"""The cache's item format: a JSON outline and raw buffers; reading it runs no code of the writer.

An item is a tree of None, bool, int, float, str, bytes, tuple, list, dict, dense CPU tensors, and numpy arrays and
scalars of plain types. Its parts are the outline's length in 8 bytes, the outline, padding, and each buffer padded to
ALIGNMENT. The decoded item is equal in type and content; tensors and arrays are contiguous, writable, and share no
memory with the cache.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadenza.sidecar.client.data.item_store import HEAD, Buffer
from cadenza.sidecar.client.data.seeds import np
from cadenza.sidecar.client.errors import NotStorableError
from cadenza.sidecar.client.zip_equal import zip_equal

ALIGNMENT = 16
SIZE = struct.Struct("=Q")
PLAIN_KINDS = frozenset("biufcSUmM")
"""Kinds of numpy types without references to objects, https://numpy.org/doc/stable/reference/arrays.dtypes.html."""

Outline = Any
Read = Callable[[list[Any], memoryview], Any]


def encode(item: object) -> list[Buffer]:
    """Return an item's parts; raise NotStorableError naming the type that cannot be stored."""
    buffers: list[Buffer] = []
    writer = _Writer(buffers)
    try:
        outline = json.dumps(writer.outline(item), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise NotStorableError(str(error)) from None
    filled = HEAD.size + SIZE.size + len(outline)
    return [SIZE.pack(len(outline)), outline, bytes(-filled % ALIGNMENT), *buffers]


def decode(payload: memoryview) -> Any:
    """Return the item; its tensors and arrays are views of the payload, which the caller must not share."""
    (length,) = SIZE.unpack_from(payload)
    start = SIZE.size + length
    outline = json.loads(bytes(payload[SIZE.size : start]))
    start += -(HEAD.size + start) % ALIGNMENT
    return _value(outline, payload[start:])


class _Writer:
    """Builds the outline of one item; ``buffers`` takes the raw data."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self._buffers = buffers
        self._at = 0

    def outline(self, value: Any) -> Outline:
        """Return the outline of a value: itself if JSON has it, else a list that begins with a tag."""
        kind = type(value)
        if value is None or kind in {bool, int, float, str}:
            return value
        if isinstance(value, torch.Tensor):
            return ["tensor", *self._tensor(value)]
        if isinstance(value, (bytes, bytearray)) and kind in {bytes, bytearray}:
            return [kind.__name__, *self._keep(value)]
        if isinstance(value, (tuple, list)) and kind in {tuple, list}:
            return [kind.__name__, *map(self.outline, value)]
        if isinstance(value, dict) and kind is dict:
            return ["dict", *(self.outline(part) for pair in value.items() for part in pair)]
        if np is not None and (kind is np.ndarray or isinstance(value, np.generic)):
            if value.dtype.kind not in PLAIN_KINDS:
                raise NotStorableError(f"numpy values of type {value.dtype}")
            tag = "array" if kind is np.ndarray else "scalar"
            return [tag, value.dtype.str, list(value.shape), *self._keep(value.tobytes())]
        raise NotStorableError(f"{kind.__module__}.{kind.__qualname__}")

    def _keep(self, data: Buffer) -> tuple[int, int]:
        """Take a buffer; return its offset and length."""
        offset = self._at
        self._buffers.append(data)
        if padding := -len(data) % ALIGNMENT:
            self._buffers.append(bytes(padding))
        self._at += len(data) + padding
        return offset, len(data)

    def _tensor(self, tensor: torch.Tensor) -> list[Outline]:
        """Take a tensor's elements in order; return dtype, shape and place."""
        device = tensor.device.type
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and device == "cpu"
        odd = not plain or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
        if odd or np is None:
            raise NotStorableError(f"a tensor that is not a plain dense one of the CPU ({tensor.dtype}, {device})")
        flat = tensor.contiguous().reshape(-1)
        raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *self._keep(memoryview(raw))]


def _value(outline: Outline, raw: memoryview) -> Any:
    if not isinstance(outline, list):
        return outline
    return _READERS[outline[0]](outline[1:], raw)


def _values(outlines: list[Any], raw: memoryview) -> list[Any]:
    return [_value(outline, raw) for outline in outlines]


def _cut(place: Sequence[int], raw: memoryview) -> memoryview:
    offset, length = place
    return raw[offset : offset + length]


def _tensor(fields: list[Any], raw: memoryview) -> torch.Tensor:
    """Return a tensor over its part of the payload."""
    name, shape, *place = fields
    dtype: torch.dtype = getattr(torch, name)
    data = _cut(place, raw)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data.nbytes else torch.empty(shape, dtype=dtype)


def _array(fields: list[Any], raw: memoryview) -> Any:
    """Return an array over its part of the payload."""
    name, shape, *place = fields
    data, dtype = _cut(place, raw), np.dtype(name)
    return np.frombuffer(data, dtype=dtype).reshape(shape) if data.nbytes else np.empty(shape, dtype=dtype)


_READERS: dict[str, Read] = {
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda fields, raw: _array(fields, raw)[()],
    "bytes": lambda fields, raw: bytes(_cut(fields, raw)),
    "bytearray": lambda fields, raw: bytearray(_cut(fields, raw)),
    "tuple": lambda fields, raw: tuple(_values(fields, raw)),
    "list": _values,
    "dict": lambda fields, raw: dict(zip_equal(_values(fields[::2], raw), _values(fields[1::2], raw))),
}
