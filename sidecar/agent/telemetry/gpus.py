"""The host's GPUs as NVML sees them, behind a small protocol; without NVML there are none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


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
    processes: Mapping[int, ProcessUse] = field(default_factory=dict)
    """Every process with a context, by pid."""


class GpuDevice(Protocol):
    """One GPU of the host."""

    @property
    def index(self) -> int:
        """Slurm's index: the number of the device file, as in ``/dev/nvidia2`` (gres.conf(5), File)."""
        ...

    def look(self) -> GpuUse:
        """Return its use since the last call, or lately; raise nothing."""
        ...

    def processes(self) -> Mapping[int, int | None]:
        """Return the bytes of each process with a context by pid, None where they are not told; raise nothing."""
        ...


class NvmlDevice:
    """A GPU through nvidia-ml-py; figures that a GPU does not support are None (MIG instances report little)."""

    def __init__(self, nvml: Any, position: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(position)
        self.index = int(self._ask(nvml.nvmlDeviceGetMinorNumber, position))
        self._last_us = 0

    def look(self) -> GpuUse:
        """Return NVML's present utilization, memory and processes."""
        nvml = self._nvml
        utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates, None)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, None)
        running: list[Any] = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, [])
        percents = self._percents()
        return GpuUse(
            percent=None if utilization is None else float(utilization.gpu),
            memory_bytes=None if memory is None else int(memory.used),
            processes={one.pid: ProcessUse(percents.get(one.pid), one.usedGpuMemory) for one in running},
        )

    def processes(self) -> Mapping[int, int | None]:
        """Return NVML's processes on this GPU with their memory."""
        running: list[Any] = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, [])
        return {int(one.pid): one.usedGpuMemory for one in running}

    def _percents(self) -> dict[int, float]:
        """Return each process's mean share of the SMs since the last call; NVML keeps about a minute of samples."""
        question = self._nvml.nvmlDeviceGetProcessUtilization
        samples: list[Any] = self._ask(lambda handle: question(handle, self._last_us), [])
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


def nvml_devices() -> tuple[GpuDevice, ...]:
    """Return the host's GPUs; without nvidia-ml-py or a driver none, and one line in the log tells it."""
    try:
        import pynvml  # noqa: PLC0415 - the module of nvidia-ml-py, which hosts without GPUs need not have
    except ImportError:
        log.info("GPUs are not sampled: nvidia-ml-py is not installed (pip install 'cadenza[gpu]')")
        return ()
    try:
        pynvml.nvmlInit()
        return tuple(NvmlDevice(pynvml, position) for position in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        log.info("GPUs are not sampled: NVML: %s", error)
        return ()
