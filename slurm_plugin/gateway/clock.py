"""The one place of the gateway that reads the time."""

from __future__ import annotations

import time  # noqa: TID251

monotonic = time.monotonic
"""Seconds since some start; for bounds on waits."""

now = time.time
"""Seconds since the epoch; stamped on what is read."""
