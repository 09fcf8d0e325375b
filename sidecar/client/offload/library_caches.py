"""Device and host memory that torch and its libraries cache, given back when a job's state leaves the GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

_log = logging.getLogger("cadenza.client")


def release(devices: Sequence[torch.device]) -> None:
    """Give back the caches that torch makes again when it needs them; one that cannot be is left.

    cuBLAS keeps a workspace of 32 MiB and more for each handle and stream, cuFFT its plans, and torch the pinned
    blocks of finished copies.
    """
    for name, give_back in _givers(devices):
        try:
            give_back()
        except (RuntimeError, AttributeError) as error:
            _log.debug("%s stay: %s", name, error)


def _givers(devices: Sequence[torch.device]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the functions of CUDA that this version of torch has, by the name of what they give back."""
    own = [device for device in devices if device.type == "cuda"]
    if not own:
        return
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):  # noqa: SLF001
        yield "cuBLAS workspaces", clear
    for device in own:
        yield "cuFFT plans", functools.partial(_clear_plans, device)
    if empty := getattr(getattr(torch, "accelerator", None), "empty_host_cache", None):  # since torch 2.11
        yield "pinned blocks", empty


def _clear_plans(device: torch.device) -> None:
    """Drop a device's cuFFT plans with their workspaces."""
    torch.backends.cuda.cufft_plan_cache[device].clear()
