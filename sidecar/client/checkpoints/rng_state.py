"""State of one rank's random number generators as plain JSON values."""

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


def capture() -> dict[str, Any]:
    """Return the states of Python's, torch's CPU and, if in use, numpy's and the CUDA generators."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "seed": torch.initial_seed()}
    state["torch"] = _hex(torch.get_rng_state())
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state(sys.modules["numpy"])
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = [_hex(one) for one in torch.cuda.get_rng_state_all()]
        state["cuda"] = {"current": torch.cuda.current_device(), "states": states}
    return state


def restore(saved: Mapping[str, Any]) -> None:
    """Set the generators to what ``capture`` returned."""
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_tensor(saved["torch"]))
    if "numpy" in saved:
        _restore_numpy(saved["numpy"])
    if "cuda" in saved and torch.cuda.is_available():
        _restore_cuda(saved["cuda"])


def seed_new_rank(saved: Mapping[str, Any], step: int, rank: int) -> None:
    """Seed a rank that the saved job did not have; the same job, step and rank give the same numbers."""
    seed = (int(saved["seed"]) + (step + 1) * SEED_STRIDE + rank) % (1 << 63)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def _hex(state: torch.Tensor) -> str:
    """Return a generator's state as text."""
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> torch.Tensor:
    """Return the state from its text."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _numpy_state(numpy: Any) -> dict[str, Any]:
    """Return numpy's global state, with MT19937's key, the only array, as a list."""
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    inner = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in state["state"].items()}
    return {**state, "state": inner}


def _restore_numpy(saved: Mapping[str, Any]) -> None:
    """Set numpy's global state; without numpy nothing can depend on it."""
    with contextlib.suppress(ImportError):
        numpy = importlib.import_module("numpy")
        inner = dict(saved["state"])
        if "key" in inner:
            inner["key"] = numpy.array(inner["key"], dtype=numpy.uint32)
        numpy.random.set_state({**saved, "state": inner})


def _restore_cuda(saved: Mapping[str, Any]) -> None:
    """Set the CUDA generators; with another number of devices, only the current one's."""
    states = [_tensor(text) for text in saved["states"]]
    here = torch.cuda.current_device()
    if len(states) == torch.cuda.device_count() and here == saved["current"]:
        torch.cuda.set_rng_state_all(states)
    else:
        torch.cuda.set_rng_state(states[saved["current"]], here)
