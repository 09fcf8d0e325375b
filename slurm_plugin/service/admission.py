"""The admission file's own thread: to job_submit.lua a slow round must not look like a dead service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.systemd import write_admission

log = logging.getLogger(__name__)

EVERY_S = 2.0


class Heartbeat:
    """Writes ``held`` while ``may_hold`` says so and ``native`` otherwise, every two seconds."""

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
            self._ended.wait(EVERY_S)

    def _write(self, word: str) -> None:
        try:
            write_admission(self._path, word, self._clock.now())
        except OSError as error:
            # Without the file job_submit.lua admits natively, which is safe: say it once.
            if not self._failed:
                log.warning("[service] heartbeat = %s: %s", self._path, error.strerror)
            self._failed = True
