"""NCCL's watchdog (torch's ProcessGroupNCCL) before Slurm stops the process: it must have seen all collectives end."""

from __future__ import annotations

import sys

from cadenza.sidecar.client.clock import monotonic_ns

LOOK_NS = 250_000_000
"""Time in which the watchdog has looked: it does so every 100 ms (torch: ``kWatchdogThreadSleepMillis``)."""
MODULE = "torch.distributed.distributed_c10d"


def quiet_at_ns() -> int:
    """Return the CLOCK_MONOTONIC time, in nanoseconds, at which the watchdog knows of no collective under way.

    Waits for the device first. 0 where the process has no NCCL group. A collective that the watchdog has not seen end
    would be older than its limit when Slurm lets the process go on, and the watchdog would end the process.
    """
    module = sys.modules.get(MODULE)
    # torch.distributed has no public list of all process groups.
    groups = module._world.pg_map.values() if module is not None else ()  # noqa: SLF001
    if not any("nccl" in backend for backend, _ in groups):
        return 0
    _synchronize()
    return monotonic_ns() + LOOK_NS


def _synchronize() -> None:
    """Wait for the GPUs in use; the thread's own may have no context yet, and a wait would open one."""
    from cadenza.sidecar.client.offload import device  # noqa: PLC0415 - it imports torch

    if accelerator := device.in_use():
        for place in accelerator.used():
            accelerator.synchronize(place)
