"""The reasons why addresses cannot stay, by name; the job then yields as without the library, or refuses with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_segment_ranges import MIB, segment

from cadenza.sidecar.client.offload import device
from cadenza.sidecar.client.offload.addresses import address_survey, preloaded
from cadenza.sidecar.client.offload.copy_plan import AddressPlan
from cadenza.sidecar.client.offload.process_look import ProcessLook


class Pool:
    """In place of torch.cuda.MemPool."""

    id = (0, 7)


class Process:
    """A process with the library, whose allocator has a segment of 2 MiB."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.segments: Sequence[dict[str, Any]] = [segment(64 * MIB, (2 * MIB, "active_allocated"), allocated_size=MIB)]
        self.no_driver, self.ranks = 0, 1
        self.module = SimpleNamespace(MemPool=Pool, get_allocator_backend=lambda: "native")
        self.library: Any = SimpleNamespace(
            counters=lambda: SimpleNamespace(no_driver=self.no_driver),
            segments=lambda: [SimpleNamespace(address=64 * MIB, number=3, size=2 * MIB)],
        )
        self.accelerator: Any = SimpleNamespace(module=self.module, snapshot=lambda: self.segments)
        group = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: self.ranks > 1, get_world_size=lambda: self.ranks
        )
        patch.setattr(device, "in_use", lambda: self.accelerator)
        patch.setattr(preloaded, "library", lambda: self.library)
        patch.setitem(sys.modules, "torch.distributed", group)
        patch.setenv(preloaded.NCCL_GRAPHS, "0")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def reason() -> str:
    found = address_survey.look()
    return found if isinstance(found, str) else ""


def test_nothing_is_in_the_way_of_one_process_or_several(process: Process) -> None:
    found = address_survey.look()
    assert isinstance(found, AddressPlan)
    assert found.segments == (3,)
    process.ranks = 8
    assert not reason()


def test_a_process_without_the_gpu_the_library_or_the_driver(process: Process) -> None:
    process.no_driver = 801
    assert "the driver (error 801)" in reason()
    process.library = None
    assert preloaded.NAME in reason()
    process.accelerator = None
    assert "no GPU" in reason()


@pytest.mark.parametrize(("backend", "word"), [("cudaMallocAsync", "cudaMallocAsync"), ("", "plugged in")])
def test_another_allocator(process: Process, backend: str, word: str) -> None:
    process.module.get_allocator_backend = lambda: backend
    assert word in reason()


def test_expandable_segments(process: Process) -> None:
    process.segments = [*process.segments, segment(0, (20 * MIB, "inactive"), is_expandable=True)]
    assert "20 MiB are in expandable segments" in reason()


def test_a_torch_whose_runtime_is_inside_it(process: Process) -> None:
    process.segments = [segment(0, (1024 * MIB, "active_allocated"))]
    assert "1024 MiB of torch's memory did not come through the preloaded library" in reason()


def test_memory_that_nccl_may_have_registered(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first group is gloo's: a later one may be NCCL's."""
    process.ranks = 2
    monkeypatch.setenv(address_survey.HOOK, "1")
    assert address_survey.HOOK in reason()
    monkeypatch.setenv(address_survey.HOOK, "0")
    assert not reason()
    for value in ("1", None):
        monkeypatch.delenv(preloaded.NCCL_GRAPHS)
        if value:
            monkeypatch.setenv(preloaded.NCCL_GRAPHS, value)
        assert "start the ranks with NCCL_GRAPH_REGISTER=0" in reason()
        monkeypatch.setenv(preloaded.NCCL_GRAPHS, "0")


def test_a_memory_pool_of_the_script(process: Process) -> None:
    """Python's objects are walked for it only where there are private pools; a graph's moves."""
    pool = Pool()
    private = {"segment_pool_id": pool.id, "allocated_size": MIB}
    process.segments = [segment(64 * MIB, (2 * MIB, "active_allocated"), **private)]
    look = ProcessLook()
    look.objects = [pool]
    assert "1.0 MiB in a torch.cuda.MemPool" in str(address_survey._pools(process.accelerator, look))
    look.objects = []
    assert address_survey._pools(process.accelerator, look) is None


def test_python_is_not_walked_without_private_pools(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(_: ProcessLook) -> list[Any]:
        raise AssertionError("millions of objects")

    monkeypatch.setattr(ProcessLook, "objects", property(walk))
    assert not reason()
