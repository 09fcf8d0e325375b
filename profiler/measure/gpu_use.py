"""The GPUs of this node as NVML sees them, and their use while a point is measured; none where there is no driver.

Not run on a machine with a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, nvml_devices


def visible(environ: Mapping[str, str] = os.environ) -> tuple[GpuDevice, ...]:
    """Return the GPUs that the command may use; all where CUDA_VISIBLE_DEVICES does not tell them for sure."""
    devices = nvml_devices()
    # NVML shows all GPUs of the node whatever this variable says.
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    found = [_named(name, devices, environ) for name in named]
    return devices if None in found else tuple(device for device in found if device is not None)


def _named(name: str, devices: Sequence[GpuDevice], environ: Mapping[str, str]) -> GpuDevice | None:
    """Return the GPU with this number or UUID, which may be cut short; None if it is not told for sure."""
    if name.startswith("GPU-"):
        alike = [device for device in devices if any(known.startswith(name) for known in device.names)]
        return alike[0] if len(alike) == 1 else None
    # CUDA counts the fastest GPU first, NVML by the PCI bus: on a node with several types the numbers differ
    # (CUDA C++ programming guide, environment variables, CUDA_DEVICE_ORDER).
    same = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.kind for device in devices}) == 1
    return devices[int(name)] if same and name.isdecimal() and int(name) < len(devices) else None


def kind() -> str:
    """Return the type of the first GPU that the command may use, as in ``NVIDIA H100 80GB HBM3``; "" without one."""
    return next((device.kind for device in visible()), "")


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
