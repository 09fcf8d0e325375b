"""Token bucket: a budget that grows with time up to its size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Bucket:
    """A token bucket: ``rate`` tokens a second, at most ``size``; monotonic time in seconds."""

    rate: float
    size: float
    tokens: float
    at: float

    def fill(self, now: float) -> float:
        """Return the tokens at the time ``now``."""
        self.tokens = min(self.size, self.tokens + self.rate * max(0.0, now - self.at))
        self.at = now
        return self.tokens
