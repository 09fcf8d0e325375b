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
    """What one process has of one GPU; None where the driver does not say."""

    percent: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One look at one GPU; ``percent`` is the share of time in which a kernel ran, None where it is not told."""

    percent: float | None = None
    memory_bytes: int | None = None
    processes: Mapping[int, ProcessUse] = field(default_factory=dict)
    """By pid, every process that has a context."""


class GpuDevice(Protocol):
    """One GPU of the host."""

    @property
    def index(self) -> int:
        """Slurm's index: the number of the device file, as in ``/dev/nvidia2`` (gres.conf(5), File)."""
        ...

    def look(self) -> GpuUse:
        """Return its use since the last look, or lately; raise nothing."""
        ...


class NvmlDevice:
    """A GPU through nvidia-ml-py; whatever a GPU does not support is None (MIG instances tell little)."""

    def __init__(self, nvml: Any, position: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(position)
        self.index = int(self._told(nvml.nvmlDeviceGetMinorNumber, position))
        self._seen_us = 0

    def look(self) -> GpuUse:
        """Return utilisation, memory and processes as NVML has them now."""
        nvml = self._nvml
        utilisation = self._told(nvml.nvmlDeviceGetUtilizationRates, None)
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, None)
        return GpuUse(
            percent=None if utilisation is None else float(utilisation.gpu),
            memory_bytes=None if memory is None else int(memory.used),
            processes=self._processes(),
        )

    def _processes(self) -> dict[int, ProcessUse]:
        """Return memory and utilisation of each compute process."""
        running: list[Any] = self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses, [])
        percents = self._percents()
        return {one.pid: ProcessUse(percents.get(one.pid), one.usedGpuMemory) for one in running}

    def _percents(self) -> dict[int, float]:
        """Return each process's mean share of the SMs since the last look; NVML keeps about a minute of samples."""
        samples: list[Any] = self._told(self._since_last, [])
        by_pid: dict[int, list[float]] = {}
        for sample in samples:
            self._seen_us = max(self._seen_us, int(sample.timeStamp))
            by_pid.setdefault(int(sample.pid), []).append(float(sample.smUtil))
        return {pid: sum(values) / len(values) for pid, values in by_pid.items()}

    def _since_last(self, handle: Any) -> Any:
        """Return the driver's samples that are newer than those seen; NVML has an error for "none"."""
        return self._nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us)

    def _told(self, ask: Callable[[Any], T], otherwise: T) -> T:
        """Return what NVML answers about this device, or ``otherwise`` when it does not."""
        try:
            return ask(self._handle)
        except self._nvml.NVMLError:
            return otherwise


def nvml_devices() -> tuple[GpuDevice, ...]:
    """Return the host's GPUs; without nvidia-ml-py or a driver none, and one line in the log says so."""
    try:
        import pynvml  # noqa: PLC0415 - the module of nvidia-ml-py, which hosts without GPUs need not have
    except ImportError:
        log.info("GPUs are not sampled: nvidia-ml-py is not installed (pip install 'cadenza[gpu]')")
        return ()
    try:
        pynvml.nvmlInit()
        return tuple(NvmlDevice(pynvml, position) for position in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        log.info("GPUs are not sampled: NVML says %s", error)
        return ()
