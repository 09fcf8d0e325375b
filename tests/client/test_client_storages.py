"""Storages that cannot be released are found and named before a move, and a failed move leaves all in place."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from client_peer import Peer, Script
from torch import nn

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import MoveError
from cadenza.sidecar.client.offload import device, storages, unregistered
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import Segment, survey


def exported() -> torch.Tensor:
    tensor = torch.arange(8.0)
    tensor.numpy()
    return tensor


def from_file(tmp_path: Path, *, shared: bool) -> torch.Tensor:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(64))
    return torch.from_file(str(path), shared=shared, size=8, dtype=torch.float64)


def loaded(tmp_path: Path, *, mmap: bool) -> torch.Tensor:
    torch.save(torch.arange(8.0), tmp_path / "saved.pt")
    tensor: torch.Tensor = torch.load(tmp_path / "saved.pt", mmap=mmap)
    return tensor


def from_ipc() -> torch.Tensor:
    tensor = torch.arange(8.0)
    handle = tensor.untyped_storage()._share_filename_cpu_()
    return torch.tensor([]).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle))


UNRELEASABLE: dict[str, Callable[[Path], torch.Tensor]] = {
    "numpy": lambda path: torch.from_numpy(np.arange(8.0)),
    "exported to numpy once": lambda path: exported(),
    "buffer": lambda path: torch.frombuffer(bytearray(64), dtype=torch.float64),
    "dlpack": lambda path: torch.from_dlpack(np.arange(8.0)),
    "shared memory": lambda path: torch.arange(8.0).share_memory_(),
    "another process's": lambda path: from_ipc(),
    "file, shared": lambda path: from_file(path, shared=True),
    "file, private": lambda path: from_file(path, shared=False),
    "torch.load": lambda path: loaded(path, mmap=False),
    "torch.load, mapped": lambda path: loaded(path, mmap=True),
}


@pytest.mark.parametrize("kind", UNRELEASABLE)
def test_unreleasable_storages_are_named(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", UNRELEASABLE[kind](tmp_path))
    found = survey([("model", model)])
    assert [kept.name for kept in found.resident] == ["model.table"]
    assert [segment.name for segment in found.segments] == ["model.weight", "model.bias"]
    assert found.refusal is None
    strict = survey([("model", model)], refuse_resident=True)
    assert strict.refusal.startswith("cannot release model.table (")


def test_one_memory_under_two_storages_stays() -> None:
    tensor = torch.arange(8.0)
    found = survey([("tensors", [tensor, torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))])])
    assert [kept.name for kept in found.resident] == ["tensors[0]", "tensors[1]"]
    assert "tensors[1]" in found.resident[0].reason


def test_each_storage_moves_once_under_the_name_of_its_owner() -> None:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    found = survey([("model", model), ("optimizer", optimizer), ("tensors", [model[0].weight[3:]])])
    assert [segment.name for segment in found.segments] == [
        "model.0.weight",
        "model.0.weight.grad",
        "optimizer.state[model.0.weight][step]",
        "optimizer.state[model.0.weight][exp_avg]",
        "optimizer.state[model.0.weight][exp_avg_sq]",
    ]


def test_devices_that_never_ran_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm calls its devices cuda: the engine would start, and find neither CUDA's runtime nor NVML."""
    assert list(device.accelerators("6.4")) == []
    assert device.never_ran("cuda", "6.4") == "on ROCm 6.4, with which this engine has never run"
    monkeypatch.setattr(storages, "_storage_of", lambda tensor: tensor)
    xpu = SimpleNamespace(device=torch.device("xpu:0"), nbytes=lambda: 9, _cdata=1, data_ptr=lambda: 1)
    monkeypatch.setattr(storages.Walk, "tensors", lambda *_: [("weight", xpu)])
    refusal = survey([]).refusal
    assert refusal == "cannot release weight (on devices of type xpu, with which this engine has never run)"


def test_sparse_nested_lazy_clones_and_meta() -> None:
    base = torch.arange(6.0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    things = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": nested,
        "clone": torch._lazy_clone(base),
        "meta": torch.ones(4, device="meta"),
        "lazy": nn.LazyLinear(3),
        "empty": torch.empty(0),
    }
    wanted = things["csr"].to_dense().clone(), nested.values().clone(), base.clone()
    found = survey([("tensors", things), ("base", base)])
    assert not found.resident
    names = {segment.name for segment in found.segments}
    assert {"tensors[coo].values", "tensors[csr].crow_indices", "tensors[nested]._values", "base"} <= names
    offload = Offload()
    offload.offload(found.segments)
    offload.restore()
    assert torch.equal(things["csr"].to_dense(), wanted[0])
    assert torch.equal(nested.values(), wanted[1])
    assert torch.equal(base, wanted[2])
    assert torch.equal(things["clone"], wanted[2])


