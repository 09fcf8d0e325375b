"""A process that "uses" the stub's GPU whenever the stub's driver lets it, for the driver path's tests; stdlib only.

It prints JSON lines as ``scripted_rank.py`` does: ``run`` when it finds itself running, ``out`` with the last moment at
which it still was, when it finds itself stopped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(megabytes: str) -> None:
    root = Path(os.environ["CUDA_STUB"])
    state = root / "state" / str(os.getpid())
    (root / "gpu" / str(os.getpid())).write_text(megabytes)
    running, last = False, 0.0
    while True:
        now = time.monotonic()
        runs = not state.exists() or state.read_text() == "running"
        if runs != running:
            print(json.dumps({"event": "run", "at": now} if runs else {"event": "out", "at": last}), flush=True)
        running, last = runs, now if runs else last
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1])
