"""Counts boundaries, some ten thousand a second, in the page whose descriptor is named, until it is killed."""

from __future__ import annotations

import sys

from cadenza.sidecar import wire
from cadenza.sidecar.client.session.step_page import StepCounters, map_page


class Rank(StepCounters):
    def on_stop_step(self) -> None:
        """Take each order at once."""
        self.order_arrived()
        self.order_done()
        self.words[wire.PAGE_STOP] = 0


rank = Rank(map_page(int(sys.argv[1])))
while True:
    rank.waited_ns += 5
    rank.boundary(3)
    sum(range(2000))  # without a pause no copy would ever fit between two writes
