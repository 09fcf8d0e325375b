"""Device memory comes back on the stream that it left; torch's CUDA functions are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.sidecar.client.offload import device_streams
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import survey

SNAPSHOT: list[dict[str, Any]] = [
    {"address": 0x9000, "total_size": 0x2000, "stream": 77},
    {"address": 0x1000, "total_size": 0x1000, "stream": 0},
    {"address": 0x2000, "total_size": 0x1000},
    {"address": 0x4000, "total_size": 0x1000, "stream": 5},
]


def test_memory_of_side_streams_is_found_in_a_snapshot() -> None:
    side = device_streams.streams(SNAPSHOT)
    assert side == [(0x4000, 0x1000, 5), (0x9000, 0x2000, 77)]
    addresses = (0, 0x1000, 0x2FFF, 0x3FFF, 0x4000, 0x4FFF, 0x5000, 0x9000, 0xAFFF, 0xB000)
    assert [device_streams.stream_of(side, address) for address in addresses] == [0, 0, 0, 0, 5, 5, 0, 77, 77, 0]
    assert device_streams.stream_of([], 0x4000) == 0


@pytest.mark.parametrize("spilled", [False, True])
def test_a_storage_comes_back_on_its_stream(spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefetcher's tensor would else be handed on while its own stream still reads it."""
    usual, prefetched = torch.ones(8), torch.ones(300_000)
    side = [(prefetched.data_ptr(), prefetched.nbytes, 77)]
    monkeypatch.setattr(device_streams, "streams", lambda _: side)
    allocated: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def allocating_on(device: torch.device, stream: int) -> Iterator[None]:
        before = prefetched.untyped_storage().nbytes(), usual.untyped_storage().nbytes()
        yield
        after = prefetched.untyped_storage().nbytes(), usual.untyped_storage().nbytes()
        allocated.append((stream, sum(after) - sum(before)))

    monkeypatch.setattr(device_streams, "allocating_on", allocating_on)
    offload = Offload()
    offload.spill_to = str(tmp_path) if spilled else ""
    offload.offload(survey([("tensors", [usual, prefetched])]).segments)
    offload.restore()
    assert sorted(allocated) == [(0, usual.nbytes), (77, prefetched.nbytes)]


def test_the_default_stream_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary within `torch.cuda.stream` brings memory of the default stream back there."""
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda of: ("default", of))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, of: (stream, of))
    with device_streams.allocating_on(device, 0) as stream:
        assert stream == ("default", device)
    with device_streams.allocating_on(device, 77) as stream:
        assert stream == (77, device)
