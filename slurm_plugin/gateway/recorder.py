"""The recorder: writes what the worker reads to a file, for replay by `recorded`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Protocol


class RawReader(Protocol):
    """What can be recorded: SlurmGateway, or a recording itself."""

    def read_raw(self) -> dict[str, Any]:
        """Return one answer of the worker."""
        ...


def record(path: Path, count: int, interval: float, gateway: RawReader) -> int:
    """Append ``count`` answers, ``interval`` seconds apart, to ``path`` as JSON lines; return how many bytes.

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
