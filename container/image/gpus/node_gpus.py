"""The simulated GPUs of a host as devices of torch, which calls ``load`` at its import (entry point torch.backends)."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path("/dev/shm/gpus")  # noqa: S108 - made by root at the start of the host


def visible() -> list[Path]:
    """Return the files of the GPUs of this process, in CUDA's order.

    They are those whose device files its cgroup lets it open, and of these the ones that CUDA_VISIBLE_DEVICES picks.
    """
    allowed = [path for path in sorted(FOLDER.glob("[0-9]")) if _may_open(f"/dev/nvidia{path.name}")]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return allowed
    numbers = [int(word) for word in chosen.split(",") if word.isdigit()]
    return [allowed[number] for number in numbers if number < len(allowed)]


def _may_open(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except (PermissionError, FileNotFoundError):
        return False
    except OSError:  # ENXIO: no driver answers behind it
        return True
    return True


def load() -> None:
    """Make them devices of this process; a host without simulated GPUs stays as it is."""
    if paths := visible():
        import simulated_gpu  # noqa: PLC0415 - only where there are GPUs

        simulated_gpu.load(paths)
