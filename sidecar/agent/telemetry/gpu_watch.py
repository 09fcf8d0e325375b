"""The processes on each GPU as the driver sees them, looked at in a thread of its own: a driver may hang."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from cadenza.sidecar.agent.telemetry.gpus import GpuDevice
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

FLOOR_BYTES = 1 << 30
"""GPU memory that a process may keep after a yield: its CUDA context with the handles of its libraries, which only the
driver path frees."""
FIRST_LOOK_S = 5.0
"""Longest wait for the driver when the agent starts."""

OnGpu: TypeAlias = Mapping[int, Mapping[int, int | None]]
"""Bytes of each process (None: not told), by GPU and pid."""


class Look(NamedTuple):
    """One look at all GPUs; ``began_s`` is the monotonic time before it."""

    began_s: float
    on_gpu: OnGpu


class GpuWatch:
    """Looks when asked. ``wake`` is called in the thread after each look."""

    def __init__(
        self, clock: Clock, find_devices: Callable[[], Sequence[GpuDevice]], wake: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._find_devices = find_devices
        self._wake = wake
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done = threading.Event()
        self.looking = False
        """True while an answer is still to come."""
        self._last = Look(float("-inf"), {})
        self._thread = threading.Thread(target=self._serve, name="cadenza-gpu-watch", daemon=True)

    def start(self) -> OnGpu:
        """Start the thread, and return its first look; nothing where there is no driver or it does not answer."""
        self.ask()
        self._thread.start()
        if not self._done.wait(FIRST_LOOK_S):
            log.error("the GPU driver has not answered within %g s: processes on the GPUs are not known", FIRST_LOOK_S)
        return self._last.on_gpu

    @property
    def sees(self) -> bool:
        """True if there is a driver that names the processes on the GPUs."""
        return bool(self._last.on_gpu)

    def ask(self) -> None:
        """Ask for a look, unless one is under way."""
        if not self.looking:
            self.looking = True
            self._asked.put("look")

    def busy(self, gpus: Iterable[int], pids: Iterable[int], since_s: float) -> str | None:
        """Return the reason why GPUs are not free of these processes, "" if they are; None without a later look.

        ``since_s``: monotonic time after which a look must begin to count.
        """
        if self._last.began_s <= since_s:
            self.ask()
            return None
        mine = set(pids)
        for gpu in sorted(gpus):
            for pid, size in sorted(self._last.on_gpu.get(gpu, {}).items()):
                if pid in mine and (size is None or size > FLOOR_BYTES):
                    kept = "memory" if size is None else f"{size >> 20} MB"
                    self.ask()
                    return f"pid {pid} still has {kept} on GPU {gpu}"
        return ""

    def close(self) -> None:
        """Let the thread end after its present look."""
        self._asked.put("")

    def _serve(self) -> None:
        """Look until the end; a look that fails sees nothing, which frees nothing."""
        devices: Sequence[GpuDevice] = ()
        try:
            devices = self._find_devices()
        except Exception:
            log.exception("the GPUs cannot be watched")
        while self._asked.get():
            began = self._clock.monotonic()
            try:
                seen = {device.index: device.processes() for device in devices}
                self._last = Look(began, seen)
            except Exception:
                log.exception("the GPUs could not be looked at")
            self.looking = False
            self._done.set()
            self._wake()
