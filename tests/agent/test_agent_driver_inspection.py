"""Inspection of a job's processes on its GPUs: what is found, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.driver.cuda import Cuda, CudaError
from cadenza.sidecar.agent.driver.inspection import Inspector
from cadenza.sidecar.agent.driver.protocol import InspectCall

MAPS = "7f00-7f10 r--p 0 00:00 1 /usr/lib/x.so\n200000000-{end:x} rw-s 0 00:06 7 /dev/nvidia-uvm\n"


@pytest.fixture
def pid() -> Iterator[int]:
    """Return a process of a job."""
    with subprocess.Popen(["/bin/sh", "-c", "read end"], stdin=subprocess.PIPE) as child:
        yield child.pid
        child.kill()


class Tree:
    """A /proc and a /sys/fs/cgroup with one process in them, and NVML's answers about one GPU."""

    def __init__(self, root: Path, pid: int) -> None:
        self.process = root / "proc" / str(pid)
        self.process.mkdir(parents=True)
        self.write("maps", MAPS.format(end=0x200000000 + (2 << 20)))
        self.write("cgroup", "0::/job_7/step_0\n")
        self.group = root / "cgroup" / "job_7"
        (self.group / "step_0").mkdir(parents=True)
        self.inspector = Inspector(root / "proc", root / "cgroup")
        self.size: int | None = 1000
        self.pid = pid
        self.inspector._nvml = SimpleNamespace(
            NVMLError=RuntimeError,
            nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=self.size)],
            nvmlDeviceGetMPSComputeRunningProcesses=lambda handle: [],
            nvmlDeviceGetMigMode=lambda handle: [0, 0],
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=5),
        )
        self.inspector._devices = lambda: {0: "handle"}

    def write(self, name: str, text: str) -> None:
        (self.process / name).write_text(text)

    def inspect(self, **fields: object):
        return self.inspector.inspect(
            InspectCall(**{"id": 1, "uid": os.getuid(), "gpus": (0,), "pids": (self.pid,), **fields})
        )


@pytest.fixture
def tree(tmp_path: Path, pid: int) -> Tree:
    return Tree(tmp_path, pid)


def test_a_process_is_told_with_its_memory_and_its_jobs_room(tree: Tree) -> None:
    (tree.group / "memory.max").write_text("900\n")
    (tree.group / "memory.current").write_text("300\n")
    (tree.group / "step_0" / "memory.max").write_text("max\n")
    inspection = tree.inspect()
    assert [(one.pid, one.gpu_bytes) for one in inspection.processes] == [(tree.pid, ((0, 1000),))]
    assert (inspection.free, inspection.headroom, inspection.refused) == (((0, 5),), 600, "")


def test_page_cache_is_room_in_both_versions_of_control_groups(tree: Tree) -> None:
    """A job that reads its data set sits at its limit, and nearly all of that is cache."""
    tree.write("cgroup", "5:cpu,memory:/slurm/job_7\n0::/job_7/step_0\n")
    (tree.group / "memory.max").write_text("900\n")
    (tree.group / "memory.current").write_text("890\n")
    (tree.group / "memory.stat").write_text("anon 90\ninactive_file 800\n")
    assert tree.inspect().headroom == 810
    first = tree.group.parent / "memory" / "slurm"
    (first / "job_7").mkdir(parents=True)
    for group, limit, used in ((first / "job_7", 1000, 990), (first, 2000, 1990)):
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (first / "job_7" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 500\n")
    (first / "memory.stat").write_text("total_inactive_file 600\n")
    assert tree.inspect().headroom == 510


def test_a_watchdog_of_nccl_refuses_unless_its_limits_are_off(tree: Tree) -> None:
    """Frozen for longer than its limits, the process would be ended at its first step after them."""
    (tree.process / "task" / "12").mkdir(parents=True)
    (tree.process / "task" / "12" / "comm").write_text("python\n")
    assert tree.inspect().refused == ""
    (tree.process / "task" / "13").mkdir()
    (tree.process / "task" / "13" / "comm").write_text("pt_nccl_watchdg\n")
    tree.write("environ", "A=1\0TORCH_NCCL_ENABLE_MONITORING=0\0")
    assert "started without TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in tree.inspect().refused
    tree.write("environ", "TORCH_NCCL_ENABLE_MONITORING=0\0TORCH_NCCL_ASYNC_ERROR_HANDLING=0\0")
    assert tree.inspect().refused == ""


@pytest.mark.parametrize("other", [{"pids": (1,)}, {"uid": 4242}])
def test_processes_of_others_are_not_the_jobs(tree: Tree, other: dict[str, Any]) -> None:
    assert tree.inspect(**other).processes == ()


def test_managed_memory_is_refused(tree: Tree) -> None:
    tree.write("maps", MAPS.format(end=0x200000000 + (1 << 30)))
    assert "maps 1024 MB of managed memory (UVM)" in tree.inspect().refused


def test_shared_gpu_memory_is_refused(tree: Tree) -> None:
    tree.write("maps", "7f00-7f10 rw-s 0 00:01 9 /dev/shm/cuda.shm.0.1.1\n")
    assert "CUDA IPC" in tree.inspect().refused


def test_memory_of_unknown_size_is_refused(tree: Tree) -> None:
    tree.size = None
    assert "NVML does not report the GPU memory" in tree.inspect().refused


def test_a_gpu_that_nvml_does_not_know_is_refused(tree: Tree) -> None:
    assert tree.inspect(gpus=(3,)).refused == "NVML does not know GPU 3"


def test_bindings_that_are_not_there_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EnvironmentLacks, match=r"cuda-bindings is not installed \(pip install"):
        Cuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=SimpleNamespace()))
    with pytest.raises(EnvironmentLacks, match=r"has no cuCheckpointProcessLock: install 12\.8"):
        Cuda()


def test_a_remap_needs_a_driver_for_it_and_uuids() -> None:
    cuda = Cuda.__new__(Cuda)
    cuda.version = 12080
    with pytest.raises(CudaError, match=r"needs driver 580, CUDA 13\.0; this is 12\.8"):
        cuda.restore(1, [("GPU-0", "GPU-1")])
    cuda.version = 13000
    with pytest.raises(CudaError, match="'GPU-0' is no GPU's UUID"):
        cuda.restore(1, [("GPU-0", "GPU-1")])
