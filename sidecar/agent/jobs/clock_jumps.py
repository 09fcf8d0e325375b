"""Jumps of the wall clock: what the lease book counts in wall time moves along, so that nobody's turn changes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cadenza.sidecar.agent.jobs.host_state import Host

log = logging.getLogger(__name__)

JUMP_S = 0.5
"""Smaller steps are left alone: jobs' virtual times differ by as much anyway."""


@dataclass
class Jumps:
    """Compares the two clocks each time the event loop wakes up.

    Everything that the agent waits for is counted by CLOCK_MONOTONIC, which does not jump (clock_gettime(2)). The
    lease book alone has wall times: they are on disk, and the service compares them with its own.
    """

    host: Host
    _offset_s: float | None = None

    def tick(self) -> None:
        """Move the book's times when the wall clock was set, or the host slept, since the last call."""
        offset_s = self.host.clock.now() - self.host.clock.monotonic()
        before, self._offset_s = self._offset_s, offset_s
        if before is None or abs(offset_s - before) < JUMP_S:
            return
        log.warning("the wall clock jumped by %.1f s; leases move along", offset_s - before)
        self.host.leases.shift(offset_s - before)
