"""Host memory for a GPU's state: pinned in chunks, ahead of time, and given back; the runtime's calls are recorded."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from client_peer import Peer, Script
from torch.overrides import TorchFunctionMode

from cadenza.sidecar import client
from cadenza.sidecar.client.offload import device, host_memory
from cadenza.sidecar.client.offload.device import Accelerator
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.host_memory import HostBuffer

MIB = 1 << 20
CPU = torch.device("cpu")
RUNTIME = """
static int last;
int cudaHostRegister(void *address, unsigned long size, unsigned flags) { return last = 2; }
int cudaHostUnregister(void *address) { return last = 713; }
int cudaPeekAtLastError(void) { return last; }
int cudaGetLastError(void) { int code = last; return last = 0, code; }
"""


class Pinned(Accelerator):
    """An accelerator with a table of pinned memory, sizes by address."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.sizes: dict[int, int] = {}
        self.calls: list[int] = []
        self.refuses_after = 99
        self.last = 0

    def register_host(self, address: int, nbytes: int) -> int:
        if len(self.calls) >= self.refuses_after:
            self.last = 2
            return 2
        assert not any(start < address + nbytes and address < start + size for start, size in self.sizes.items())
        self.sizes[address] = nbytes
        self.calls.append(nbytes // MIB)
        return 0

    def unregister_host(self, address: int) -> int:
        del self.sizes[address]
        return 0

    def clear_error(self) -> None:
        self.last = 0

    def used(self) -> list[torch.device]:
        return [CPU]

    def allocated(self, device: torch.device) -> int:
        return 0

    def in_use_and_peak(self, device: torch.device) -> tuple[int, int]:
        return 0, 0

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    table = Pinned()
    monkeypatch.setitem(device.ACCELERATORS, "cpu", table)
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 4 * MIB)
    return table


def test_growing_pins_only_what_is_new_and_moves_nothing(pinned: Pinned) -> None:
    buffer = HostBuffer()
    memory = buffer.reserve(10 * MIB, CPU)
    memory.fill_(7)
    assert pinned.calls == [4, 4, 2]
    larger = buffer.reserve(13 * MIB, CPU)
    assert pinned.calls == [4, 4, 2, 4]
    assert buffer.bounds == (4 * MIB, 8 * MIB, 10 * MIB, 14 * MIB)
    assert larger.data_ptr() == memory.data_ptr()
    assert bool((larger[: 10 * MIB] == 7).all())
    buffer.reserve(5 * MIB, CPU)
    assert len(pinned.calls) == 4
    buffer.free()
    assert (pinned.sizes, buffer.nbytes) == ({}, 0)


def test_memory_is_pinned_ahead_as_far_as_the_host_has_any(pinned: Pinned) -> None:
    """What is still missing at the yield is pinned then."""
    buffer = HostBuffer()
    allowed = iter([True, True, False])
    buffer.pin_ahead(15 * MIB, CPU, lambda nbytes: nbytes == 4 * MIB and next(allowed))
    assert buffer._ahead is not None
    buffer._ahead.join(10)
    assert (pinned.calls, buffer.nbytes) == ([4, 4], 8 * MIB)
    buffer.reserve(15 * MIB, CPU)
    assert pinned.calls == [4, 4, 4, 4]
    buffer.pin_ahead(15 * MIB, CPU, lambda _: pytest.fail("all of it is pinned"))
    del buffer
    assert pinned.sizes == {}


def test_memory_that_cannot_be_pinned_is_used_unpinned(pinned: Pinned, caplog: pytest.LogCaptureFixture) -> None:
    pinned.refuses_after = 1
    buffer = HostBuffer()
    memory = buffer.reserve(10 * MIB, CPU)
    memory.fill_(1)
    assert buffer.bounds == (4 * MIB,)
    offload = Offload()
    offload._buffer = buffer
    assert (offload.pinned_bytes, offload.host_bytes) == (4 * MIB, 10 * MIB)
    buffer.reserve(12 * MIB, CPU)
    assert caplog.text.count("could not be pinned (error 2)") == 1
    assert pinned.last == 0


def test_a_failed_registration_leaves_no_error_for_the_next_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the last error of a thread; the runtime is found under the hashed name that wheels give it."""
    source, library = tmp_path / "runtime.c", tmp_path / "libcudart-9335f6a2.so.13"
    source.write_text(RUNTIME)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    runtime = ctypes.CDLL(str(library))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    caplog.set_level(logging.WARNING)
    buffer = HostBuffer()
    buffer.reserve(MIB, torch.device("cuda", 0)).fill_(3)
    assert "(error 2)" in caplog.text
    assert runtime.cudaPeekAtLastError() == 0
    buffer._chunks._addresses.append((device.ACCELERATORS["cuda"], torch.device("cuda", 0), 1))
    buffer.free()
    assert runtime.cudaPeekAtLastError() == 0


def test_no_copy_crosses_the_end_of_a_chunk() -> None:
    class Copies(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.copy_:
                self.sizes.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    host, source = torch.zeros(100, dtype=torch.uint8), torch.arange(40, dtype=torch.uint8)
    with Copies() as copies:
        host_memory.copy_within(host[10:50], source, [10, 25, 49, 60])
        host_memory.copy_within(source, host[60:], [60, 100])
    assert copies.sizes == [15, 24, 1, 40]
    assert torch.equal(host[10:50], torch.arange(40, dtype=torch.uint8))


def test_detach_gives_the_memory_back(job: Peer, pinned: Pinned) -> None:
    """Lightning detaches after each fit, and attaches for the next."""
    script = Script(job.rank, job)
    session = client.attach(torch.nn.Linear(2, 2))
    script.finish()
    session._offload = Offload()
    session._offload._buffer.reserve(MIB, CPU)
    assert len(pinned.sizes) == 1
    client.detach()
    assert pinned.sizes == {}


def test_the_gpu_memory_of_a_job_that_takes_turns_is_pinned_ahead(
    job: Peer, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(job.rank, job)
    session = client.attach(torch.nn.Linear(2, 2))
    script.finish()
    monkeypatch.setattr(
        sys.modules[type(session).__module__], "gpu_memory", lambda: {0: (2 * MIB, 5 * MIB), 5: (4 * MIB, 9 * MIB)}
    )
    monkeypatch.setattr(device, "in_use", lambda: pinned)
    session.boundary()
    assert session._offload is not None
    assert session._offload._buffer._ahead is not None
    session._offload._buffer._ahead.join(10)
    assert pinned.calls == [4, 2]
    client.detach()
    assert pinned.sizes == {}
