"""The client's only reader of time; a boundary reads it once, without a system call."""

from __future__ import annotations

from time import monotonic_ns  # noqa: TID251
from time import time as wall_s  # noqa: TID251

__all__ = ["monotonic_ns", "wall_s"]
