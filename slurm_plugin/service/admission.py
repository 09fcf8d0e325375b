"""The admission file for job_submit.lua, kept fresh by a thread of its own, so that a slow round does not age it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from cadenza.sidecar.clock import SystemClock

log = logging.getLogger(__name__)

PERIOD_S = 2.0


def write_admission(path: Path, mode: str, now_s: float) -> None:
    """Write ``held EPOCH`` or ``native EPOCH``: job_submit.lua holds managed jobs, or lets Slurm start them.

    The rename keeps readers from seeing half a line; ``OSError`` passes through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(f"{mode} {int(now_s)}\n", encoding="ascii")
    draft.chmod(0o644)
    draft.replace(path)


class Heartbeat:
    """Writes ``held`` while ``may_hold`` is true and ``native`` otherwise, every two seconds."""

    def __init__(self, path: Path, may_hold: Callable[[], bool], clock: SystemClock) -> None:
        self._path = path
        self._may_hold = may_hold
        self._clock = clock
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cadenza-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and leave ``native`` behind."""
        self._ended.set()
        self._thread.join()
        self._write("native")

    def _run(self) -> None:
        while not self._ended.is_set():
            self._write("held" if self._may_hold() else "native")
            self._ended.wait(PERIOD_S)

    def _write(self, mode: str) -> None:
        try:
            write_admission(self._path, mode, self._clock.now())
        except OSError as error:
            # Without the file job_submit.lua admits natively, which is safe: one warning is enough.
            if not self._failed:
                log.warning("[service] heartbeat = %s: %s", self._path, error.strerror)
            self._failed = True
