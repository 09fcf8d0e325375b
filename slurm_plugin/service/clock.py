"""The service's clock, the only module of this package that reads time."""

from __future__ import annotations

import time  # noqa: TID251
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Return seconds since the epoch; it may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; it never jumps."""
        return time.monotonic()
