"""The host memory for a GPU's state lies on the GPU's own NUMA node, where the host has several."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import pytest
import torch

from cadenza.sidecar.client.offload import device, host_memory
from cadenza.sidecar.client.offload.device import Accelerator
from cadenza.sidecar.client.offload.host import numa
from cadenza.sidecar.client.offload.host_memory import HostBuffer

GPU = "0000:3B:00.0"
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS = 2
"""MPOL_F_ADDR of get_mempolicy(2)."""


def host(root: Path, nodes: int, node: str) -> Path:
    for number in range(nodes):
        (root / numa.NODES / f"node{number}").mkdir(parents=True)
    (root / numa.NODES / "online").write_text("0-9\n")
    gpu = root / numa.DEVICES / GPU.lower()
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(node)
    return root


@pytest.mark.parametrize(
    ("nodes", "written", "expected"),
    [(2, "1\n", 1), (8, "0\n", 0), (1, "0\n", None), (2, "-1\n", None), (2, "9999\n", None), (2, "what", None)],
)
def test_the_node_of_a_gpu_is_the_kernels(tmp_path: Path, nodes: int, written: str, expected: int | None) -> None:
    assert numa.node_of(GPU, host(tmp_path, nodes, written)) == expected
    assert numa.node_of("", tmp_path) is None
    assert numa.node_of("0000:ff:00.0", tmp_path) is None


def policy_of(memory: mmap.mmap) -> tuple[int, int]:
    """Return the policy of a mapping and the first nodes of its mask, by the kernel."""
    mode, bits = ctypes.c_int(), (ctypes.c_ulong * 16)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call, number = ctypes.CDLL(None, use_errno=True).syscall, GET_MEMPOLICY[platform.machine()]
    arguments = (number, ctypes.addressof(mode), ctypes.addressof(bits), 1024, address, OF_ADDRESS)
    assert call(*map(ctypes.c_long, arguments)) == 0, ctypes.get_errno()
    return mode.value, bits[0]


def test_a_mapping_prefers_the_node_that_it_is_bound_to() -> None:
    memory = mmap.mmap(-1, 1 << 22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if platform.machine() not in GET_MEMPOLICY or not numa.prefer(memory, 0):
        pytest.skip("the system call is refused here")
    assert policy_of(memory) == (numa.PREFERRED, 1)
    memory[:4] = b"some"
    assert not numa.prefer(memory, 777)  # there is none, and nothing breaks
    assert memory[:4] == b"some"
    memory.close()


def test_the_memory_of_a_device_is_bound_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, int]] = []

    class Near(Accelerator):
        def pci_address(self, device: torch.device) -> str:
            return f"{GPU} {device.index}"

        def register_host(self, address: int, nbytes: int) -> int:
            assert bound
            return 2

    monkeypatch.setitem(device.ACCELERATORS, "cpu", Near("cpu"))
    monkeypatch.setattr(torch.cpu, "device", torch.device, raising=False)
    monkeypatch.setattr(Near, "on", lambda *_: torch.no_grad())
    monkeypatch.setattr(host_memory.numa, "node_of", lambda address: 1 if address == f"{GPU} 3" else None)
    monkeypatch.setattr(host_memory.numa, "prefer", lambda memory, node: bound.append((len(memory), node)))
    buffer = HostBuffer()
    buffer.reserve(1 << 20, torch.device("cpu", 3))
    assert bound == [(host_memory.GROWTH << 20, 1)]
