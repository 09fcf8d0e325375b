"""The state of the random number generators of one rank, as plain JSON values, and back."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

STRIDE = 1 << 20
"""Seeds that a new rank gets lie this far apart for steps, and one apart for ranks."""


def capture() -> dict[str, Any]:
    """Return the states of python, numpy if it is loaded, torch's CPU generator and CUDA generators if in use."""
    version, internal, gauss = random.getstate()
    told: dict[str, Any] = {"python": [version, list(internal), gauss], "seed": torch.initial_seed()}
    told["torch"] = _hex(torch.get_rng_state())
    if "numpy" in sys.modules:
        told["numpy"] = _numpy_state(sys.modules["numpy"])
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = [_hex(state) for state in torch.cuda.get_rng_state_all()]
        told["cuda"] = {"current": torch.cuda.current_device(), "states": states}
    return told


def restore(told: Mapping[str, Any]) -> None:
    """Set the generators to what ``capture`` returned."""
    version, internal, gauss = told["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_tensor(told["torch"]))
    if "numpy" in told:
        _restore_numpy(told["numpy"])
    if "cuda" in told and torch.cuda.is_available():
        _restore_cuda(told["cuda"])


def seed_new_rank(told: Mapping[str, Any], step: int, rank: int) -> None:
    """Seed a rank that the saved job did not have: same job, step and rank give the same numbers."""
    seed = (int(told["seed"]) + (step + 1) * STRIDE + rank) % (1 << 63)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def _hex(state: torch.Tensor) -> str:
    """Return a generator's state as text."""
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> torch.Tensor:
    """Return the state that a text holds."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _numpy_state(numpy: Any) -> dict[str, Any]:
    """Return numpy's global state; MT19937's key is an array, and every other value is a plain one."""
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    inner = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in state["state"].items()}
    return {**state, "state": inner}


def _restore_numpy(told: Mapping[str, Any]) -> None:
    """Set numpy's global state; where numpy is not installed nothing can depend on it."""
    with contextlib.suppress(ImportError):
        numpy = importlib.import_module("numpy")
        inner = dict(told["state"])
        if "key" in inner:
            inner["key"] = numpy.array(inner["key"], dtype=numpy.uint32)
        numpy.random.set_state({**told, "state": inner})


def _restore_cuda(told: Mapping[str, Any]) -> None:
    """Set the CUDA generators; with another number of devices only the one in use then and now has a meaning."""
    states = [_tensor(text) for text in told["states"]]
    here = torch.cuda.current_device()
    if len(states) == torch.cuda.device_count() and here == told["current"]:
        torch.cuda.set_rng_state_all(states)
    else:
        torch.cuda.set_rng_state(states[told["current"]], here)
