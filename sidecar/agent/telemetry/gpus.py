"""The host's GPUs as NVML sees them, behind a small protocol; without NVML there are none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILED = frozenset({15, 16, 999})
"""NVML's errors of a device that has failed: NVML_ERROR_GPU_IS_LOST, _RESET_REQUIRED and _UNKNOWN (nvmlReturn_t)."""
UUID = re.compile(r"GPU-[0-9a-fA-F-]+")
NO_SAMPLES = 6
"""NVML_ERROR_NOT_FOUND: no process has used the GPU since the last look."""
FIND_AGAIN_S = 60.0
"""Time between two searches for GPUs while none has been found, or one has failed, in seconds."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Use of one GPU by one process; None where the driver does not report it."""

    percent: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of one GPU; ``percent`` is the share of time in which a kernel ran, None if not reported."""

    percent: float | None = None
    memory_bytes: int | None = None
    processes: Mapping[int, ProcessUse] | None = field(default_factory=dict)
    """Every process with a context, by pid; None where the driver does not name them."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes, None where the driver does not report it."""

    free: int | None = None
    total: int | None = None
    fault: str = ""
    """The driver's word on a GPU that has failed, "" for one that answers."""


class GpuDevice(Protocol):
    """One GPU of the host."""

    @property
    def index(self) -> int:
        """Slurm's index: the number of the device file, as in ``/dev/nvidia2`` (gres.conf(5), File)."""
        ...

    def look(self) -> GpuUse:
        """Return its use since the last call, or lately; raise nothing."""
        ...

    def processes(self) -> Mapping[int, int | None] | None:
        """Return the bytes of each process with a context by pid, None where they are not told; raise nothing.

        None instead of a mapping: the driver does not name the processes.
        """
        ...

    def memory(self) -> GpuMemory:
        """Return its memory, or its fault; raise nothing."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names that exporters have for it: NVML's index and the UUID, if they are known."""
        ...

    @property
    def kind(self) -> str:
        """Its type, as in ``NVIDIA H100 80GB HBM3``; "" if it is not known."""
        ...

    @property
    def divided(self) -> bool:
        """True if MIG is on, so that Slurm's indices are those of instances, and not of GPUs."""
        ...


class NvmlDevice:
    """A GPU through nvidia-ml-py; figures that a GPU does not support are None (MIG instances report little)."""

    def __init__(self, nvml: Any, position: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(position)
        # NVML's own positions follow the PCI bus, and Slurm counts device files (gres.conf(5), File).
        self.index = int(self._ask(nvml.nvmlDeviceGetMinorNumber, position))
        uuid = str(self._ask(nvml.nvmlDeviceGetUUID, ""))
        self.names = (str(position), *((uuid,) if UUID.fullmatch(uuid) else ()))
        self._last_us = 0

    @property
    def kind(self) -> str:
        """NVML's name of its type."""
        name: Any = self._ask(self._nvml.nvmlDeviceGetName, "")
        # nvidia-ml-py before 11.515 returns bytes.
        return name.decode() if isinstance(name, bytes) else str(name)

    @property
    def divided(self) -> bool:
        """True if NVML says that MIG is on now."""
        return bool(self._ask(self._nvml.nvmlDeviceGetMigMode, (0, 0))[0])

    def look(self) -> GpuUse:
        """Return NVML's present utilization, memory and processes."""
        nvml = self._nvml
        utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates, None)
        memory = self._ask(self._memory_info, None)
        sizes, percents = self.processes(), self._percents()
        unlisted = None if percents is None else 0.0
        return GpuUse(
            percent=None if utilization is None else float(utilization.gpu),
            memory_bytes=None if memory is None else int(memory.used),
            processes=None if sizes is None else
            {pid: ProcessUse((percents or {}).get(pid, unlisted), size) for pid, size in sizes.items()},
        )  # fmt: skip

    def processes(self) -> Mapping[int, int | None] | None:
        """Return NVML's processes on this GPU with their memory."""
        running: list[Any] | None = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, None)
        return None if running is None else {int(one.pid): one.usedGpuMemory for one in running}

    def memory(self) -> GpuMemory:
        """Return NVML's free memory, or its error if it has lost this GPU."""
        try:
            memory = self._memory_info(self._handle)
        except self._nvml.NVMLError as error:
            # Other errors, such as "not supported", say nothing of the GPU's health.
            return GpuMemory(fault=str(error) if error.value in FAILED else "")
        return GpuMemory(int(memory.free), int(memory.total))

    def _memory_info(self, handle: Any) -> Any:
        """Return NVML's memory; version 1, all that drivers before 510 have, counts what is reserved as used."""
        try:
            return self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        except self._nvml.NVMLError_FunctionNotFound:
            return self._nvml.nvmlDeviceGetMemoryInfo(handle)

    def _percents(self) -> dict[int, float] | None:
        """Return each process's mean share of the SMs since the last call, None if this GPU does not tell it.

        NVML keeps about a minute of samples, and only those of processes that used the GPU: one without any was idle
        (NVML API reference, nvmlDeviceGetProcessUtilization).
        """
        samples: list[Any]
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._last_us)
        except self._nvml.NVMLError as error:
            if error.value != NO_SAMPLES:
                return None
            samples = []
        by_pid: dict[int, list[float]] = {}
        for sample in samples:
            self._last_us = max(self._last_us, int(sample.timeStamp))
            by_pid.setdefault(int(sample.pid), []).append(float(sample.smUtil))
        return {pid: sum(values) / len(values) for pid, values in by_pid.items()}

    def _ask(self, question: Callable[[Any], T], otherwise: T) -> T:
        """Return NVML's answer about this device, or ``otherwise`` if it has none (or an error that means none)."""
        try:
            return question(self._handle)
        except self._nvml.NVMLError:
            return otherwise


