"""The memory axis, computed: a cache that never evicts hits equally often in each epoch (pure).

That is MinIO (Mohan et al., "Analyzing and mitigating data stalls in DNN training", VLDB 2021), on which Synergy's
profiles rest: with a part of the dataset cached, an epoch reads the rest from storage, whatever the order.
"""

from __future__ import annotations

from typing import NamedTuple

PARTS = tuple(part / 10 for part in range(11))
"""Parts of the dataset that are cached at the points of the axis, as in Synergy."""


class Data(NamedTuple):
    """The data that the job reads on this node: a dataset, ``step_mb`` of it in each step of all its ranks together."""

    dataset_gb: float
    step_mb: float
    base_gb: float
    """Memory that the job needs besides its cache."""
    storage_mb_s: float
    memory_mb_s: float

    def memory_gb(self, part: float) -> float:
        """Return the memory with which a part of the dataset fits into the cache."""
        return self.base_gb + part * self.dataset_gb

    def cached(self, memory_gb: float) -> float:
        """Return the part of the dataset that fits into the memory that the job itself leaves."""
        return min(1.0, max(0.0, (memory_gb - self.base_gb) / self.dataset_gb))

    def fetch_s(self, memory_gb: float) -> float:
        """Return how long a step's data take to come, from the cache and from storage."""
        part = self.cached(memory_gb)
        return self.step_mb * (part / self.memory_mb_s + (1 - part) / self.storage_mb_s)

    def time_s(self, compute_s: float, memory_gb: float) -> float:
        """Return a step's time when it takes ``compute_s`` with everything cached."""
        return max(compute_s, self.fetch_s(memory_gb))

    def bandwidth_mb_s(self, compute_s: float, memory_gb: float) -> float:
        """Return the storage bandwidth that the job can use: all of it where it is bound by fetching."""
        part = self.cached(memory_gb)
        left_s = compute_s - self.step_mb * part / self.memory_mb_s
        missing = self.step_mb * (1 - part)
        if left_s * self.storage_mb_s > missing:
            return missing / left_s
        return self.storage_mb_s if missing else 0.0
