"""Storages to which another library or process has a pointer are found, named and left where they are."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from client_peer import Peer, Turns
from torch.multiprocessing import reductions

from cadenza.sidecar import client
from cadenza.sidecar.client.offload import exports
from cadenza.sidecar.client.offload.storages import survey


@pytest.fixture
def watched() -> object:
    exports.watch()
    yield
    exports.unwatch()


def test_an_export_through_dlpack_is_found_while_and_after_it_is_used(watched: None) -> None:
    tensor = torch.arange(8.0)
    array = np.from_dlpack(tensor[2:])
    found = survey([("tensors", {"table": tensor, "other": torch.ones(2)})])
    assert [(kept.name, kept.reason) for kept in found.resident] == [("tensors[table]", "exported through DLPack")]
    assert [segment.name for segment in found.segments] == ["tensors[other]"]
    del array
    gc.collect()
    assert survey([("tensors", [tensor])], refuse_resident=True).refusal == (
        "cannot release tensors[0] (exported through DLPack)"
    )


def test_an_export_to_torch_itself_is_found_although_only_one_side_is_known(watched: None) -> None:
    tensor = torch.arange(8.0)
    other = torch.from_dlpack(tensor)
    assert [kept.name for kept in survey([("tensors", [tensor])]).resident] == ["tensors[0]"]
    assert [kept.name for kept in survey([("tensors", [other])]).resident] == ["tensors[0]"]


def test_exports_of_what_is_gone_are_forgotten(watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "PRUNE_AT", 4)
    for _ in range(20):
        np.from_dlpack(torch.arange(3.0))
    assert len(exports._watch.exports) <= 4
    assert "exported through DLPack" not in exports.reasons().values()


def test_an_export_to_another_process_is_found() -> None:
    """Let torch.multiprocessing remember a storage; on the CPU this also moves it into shared memory."""
    tensor = torch.arange(8.0)
    reductions.reduce_storage(tensor.untyped_storage())
    [kept] = survey([("tensors", [tensor])]).resident
    assert kept.reason == "in shared memory or mapped from a file"
    assert tensor.untyped_storage()._cdata in exports.reasons()


def test_all_tensors_that_cuda_shares_out_of_one_block_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch remembers the last of them only: its key is the handle of cudaMalloc's block."""
    handle = (0, b"handle", 8, 0, b"counter", 0, b"event", False)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: handle)
    exports.watch()
    try:
        first, second, other = torch.ones(2), torch.ones(3), torch.ones(4)
        for tensor in (first, second):
            assert tensor._typed_storage()._share_cuda_() == handle
        found = survey([("tensors", [first, second, other])], refuse_resident=True)
    finally:
        exports.unwatch()
    assert [segment.name for segment in found.segments] == ["tensors[2]"]
    reason = "shared with another process by CUDA IPC"
    assert found.refusal == f"cannot release tensors[0] ({reason}), tensors[1] ({reason})"


def test_a_job_that_exports_goes_on_with_its_export(job: Peer) -> None:
    method = torch.Tensor.__dlpack__
    model = torch.nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(8.0))
    turns = Turns(job, [1])
    client.attach(model)
    array = np.from_dlpack(model.table)
    client.boundary()
    turns.finish()
    assert turns.yielded[0]["resident"] == ["model.table (exported through DLPack)"]
    model.table += 1
    assert array.tolist() == model.table.tolist()
    client.detach()
    assert torch.Tensor.__dlpack__ is method
