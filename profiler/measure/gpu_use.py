"""The GPUs of this node as NVML sees them, and their use while a point is measured; none where there is no driver.

Not run on a machine with a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, nvml_devices

log = logging.getLogger(__name__)


def visible(environ: Mapping[str, str] = os.environ) -> tuple[GpuDevice, ...]:
    """Return the GPUs that the command may use: those of CUDA_VISIBLE_DEVICES by number, else all."""
    devices = nvml_devices()
    # NVML shows all GPUs of the node whatever this variable says.
    named = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if named == [""] or not all(name.strip().isdigit() for name in named):
        return devices
    return tuple(devices[int(name)] for name in named if int(name) < len(devices))


def kind() -> str:
    """Return the type of the first GPU, as in ``NVIDIA H100 80GB HBM3``; empty without one."""
    try:
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception as error:  # noqa: BLE001 - no module, no driver, no device: none of them matters here
        log.debug("GPU type not known: %s", error)
        return ""
    return name.decode() if isinstance(name, bytes) else str(name)


class Watch:
    """Mean utilization of the GPUs, from one sample a window."""

    def __init__(self, devices: tuple[GpuDevice, ...]) -> None:
        self._devices = devices
        self._percents: list[float] = []

    def look(self) -> None:
        """Take one sample of every GPU."""
        for device in self._devices:
            if (percent := device.look().percent) is not None:
                self._percents.append(percent)

    @property
    def utilization(self) -> float | None:
        """Return the mean share of time in which a kernel ran, 0 to 1; None without samples."""
        return sum(self._percents) / len(self._percents) / 100 if self._percents else None
