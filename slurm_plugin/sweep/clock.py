"""The only module of this package that reads time."""

from __future__ import annotations

import time  # noqa: TID251

monotonic = time.monotonic
"""Seconds since some start; for intervals."""

now = time.time
"""Seconds since the epoch; stamped on what is recorded."""

sleep = time.sleep