def test_a_release_that_fails_brings_back_the_others(tmp_path: Path) -> None:
    first, last = torch.arange(1000.0), torch.arange(500.0)
    stuck = torch.from_numpy(np.arange(8.0))
    tensors = [first, stuck, last]
    copies = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    offload = Offload()
    with pytest.raises(MoveError, match="not resizable"):
        offload.offload([Segment(str(index), storage, storage.nbytes()) for index, storage in enumerate(storages)])
    assert not offload.away
    assert all(torch.equal(now, then) for now, then in zip(tensors, copies, strict=True))


def test_tensors_in_containers_of_modules_and_on_tensors_are_found() -> None:
    """Python keeps such tensors in no parameter list: banks of features, scales of quantized weights."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].bank = [torch.ones(3), {"old": torch.ones(4)}]
    model[0].weight.scales = torch.ones(5)
    model[0].weight.states = (torch.ones(6),)
    model[0].weight.scales.weight = model[0].weight  # a circle
    assert [segment.name for segment in survey([("model", model)]).segments] == [
        "model.0.weight",
        "model.0.weight.scales",
        "model.0.weight.states[0]",
        "model.0.bank[0]",
        "model.0.bank[1][old]",
    ]


class TestUnregisteredMemory:
    """The CPU stands for a GPU, on which the allocator has given out more than the registered tensors take."""

    @pytest.fixture(autouse=True)
    def full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = unregistered.DeviceMemory(4096 + 512 + (48 << 20), 1 << 30)
        monkeypatch.setattr(unregistered, "in_use", lambda: {torch.device("cpu"): memory})
        monkeypatch.setattr(unregistered, "LIMIT_BYTES", 32 << 20)

    def test_it_refuses_with_the_tensors_that_python_can_see(self) -> None:
        logits = torch.empty(3, 16 << 20, dtype=torch.uint8)
        refusal = survey([("tensors", [torch.ones(1024), torch.ones(1)])]).refusal
        assert refusal is not None
        assert refusal.startswith(
            "48 MiB of memory on cpu belong to nothing that was given to attach(), such as uint8 [3,"
        )
        assert "uint8 [3, 16777216] (48 MiB)" in refusal
        assert survey([("tensors", [torch.ones(1024), torch.ones(1), logits])]).refusal is None

    def test_a_little_may_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unregistered, "LIMIT_SHARE", 0.1)
        assert survey([("tensors", [torch.ones(1024)])]).refusal is None

    def test_with_everything_it_moves(self) -> None:
        logits = torch.ones(3, 16 << 20, dtype=torch.uint8)
        exported = torch.ones(9)
        exported.numpy()
        found = survey([("tensors", [torch.ones(1024)])], everything=True)
        assert found.refusal is None
        storages = {segment.storage.data_ptr(): segment.name for segment in found.segments}
        assert storages[logits.data_ptr()] == "uint8 [3, 16777216]"
        assert exported.data_ptr() not in storages


def test_a_survey_that_fails_refuses_the_stop(job: Peer) -> None:
    """The allocator may not describe its memory, or a function of the script fail."""

    def agent() -> str:
        rank = job.rank(stop=1)
        refused: str = rank.hear("arrived")["refused"]
        rank.clear()
        rank.say("cancel", order=1, reason="refused")
        return refused

    def broken() -> object:
        raise LookupError("gone")

    script = Script(agent, job)
    session = client.attach(tensors=broken)
    session.boundary()
    session.boundary()
    assert script.finish() == "the state cannot be examined: LookupError: gone"


def test_refused_state_is_named_to_the_agent_and_stays(job: Peer) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.from_numpy(np.arange(8.0)))

    def agent() -> str:
        rank = job.rank(stop=1)
        refused: str = rank.hear("arrived")["refused"]
        assert model.weight.untyped_storage().nbytes() == 16
        rank.clear()
        rank.say("cancel", order=1, reason="refused")
        return refused

    script = Script(agent, job)
    session = client.attach(model, refuse_resident=True)
    session.boundary()
    session.boundary()
    assert script.finish().startswith("cannot release model.table (not resizable")


def test_a_move_that_fails_is_reported_and_the_job_continues(job: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is short: an address-space limit makes the buffer's allocation fail."""
    tensor = torch.arange(25_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def agent() -> str:
        rank = job.rank(stop=1)
        rank.hear("arrived")
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 50_000_000, hard))
        try:
            rank.say("commit", order=1)
            error: str = rank.hear("yielded")["error"]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        rank.clear()
        return error

    script = Script(agent, job)
    session = client.attach(tensors=[tensor])
    session.boundary()
    assert script.finish().startswith("no 190 MiB of host memory")
    session.boundary()
    assert int(tensor[-1]) == 24_999_999
