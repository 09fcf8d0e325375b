"""The client's care for GPU memory on the simulated GPU: what is unregistered, pinned, cached or on a side stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import simulated_gpu
import torch

from cadenza.sidecar.client.checkpoints import checkpoint
from cadenza.sidecar.client.offload import host_memory, unregistered
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import survey

pytestmark = pytest.mark.slow

MIB = 1 << 20


@contextlib.contextmanager
def setting(module: ModuleType, name: str, value: int) -> Iterator[None]:
    """Set a constant of a module; these tests share a process."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device="simulated")


def test_unregistered_memory_refuses_or_moves_too() -> None:
    given, logits = filled(2 * MIB, 1), filled(24 * MIB, 2)
    with setting(unregistered, "LIMIT_BYTES", 4 * MIB):
        refusal = survey([("tensors", [given])]).refusal
    assert refusal is not None
    assert "24 MiB of memory on simulated:0 belong to nothing that was given to attach()" in refusal
    assert "uint8 [25165824] (24 MiB)" in refusal
    found = survey([("tensors", [given])], everything=True)
    assert (found.refusal, found.nbytes) == (None, 26 * MIB)
    offload = Offload()
    assert offload.offload(found.segments).left == 0
    assert next(iter(simulated_gpu.GPU.bytes_of.values())) == simulated_gpu.GPU.context_bytes
    offload.restore()
    assert (int(given.cpu().sum()), int(logits.cpu().sum())) == (2 * MIB, 48 * MIB)


def test_a_refused_registration_is_an_unpinned_move_and_no_error_of_the_script() -> None:
    tensors = [filled(3 * MIB, 3), filled(1000, 4)]
    offload = Offload()
    simulated_gpu.GPU.fail_registration = 1
    offload.offload(survey([("tensors", tensors)]).segments)
    offload.restore()
    tensors[0].add_(1)
    assert [int(tensor.cpu()[-1]) for tensor in tensors] == [4, 4]
    offload.close()


def test_a_storage_larger_than_a_chunk_is_copied_across_its_ends() -> None:
    tensor = torch.arange(3 * MIB, dtype=torch.int32, device="simulated")
    expected = tensor.cpu()
    offload = Offload()
    with setting(host_memory, "CHUNK_BYTES", 4 * MIB):
        for _ in range(2):
            offload.offload(survey([("tensors", [tensor])]).segments)
            assert len(offload._buffer.bounds) == 3
            offload.restore()
            assert torch.equal(tensor.cpu(), expected)
    offload.close()


def test_memory_is_pinned_ahead_on_a_thread() -> None:
    tensor = filled(8 * MIB, 5)
    offload = Offload()
    offload.pin_ahead(8 * MIB, 1)
    assert offload._buffer._ahead is not None
    offload._buffer._ahead.join(10)
    assert offload.host_bytes == 8 * MIB
    simulated_gpu.GPU.fail_registration = 1  # the move registers nothing more
    offload.offload(survey([("tensors", [tensor])]).segments)
    offload.restore()
    assert simulated_gpu.GPU.fail_registration == 1
    simulated_gpu.GPU.fail_registration = 0
    assert int(tensor.cpu().max()) == 5
    offload.close()


def test_a_checkpoint_has_the_random_numbers_of_the_device(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).to("simulated")
    with checkpoint(tmp_path, model=model) as keeper:
        keeper.save(1)
        drawn = [torch.rand(4, device=place).cpu() for place in ("simulated", "cpu")]
        assert keeper.restore() == 1
    again = [torch.rand(4, device=place).cpu() for place in ("simulated", "cpu")]
    assert all(map(torch.equal, drawn, again))
    assert not torch.equal(*drawn)


class Average:
    """An average of weights that takes what it is given, as many scripts have one."""

    def __init__(self) -> None:
        self.shadow = {"weight": filled(1 * MIB, 3), "count": torch.zeros(1)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


def test_tensors_of_ones_own_come_back_to_the_device_that_they_were_on(tmp_path: Path) -> None:
    average, values = Average(), {"best": filled(1 * MIB, 4), "loss": torch.ones(1)}
    with checkpoint(tmp_path, own={"average": average, "values": values}) as keeper:
        keeper.save(1)
        average.shadow = {}
        assert keeper.restore() == 1
    found = {**average.shadow, **values}
    kinds = {name: tensor.device.type for name, tensor in found.items()}
    assert kinds == {"weight": "simulated", "count": "cpu", "best": "simulated", "loss": "cpu"}
    assert (int(found["weight"].cpu().max()), int(found["best"].cpu().max())) == (3, 4)


def test_a_background_checkpoint_is_copied_to_pinned_memory_before_the_script_goes_on(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.register_buffer("state", filled(4 * MIB, 1))
    before = simulated_gpu.library().simulated_pinned()
    with checkpoint(tmp_path, model=module, background=True) as keeper:
        simulated_gpu.GPU.bytes_per_s = 100 * MIB
        keeper.save(1)
        simulated_gpu.GPU.bytes_per_s = 0
        module.state.fill_(2)
        assert simulated_gpu.library().simulated_pinned() == before + 1
        keeper.restore()
    assert int(module.state.cpu().max()) == 1


def test_a_prefetched_tensor_comes_back_on_its_stream() -> None:
    """Freed, its block goes to the next tensor of that stream and to no other."""
    stream = torch.Stream("simulated")
    with stream:
        tensor = filled(4 * MIB, 6)
    torch.accelerator.synchronize()
    offload = Offload()
    (segment,) = survey([("tensors", [tensor])]).segments
    offload.offload([segment])
    offload.restore()
    address = tensor.data_ptr()
    assert int(tensor.cpu()[7]) == 6
    del tensor, segment
    offload.close()
    assert filled(4 * MIB, 0).data_ptr() != address
    with stream:
        assert filled(4 * MIB, 0).data_ptr() == address
