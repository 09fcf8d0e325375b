"""State of one process's random number generators, as plain JSON values."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from cadenza.sidecar.client.offload import device

SEED_STRIDE = 1 << 20
"""Distance between a new rank's seeds of two steps; between two ranks it is 1."""


def capture(*, devices: bool = True) -> dict[str, Any]:
    """Return the states of Python's generator, torch's CPU generator and, if in use, numpy's and the devices'."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "seed": torch.initial_seed()}
    state["torch"] = bytes(torch.get_rng_state().tolist()).hex()
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        inner = {key: getattr(value, "tolist", lambda value=value: value)() for key, value in numpy["state"].items()}
        state["numpy"] = {**numpy, "state": inner}  # MT19937's key is the one array
    # Asking for a GPU's generator would start CUDA in a process that uses none.
    if devices and (accelerator := device.in_use()):
        states = [bytes(one.tolist()).hex() for one in accelerator.module.get_rng_state_all()]
        state[accelerator.kind] = {"current": accelerator.module.current_device(), "states": states}
    return state


def restore(saved: Mapping[str, Any]) -> None:
    """Set the generators to a captured state."""
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_tensor(saved["torch"]))
    if "numpy" in saved:
        with contextlib.suppress(ImportError):  # without numpy nothing can depend on it
            numpy = importlib.import_module("numpy")
            inner = dict(saved["numpy"]["state"])
            if "key" in inner:
                inner["key"] = numpy.array(inner["key"], dtype=numpy.uint32)
            numpy.random.set_state({**saved["numpy"], "state": inner})
    for kind in saved.keys() & device.ACCELERATORS.keys():
        module = device.ACCELERATORS[kind].module
        if not module.is_available():
            continue
        states, current = [_tensor(text) for text in saved[kind]["states"]], saved[kind]["current"]
        if len(states) == module.device_count() and module.current_device() == current:
            module.set_rng_state_all(states)
        else:  # with other devices, only the current one's state has a meaning
            module.set_rng_state(states[current], module.current_device())


def seed_of(saved: Mapping[str, Any], step: int, rank: int) -> int:
    """Return the seed of a rank that the saved job did not have; the same job, step and rank give the same one."""
    return (int(saved["seed"]) + (step + 1) * SEED_STRIDE + rank) % (1 << 63)


def seed_new_rank(saved: Mapping[str, Any], step: int, rank: int) -> None:
    """Seed a rank that the saved job did not have."""
    seed = seed_of(saved, step, rank)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def _tensor(text: str) -> torch.Tensor:
    """Return the state from its text."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
