"""The profiler's only reader of time."""

from __future__ import annotations

import time  # noqa: TID251
from typing import Protocol


class Clock(Protocol):
    """Time as an argument."""

    def monotonic(self) -> float:
        """Return seconds of a clock that never jumps."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()
