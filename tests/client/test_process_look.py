"""One walk over Python's objects for a survey, and after a look ahead over the young ones only."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from cadenza.sidecar.client.offload import process_look
from cadenza.sidecar.client.offload.process_look import ProcessLook
from cadenza.sidecar.client.offload.storages import survey


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """The generations that were asked for; None: all. No collection comes by itself."""
    asked, original = list[int | None](), gc.get_objects

    def get_objects(generation: int | None = None) -> list[object]:
        asked.append(generation)
        return original(generation)

    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "get_objects", get_objects)
    yield asked
    gc.enable()


def has(look: ProcessLook, tensor: torch.Tensor) -> bool:
    return any(one is tensor for one in look.tensors)


@pytest.mark.skipif(process_look.sys.version_info >= process_look.GENERATIONS_CHANGE, reason="all is walked there")
def test_after_a_look_ahead_only_young_objects_are_walked(walks: list[int | None]) -> None:
    old, gone = torch.ones(1), torch.ones(2)
    ahead = ProcessLook.ahead()
    assert walks == [None]
    gone_id = id(gone)
    del gone
    new = torch.ones(3)
    look = ProcessLook(ahead)
    assert has(look, old)
    assert has(look, new)
    assert gone_id not in [id(one) for one in look.tensors if one.numel() == 2]
    assert walks == [None, 0, 1]
    assert len(look.objects) == len({id(one) for one in look.objects})


@pytest.mark.parametrize("generation", [1, 2])
def test_a_collection_that_makes_objects_old_has_all_walked_again(walks: list[int | None], generation: int) -> None:
    ahead = ProcessLook.ahead()
    new = torch.ones(3)
    gc.collect(generation)
    assert has(ProcessLook(ahead), new)
    assert walks[-1] is None


def test_a_look_ahead_keeps_no_memory() -> None:
    tensor = torch.ones(5)
    from torch.multiprocessing.reductions import StorageWeakRef  # noqa: PLC0415

    storage = StorageWeakRef(tensor.untyped_storage())
    ahead = ProcessLook.ahead()
    del tensor
    assert storage.expired()
    assert ahead.snapshot == ()


def test_a_survey_on_the_host_walks_nothing(walks: list[int | None]) -> None:
    assert survey([("tensors", [torch.ones(1)])]).nbytes == 4
    assert walks == []
