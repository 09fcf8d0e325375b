"""Memory in use by this process: torch's GPU allocator, or the resident set; never takes torch or CUDA by itself."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")


def on_gpu() -> tuple[int, int] | None:
    """Return bytes given out now and at most on the current device; None before the process uses a GPU.

    The figures are torch's caching allocator's own (``allocated_bytes``), read under its lock and without a
    system call or a wait for the device.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    try:
        allocated = cuda.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all")
    except RuntimeError:  # a device that has failed is the training step's to report
        return None
    return (int(allocated["current"]), int(allocated["peak"])) if allocated else None


def on_host() -> tuple[int, int] | None:
    """Return the resident set now and at most, in bytes (proc_pid_statm(5), getrusage(2)); two system calls or more."""
    try:
        pages = int(STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    now = pages * resource.getpagesize()
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
