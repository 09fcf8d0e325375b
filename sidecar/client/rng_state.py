"""State of one process's random number generators, as plain JSON values."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

SEED_STRIDE = 1 << 20
"""Distance between a new rank's seeds of two steps; between two ranks it is 1."""


def capture(*, cuda: bool = True) -> dict[str, Any]:
    """Return the states of Python's generator, torch's CPU generator and, if in use, numpy's and the CUDA ones."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "seed": torch.initial_seed()}
    state["torch"] = bytes(torch.get_rng_state().tolist()).hex()
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        inner = {key: getattr(value, "tolist", lambda value=value: value)() for key, value in numpy["state"].items()}
        state["numpy"] = {**numpy, "state": inner}  # MT19937's key is the one array
    if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = [bytes(one.tolist()).hex() for one in torch.cuda.get_rng_state_all()]
        state["cuda"] = {"current": torch.cuda.current_device(), "states": states}
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
    if "cuda" in saved and torch.cuda.is_available():
        states, current = [_tensor(text) for text in saved["cuda"]["states"]], saved["cuda"]["current"]
        if len(states) == torch.cuda.device_count() and torch.cuda.current_device() == current:
            torch.cuda.set_rng_state_all(states)
        else:  # with other devices, only the current one's state has a meaning
            torch.cuda.set_rng_state(states[current], torch.cuda.current_device())


def seed_new_rank(saved: Mapping[str, Any], step: int, rank: int) -> None:
    """Seed a rank that the saved job did not have; the same job, step and rank give the same numbers."""
    seed = (int(saved["seed"]) + (step + 1) * SEED_STRIDE + rank) % (1 << 63)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def _tensor(text: str) -> torch.Tensor:
    """Return the state from its text."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
