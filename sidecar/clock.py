"""The one module outside the client that reads time; everywhere else time is an argument."""

from __future__ import annotations

import time  # noqa: TID251
from datetime import UTC, datetime
from typing import Protocol

now = time.time
"""Seconds since the epoch; it may jump."""

monotonic = time.monotonic
"""Seconds since some fixed moment (CLOCK_MONOTONIC, the clock of the jobs' pages); it never jumps."""

sleep = time.sleep


def local(at_s: float) -> str:
    """Return a moment as the local clock shows it, to the minute."""
    return datetime.fromtimestamp(at_s, UTC).astimezone().strftime("%F %H:%M")


class Clock(Protocol):
    """Time as an argument."""

    def now(self) -> float:
        """Return seconds since the epoch; it may jump."""
        ...

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; it never jumps."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Return seconds since the epoch; it may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Return CLOCK_MONOTONIC in seconds; it never jumps."""
        return time.monotonic()
