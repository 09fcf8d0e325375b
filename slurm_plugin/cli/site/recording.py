"""Recordings of the worker's answers, for tests and bug reports; ``translate.snapshot`` reads one of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway


def record(path: Path, count: int, interval: float, gateway: SlurmGateway) -> int:
    """Append ``count`` answers, ``interval`` seconds apart, to ``path`` as JSON lines; return the number of bytes.

    Each answer is on disk before the next wait, so that an interrupted recording is a short one. It holds
    names of users and jobs, and comments: look at it before handing it on. Errors of the gateway and OSError
    pass through.
    """
    written = 0
    pause = threading.Event()
    with path.open("a", encoding="utf-8") as file:
        for number in range(count):
            if number:
                pause.wait(interval)
            answer = json.dumps(gateway.read_raw(), separators=(",", ":"), sort_keys=True)
            written += file.write(answer + "\n")
            file.flush()
    return written
