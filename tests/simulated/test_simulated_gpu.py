"""The simulated GPU itself: it is late, full, failing and strict as a real one, or its other tests prove nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import simulated_gpu
import torch
from simulated_gpu import occupied

from cadenza.sidecar.client.offload.device import ACCELERATORS

pytestmark = pytest.mark.slow


def test_operators_run_later_and_in_the_order_of_their_stream() -> None:
    gpu = simulated_gpu.GPU
    tensor = torch.zeros(1000, device="simulated")
    gpu.operator_ns = 100_000_000
    began = time.monotonic()
    for _ in range(5):
        tensor.add_(1)
    assert time.monotonic() - began < 0.4, "an operator does not wait for the one before"
    assert tensor.cpu().tolist() == [5.0] * 1000
    assert time.monotonic() - began > 0.5


def test_two_streams_do_not_wait_for_each_other_without_an_event() -> None:
    gpu = simulated_gpu.GPU
    source, target = torch.zeros(1000, device="simulated"), torch.zeros(1000, device="simulated")
    torch.accelerator.synchronize()
    stream = torch.Stream("simulated")
    for waits in (False, True):
        gpu.operator_ns = 0
        source.zero_(), target.zero_()
        torch.accelerator.synchronize()
        gpu.operator_ns = 30_000_000
        for _ in range(10):
            source.add_(1)
        done = torch.accelerator.current_stream().record_event()
        if waits:
            stream.wait_event(done)
        with stream:
            target.copy_(source)
        torch.accelerator.synchronize()
        assert (target.cpu()[0].item() == 10) == waits


def test_a_copy_between_pinned_memory_and_the_gpu_takes_the_time_of_the_link() -> None:
    gpu = simulated_gpu.GPU
    tensor, host = torch.ones(4 << 20, dtype=torch.uint8, device="simulated"), torch.empty(4 << 20, dtype=torch.uint8)
    pinned = torch.empty(4 << 20, dtype=torch.uint8, pin_memory=True)
    torch.accelerator.synchronize()
    gpu.bytes_per_s = 8 << 20
    for target, waits in ((host, True), (pinned, False)):
        began = time.monotonic()
        target.copy_(tensor, non_blocking=True)
        assert (time.monotonic() - began > 0.4) == waits
        torch.accelerator.synchronize()
        assert time.monotonic() - began > 0.4
        assert int(target.sum()) == 4 << 20


def test_a_dropped_copy_moves_nothing_and_raises_nothing() -> None:
    gpu = simulated_gpu.GPU
    tensor, host = torch.ones(8, device="simulated"), torch.zeros(8)
    gpu.drop_copy = 2
    sums = [float(host.copy_(tensor * value).sum()) for value in (1, 2, 3)]
    assert (sums, gpu.drop_copy) == ([8.0, 8.0, 24.0], 0)


def test_an_lstm_computes_what_it_computes_on_the_cpu() -> None:
    results = []
    for device in ("cpu", "simulated"):
        torch.manual_seed(0)
        model, words = torch.nn.LSTM(8, 8), torch.randn(5, 4, 8)
        model, words = model.to(device), words.to(device).requires_grad_()
        output, (_, cell) = model(words)
        (output.square().sum() + cell.sum()).backward()
        results.append([value.cpu() for value in (output, words.grad, *(each.grad for each in model.parameters()))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_freed_memory_is_overwritten_in_its_stream_and_released_memory_is_gone() -> None:
    gpu = simulated_gpu.GPU
    tensor = torch.ones(30 << 20, dtype=torch.uint8, device="simulated")
    other = torch.empty(30 << 20, dtype=torch.uint8, pin_memory=True)
    torch.accelerator.synchronize()
    gpu.bytes_per_s = 300 << 20
    with torch.Stream("simulated"):
        other.copy_(tensor, non_blocking=True)
    del tensor  # without record_stream
    torch.accelerator.synchronize()
    assert other.unique().tolist() == [0xDD], "the copy read what came after the free"
    assert next(iter(gpu.bytes_of.values())) >= 30 << 20
    torch.accelerator.empty_cache()
    assert next(iter(gpu.bytes_of.values())) == gpu.context_bytes


def test_record_stream_keeps_memory_until_the_other_stream_has_read_it() -> None:
    gpu = simulated_gpu.GPU
    tensor = torch.ones(30 << 20, dtype=torch.uint8, device="simulated")
    other = torch.empty(30 << 20, dtype=torch.uint8, pin_memory=True)
    torch.accelerator.synchronize()
    gpu.bytes_per_s = 300 << 20
    stream = torch.Stream("simulated")
    with stream:
        other.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    del tensor
    torch.accelerator.empty_cache()
    assert other.unique().tolist() == [1]
    assert next(iter(gpu.bytes_of.values())) == gpu.context_bytes


def test_all_processes_share_the_capacity_and_the_dead_give_theirs_back() -> None:
    gpu = simulated_gpu.GPU
    with occupied(gpu, 50 << 20) as process:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(20 << 20, device="simulated")
        process.kill()
        process.wait()
        assert torch.empty(40 << 20, dtype=torch.uint8, device="simulated").numel() == 40 << 20


def test_pinned_memory_and_the_last_error_follow_cuda() -> None:
    accelerator, tensor = ACCELERATORS["simulated"], torch.zeros(8, device="simulated")
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    assert accelerator.register_host(host.data_ptr(), host.nbytes) == 0
    assert accelerator.register_host(host.data_ptr() + 4096, 4096) == 712
    with pytest.raises(RuntimeError, match="712"):
        tensor.add_(1)
    assert tensor.add_(1).cpu()[0].item() == 1, "the error is told once"
    assert accelerator.unregister_host(host.data_ptr()) == 0
    assert accelerator.unregister_host(host.data_ptr()) == 713
    simulated_gpu.library().simulated_last_error()
    assert tensor.add_(1).cpu()[0].item() == 2


def test_injected_faults_come_at_their_call() -> None:
    gpu = simulated_gpu.GPU
    tensor = torch.zeros(8, device="simulated")
    gpu.fail_allocation = 2
    assert torch.empty(8, device="simulated").numel() == 8
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(8, device="simulated")
    gpu.fail_copy = 1
    with pytest.raises(RuntimeError, match="a copy failed"):
        tensor.cpu()
    gpu.lost = 1
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        tensor.add_(1)
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        torch.accelerator.synchronize()
    gpu.lost = 0
    gpu.hang = 1
    tensor.add_(1)
    done = torch.accelerator.current_stream().record_event()
    time.sleep(0.02)
    assert not done.query()
    gpu.hang = 0
    done.synchronize()


def test_an_operator_on_a_tensor_without_memory_fails() -> None:
    tensor = torch.zeros(8, device="simulated")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="without memory"):
        tensor.add_(1)


def test_an_address_from_before_a_release_ends_the_process(tmp_path: Path) -> None:
    script = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import simulated_gpu, torch
from pathlib import Path
simulated_gpu.create(Path({str(tmp_path)!r}) / "gpu")
simulated_gpu.load([Path({str(tmp_path)!r}) / "gpu"])
tensor = torch.ones(8, device="simulated")
address = tensor.data_ptr()
torch.accelerator.synchronize()
assert ctypes.string_at(address, 4) == b"\\0\\0\\x80\\x3f"
del tensor
torch.accelerator.empty_cache()
ctypes.string_at(address, 4)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -11, ended.stderr


def test_every_autograd_and_optimizer_path_computes_what_the_cpu_computes() -> None:
    results = []
    for place in ("cpu", "simulated"):
        torch.manual_seed(4)
        layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(4 * 36, 5)).to(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            images, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images.to(place)), labels.to(place)).backward()
            optimizer.step()
        results.append([value.cpu() for value in model.state_dict().values()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*results, strict=True))
