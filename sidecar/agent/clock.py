"""The agent's only reader of time."""

from __future__ import annotations

import time  # noqa: TID251
from typing import Protocol


class Clock(Protocol):
    """Time as an argument."""

    def epoch(self) -> float:
        """Return seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds of a clock that never jumps (the one that jobs write to their pages)."""
        ...


class SystemClock:
    """The machine's clocks."""

    def epoch(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()
