"""Device memory that cannot change its address is found in an allocator's snapshot, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadenza.sidecar.client.offload import fixed_addresses
from cadenza.sidecar.client.offload.process_look import ProcessLook
from cadenza.sidecar.client.offload.storages import survey

SNAPSHOT = [
    {"address": 0x9000, "total_size": 0x2000, "allocated_size": 3 << 20, "segment_pool_id": (4, 0)},
    {"address": 0x1000, "total_size": 0x1000, "allocated_size": 0x800, "segment_pool_id": (0, 0)},
    {"address": 0x4000, "total_size": 0x1000, "allocated_size": 1 << 20, "segment_pool_id": (0, 7)},
    {"address": 0x6000, "total_size": 0x1000, "allocated_size": 0, "segment_pool_id": (0, 8)},
    {"address": 0x2000, "total_size": 0x1000, "allocated_size": 0x800},
]
"""Ranges as torch.cuda.memory_snapshot() gives them; the last as versions without private pools do."""


def test_addresses_in_private_pools_have_an_owner() -> None:
    held = fixed_addresses.private_ranges(SNAPSHOT, [(4, 0)])
    assert [one.start for one in held] == [0x4000, 0x6000, 0x9000]
    for address in (0, 0x1000, 0x2FFF, 0x3FFF, 0x5000, 0x8FFF, 0xB000):
        assert fixed_addresses.owner_of(held, address) is None
    for address in (0x4000, 0x4FFF):
        assert fixed_addresses.owner_of(held, address) == "a CUDA graph's private pool"
    assert fixed_addresses.owner_of(held, 0xAFFF) == "a torch.cuda.MemPool, as NCCL registers"
    assert fixed_addresses.owner_of([], 0x4000) is None


def test_memory_in_use_there_refuses_and_an_empty_pool_does_not() -> None:
    held = fixed_addresses.private_ranges(SNAPSHOT, [(4, 0)])
    assert fixed_addresses.pool_refusal(held) == (
        "memory at fixed device addresses: 1.0 MiB in a CUDA graph's private pool, "
        "3.0 MiB in a torch.cuda.MemPool, as NCCL registers"
    )
    assert fixed_addresses.pool_refusal([one for one in held if not one.used]) is None


def test_graphs_are_named_with_their_possible_origin() -> None:
    class Graph:
        pass

    class Traced(Graph):
        pass

    assert fixed_addresses.graph_refusal([1, "two", Graph], Graph, compiled=True) is None
    plain = fixed_addresses.graph_refusal([1, Traced()], Graph, compiled=False)
    assert plain == "captured CUDA graphs replay fixed device addresses, which a move would change"
    assert "torch.compile with mode reduce-overhead" in fixed_addresses.graph_refusal([Graph()], Graph, compiled=True)


class TestProcessWithGpu:
    """A process in which torch's allocator shows ``segments``, and frees ``freed`` with its cache."""

    @pytest.fixture
    def segments(self, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        held, freed = list[dict[str, Any]](), list[dict[str, Any]]()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*held, *freed])
        monkeypatch.setattr(torch.cuda, "empty_cache", freed.clear)
        return held, freed

    @pytest.mark.parametrize("name", ["cudaMallocAsync", ""])
    def test_other_allocators_refuse_by_name(
        self, segments: object, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: name)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("it would raise"))
        ranges, refusal = fixed_addresses.inspect_process(ProcessLook())
        assert ranges == []
        assert refusal is not None
        assert (name or "one that was plugged in") in refusal

    def test_an_idle_pool_refuses_only_if_it_outlives_the_cache(
        self, segments: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    ) -> None:
        """A graph that gc.freeze() has hidden keeps its pool, and would replay on addresses of others."""
        held, freed = segments
        freed.append(SNAPSHOT[3])
        assert fixed_addresses.inspect_process(ProcessLook()) == ([], None)
        held.append(SNAPSHOT[3])
        ranges, refusal = fixed_addresses.inspect_process(ProcessLook())
        assert [one.start for one in ranges] == [0x6000]
        assert refusal is not None
        assert "whose graph still lives" in refusal


def test_a_process_that_has_used_no_gpu_is_not_searched() -> None:
    assert fixed_addresses.inspect_process(ProcessLook()) == ([], None)
    assert survey([("tensors", [torch.ones(1)])]).refusal is None
