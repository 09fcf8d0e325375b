"""A job without torch: steps of a few milliseconds until the file in its first argument exists; prints its steps."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from cadenza.sidecar import client

pause = threading.Event()


def leave(number: int, frame: object) -> None:
    """A script's own handler, as frameworks have for preemption."""
    sys.stdout.write("handled\n")
    raise SystemExit(7)


if "--handler" in sys.argv:
    signal.signal(signal.SIGTERM, leave)
session = client.attach()
while not Path(sys.argv[1]).exists():
    pause.wait(0.003)
    client.boundary()
session.detach()
sys.stdout.write(f"{session.step}\n")
