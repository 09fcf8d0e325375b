"""Budgets of peers in connections, packets, bytes and descriptors: what one user takes is never root's or another's."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Hashable
from dataclasses import dataclass, field

from cadenza.sidecar.token_bucket import Bucket

PACKETS_S = 100.0
"""Packets a second of one job, or of one user's processes that have not attached, over time."""
PACKETS_AT_ONCE = 1000.0
"""Packets that may come at once: some from each rank of a job that stops."""
BYTES_S = 2.0**18
BYTES_AT_ONCE = 2.0**22
MAX_FILES = 65_536
FILES_PER_PEER = 3
"""Connection, page and pidfd of a rank."""
MIN_CONNECTIONS = 4
KEPT_SOURCES = 1000
"""Sources whose budget is remembered; one that was forgotten begins with a full one."""


@dataclass
class PacketBudgets:
    """Two buckets for each source of packets, for their number and their bytes; a source is a job or a uid."""

    _buckets: dict[Hashable, tuple[Bucket, Bucket]] = field(default_factory=dict)

    def may_send(self, source: Hashable, now: float) -> bool:
        """Return True if a packet of this source may be read now."""
        return all(bucket.fill(now) >= 1 for bucket in self._of(source, now))

    def charge(self, source: Hashable, size: int, now: float) -> None:
        """Take one packet of ``size`` bytes from the source's budget; bytes may be owed."""
        packets, octets = self._of(source, now)
        packets.tokens -= 1
        octets.tokens -= size

    def _of(self, source: Hashable, now: float) -> tuple[Bucket, Bucket]:
        """Return a source's buckets, full ones for a new source."""
        if source not in self._buckets:
            if len(self._buckets) >= KEPT_SOURCES:
                # A source whose buckets are full has sent nothing for long: it need not be remembered.
                full = [one for one, pair in self._buckets.items() if all(each.fill(now) >= each.size for each in pair)]
                for one in full:
                    del self._buckets[one]
            packets = Bucket(PACKETS_S, PACKETS_AT_ONCE, PACKETS_AT_ONCE, now)
            self._buckets[source] = packets, Bucket(BYTES_S, BYTES_AT_ONCE, BYTES_AT_ONCE, now)
        return self._buckets[source]


@dataclass(frozen=True, slots=True)
class FileBudget:
    """Division of the process's descriptors: users' connections and pages end where root's reserve begins."""

    limit: int

    @property
    def reserve(self) -> int:
        """Descriptors for root's connections and the agent's own files."""
        return min(self.limit // 3, 256)

    @property
    def per_user(self) -> int:
        """Connections of one user: half of the users' part, so that one user leaves room for others."""
        return max(MIN_CONNECTIONS, (self.limit - 2 * self.reserve) // (2 * FILES_PER_PEER))

    def is_reserved(self, descriptor: int) -> bool:
        """Return True if a descriptor lies in the reserve.

        The kernel gives the lowest free number (open(2)), so that the number tells how many are in use.
        """
        return descriptor >= self.limit - self.reserve


def file_budget() -> FileBudget:
    """Raise the limit of open files as far as allowed, and return its division."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_FILES) if hard != resource.RLIM_INFINITY else MAX_FILES
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    return FileBudget(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2**30))
