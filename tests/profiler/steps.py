"""A job without torch: each step burns CPU time, in a thread of its own for every second rank, until it is ended."""

from __future__ import annotations

import sys
import time

from cadenza.sidecar import client

session = client.attach()
limit = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
for _ in range(limit):
    until = time.process_time() + float(sys.argv[1])
    while time.process_time() < until:
        pass
    session.boundary(8)
