"""Processes of a job on its GPUs, and reasons against checkpointing them; only the helper uses this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cadenza.sidecar.agent.driver.protocol import InspectCall, Inspection
from cadenza.sidecar.agent.ipc.memory_use import V1, V2
from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.leases.lease_table import GpuProcess

MIN_UVM_BYTES = 32 << 20
"""Mappings of /dev/nvidia-uvm above this size count as managed memory; the driver's own pools are smaller."""
NCCL_WITHOUT_SHARING = (b"NCCL_P2P_DISABLE=1", b"NCCL_SHM_DISABLE=1", b"NCCL_NVLS_ENABLE=0")
"""Settings with which NCCL creates no peer mappings, IPC or multicast objects, which checkpoints do not support."""
WATCHDOG = b"pt_nccl_watchdg"
"""Name of the thread in which torch's ProcessGroupNCCL waits for collectives."""
NCCL_WITHOUT_LIMITS = (b"TORCH_NCCL_ENABLE_MONITORING=0", b"TORCH_NCCL_ASYNC_ERROR_HANDLING=0")
"""Settings with which that thread ends no process that was frozen for longer than its limits (torch: ProcessGroupNCCL,
480 s without a heartbeat and 600 s for a collective, both by a clock that does not stop with the process)."""


class Inspector:
    """Inspects through nvidia-ml-py; ``proc`` and ``cgroup`` are the kernel's file systems."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._nvml: Any = None

    def inspect(self, asked: InspectCall) -> Inspection:
        """Return a job's processes and its GPUs' free memory, with a reason to leave them alone if there is one."""
        try:
            devices = self._devices()
        except Exception as error:  # noqa: BLE001 - NVML's errors have no base before it is imported
            return Inspection(asked.id, refused=f"NVML: {error} (pip install nvidia-ml-py)")
        try:
            return self._inspected(asked, {gpu: devices[gpu] for gpu in asked.gpus})
        except KeyError as error:
            return Inspection(asked.id, refused=f"NVML does not know GPU {error}")
        except self._nvml.NVMLError as error:
            return Inspection(asked.id, refused=f"NVML: {error}")

    def _devices(self) -> dict[int, Any]:
        """Return NVML's handles by the number of the device file, which is Slurm's index (gres.conf(5), File)."""
        import pynvml  # noqa: PLC0415 - the module of nvidia-ml-py

        if self._nvml is None:
            pynvml.nvmlInit()
            self._nvml = pynvml
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return {int(pynvml.nvmlDeviceGetMinorNumber(handle)): handle for handle in handles}

    def _inspected(self, asked: InspectCall, devices: dict[int, Any]) -> Inspection:
        """Return the inspection of a job on these devices."""
        sizes: dict[int, dict[int, int | None]] = {}
        for gpu, handle in devices.items():
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                sizes.setdefault(process.pid, {})[gpu] = process.usedGpuMemory
        own = {pid: by_gpu for pid, by_gpu in sizes.items() if self._belongs(pid, asked)}
        processes = tuple(
            GpuProcess(pid, ticks, tuple((gpu, size or 0) for gpu, size in sorted(by_gpu.items())))
            for pid, by_gpu in sorted(own.items())
            if (ticks := start_ticks(pid)) is not None
        )
        # Without sizes it is not known whether the host has room for the copy.
        unsized = [pid for pid, by_gpu in own.items() if None in by_gpu.values()]
        # A restore that finds too little memory cannot be repeated (NVIDIA/cuda-checkpoint, issue 44).
        free = {gpu: int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free) for gpu, handle in devices.items()}
        headroom = [left for pid in own for left in self._headroom(pid)]
        refused = self._shared(devices) or self.refusal(own) or ""
        if not refused and unsized:
            refused = f"NVML does not report the GPU memory of pid {unsized[0]}"
        return Inspection(asked.id, processes, tuple(free.items()), min(headroom, default=None), refused)

    def _belongs(self, pid: int, asked: InspectCall) -> bool:
        """Return True if a process belongs to the job and to its user."""
        try:
            return pid in asked.pids and (self._proc / str(pid)).stat().st_uid == asked.uid
        except OSError:
            return False

    def _shared(self, devices: dict[int, Any]) -> str | None:
        """Return a reason if a GPU is shared in a way that the checkpoint API does not support."""
        nvml = self._nvml
        for gpu, handle in devices.items():
            if _supported(nvml, nvml.nvmlDeviceGetMigMode, handle, (0, 0))[0]:
                return f"GPU {gpu} is divided (MIG), which CUDA's checkpoints do not support"
            if _supported(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle, ()):
                return f"GPU {gpu} is shared through MPS, which CUDA's checkpoints do not support"
        return None

    def refusal(self, pids: Iterable[int]) -> str | None:
        """Return a reason if a checkpoint of a process would fail, perhaps leaving it spoilt."""
        own = list(pids)
        for pid in own:
            managed = mapped_managed_bytes(pid, self._proc)
            if managed > MIN_UVM_BYTES:
                return f"pid {pid} maps {managed >> 20} MB of managed memory (UVM), which checkpoints do not support"
            if any(path.startswith("/dev/shm/cuda.shm.") for _, _, path in _maps(pid, self._proc)):  # noqa: S108 - CUDA's own name
                return f"pid {pid} shares GPU memory with other processes (CUDA IPC)"
            environment = _read(self._proc / str(pid) / "environ").split(b"\0")
            limited = next((one.decode() for one in NCCL_WITHOUT_LIMITS if one not in environment), None)
            threads = (self._proc / str(pid) / "task").glob("*/comm")
            if limited and any(_read(path).strip() == WATCHDOG for path in threads):
                return (
                    f"NCCL's watchdog in pid {pid} would end it after a stop of some minutes: it was started without "
                    f"{limited}; set {' '.join(one.decode() for one in NCCL_WITHOUT_LIMITS)} in the batch script"
                )
            missing = next((one.decode() for one in NCCL_WITHOUT_SHARING if one not in environment), None)
            if len(own) > 1 and missing:
                return (
                    f"{len(own)} processes use its GPUs, and pid {pid} was started without {missing}; "
                    "set NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 in the batch script"
                )
        return None

    def _headroom(self, pid: int) -> Iterator[int]:
        """Yield the bytes left under each memory limit above a process (kernel documentation, cgroup v1 and v2)."""
        for line in _read(self._proc / str(pid) / "cgroup").decode(errors="replace").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            files = V1 if "memory" in controllers.split(",") else V2 if number == "0" and not controllers else None
            if files is None:
                continue
            top = self._cgroup / files.mount
            group = top / path.lstrip("/")
            while group != top and top in group.parents:
                limit, used = files.limit_of(group), files.used_in(group)
                if limit is not None and used is not None:
                    yield limit - used
                group = group.parent


def mapped_managed_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the bytes that a process maps as CUDA maps managed memory."""
    return sum(end - start for start, end, path in _maps(pid, proc) if path.startswith("/dev/nvidia-uvm"))


def _maps(pid: int, proc: Path) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and file of a process's mappings (proc_pid_maps(5))."""
    for line in _read(proc / str(pid) / "maps").splitlines():
        fields = line.decode(errors="replace").split(maxsplit=5)
        if len(fields) == 6:  # noqa: PLR2004
            start, _, end = fields[0].partition("-")
            yield int(start, 16), int(end, 16), fields[5]


def _supported(nvml: Any, ask: Any, handle: Any, otherwise: Any) -> Any:
    """Return NVML's answer about a device, or ``otherwise`` if device or driver do not support the question."""
    try:
        return ask(handle)
    except nvml.NVMLError:
        return otherwise


def _read(path: Path) -> bytes:
    """Return a file's content; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