class LostDevice:
    """A GPU of which NVML reports nothing, because it has failed."""

    divided = False
    names = ()
    kind = ""

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        self._reason = reason

    def look(self) -> GpuUse:
        """Return a use without figures."""
        return GpuUse(processes=None)

    def processes(self) -> None:
        """Return None: NVML does not name its processes."""

    def memory(self) -> GpuMemory:
        """Return NVML's error."""
        return GpuMemory(fault=self._reason)


class GpuFinder:
    """The host's GPUs, searched for again while there are none, or one has failed.

    An agent may start before the driver has, and a GPU that was reset has another handle.
    """

    def __init__(self, clock: Clock, find: Callable[[], Sequence[GpuDevice]]) -> None:
        self._clock = clock
        self._find = find
        self._found: Sequence[GpuDevice] = ()
        self._next_s = float("-inf")

    def devices(self, *, failed: bool = False) -> Sequence[GpuDevice]:
        """Return the GPUs that were found; ``failed``: the last look has found one that has failed."""
        now = self._clock.monotonic()
        if (failed or not self._found) and now >= self._next_s:
            self._next_s = now + FIND_AGAIN_S
            self._found = self._find()
        return self._found


def driver_version() -> str:
    """Return the driver's version by NVML; "" without nvidia-ml-py or a driver."""
    try:
        import pynvml  # noqa: PLC0415 - the module of nvidia-ml-py, which hosts without GPUs need not have
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def nvml_devices(dev: Path = Path("/dev")) -> tuple[GpuDevice, ...]:
    """Return the host's GPUs; without nvidia-ml-py or a driver none, and one line in the log tells it.

    A GPU that NVML has lost is the one whose device file in ``dev`` belongs to no other.
    """
    try:
        import pynvml  # noqa: PLC0415 - the module of nvidia-ml-py, which hosts without GPUs need not have
    except ImportError:
        log.info("GPUs are not sampled: nvidia-ml-py is not installed (pip install nvidia-ml-py)")
        return ()
    devices: list[GpuDevice] = []
    errors: list[str] = []
    try:
        pynvml.nvmlInit()
        for position in range(pynvml.nvmlDeviceGetCount()):
            try:
                devices.append(NvmlDevice(pynvml, position))
            except pynvml.NVMLError as error:
                errors.append(str(error))
    except pynvml.NVMLError as error:
        log.info("GPUs are not sampled: NVML: %s", error)
        return ()
    files = (path.name.removeprefix("nvidia") for path in dev.glob("nvidia[0-9]*"))
    unknown = sorted({int(number) for number in files if number.isdigit()} - {device.index for device in devices})
    lost = [LostDevice(index, error) for index, error in zip(unknown, errors, strict=False)]
    for device in lost:
        log.error("GPU %d has failed: %s", device.index, device.memory().fault)
    return (*devices, *lost)
