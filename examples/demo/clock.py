"""The demo's clock."""

from __future__ import annotations

import time  # noqa: TID251


def now() -> float:
    """Return seconds since the epoch; the containers share this clock."""
    return time.time()


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)
