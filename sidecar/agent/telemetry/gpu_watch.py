"""The processes on each GPU as the driver sees them, looked at in a thread of its own: a driver may hang."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, GpuFinder
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

FLOOR_BYTES = 1 << 30
"""GPU memory that a process may keep after a yield: its CUDA context with the handles of its libraries, which only the
driver path frees."""
FIRST_LOOK_S = 5.0
"""Longest wait for the driver when the agent starts."""

LOOK_EVERY_S = 10.0
"""Time between two looks in which nothing is expected but a GPU that fails, in seconds."""
MAX_KEEPERS = 3
"""Processes that a text names as those that have a GPU's memory."""

OnGpu: TypeAlias = Mapping[int, Mapping[int, int | None] | None]
"""Bytes of each process (None: not told), by GPU and pid; None for a GPU whose processes the driver does not name."""


class Look(NamedTuple):
    """One look at all GPUs; ``began_s`` is the monotonic time before it."""

    began_s: float
    on_gpu: OnGpu
    free: Mapping[int, int | None]
    """Free bytes of each GPU, None where they are not told."""
    faults: Mapping[int, str]
    """The driver's word on each GPU that has failed."""

    def bytes_of(self, gpus: Iterable[int], pids: Iterable[int]) -> int:
        """Return the memory of processes on some GPUs, as far as the driver reports it."""
        mine = set(pids)
        sizes = (size for gpu in gpus for pid, size in (self.on_gpu.get(gpu) or {}).items() if pid in mine)
        return sum(size or 0 for size in sizes)

    def shortage(self, gpus: Iterable[int], needed: int, leaving: Iterable[int] = ()) -> str | None:
        """Return the reason why some GPUs have less than ``needed`` bytes free each; None if all have them.

        The memory of the processes ``leaving`` counts as free.
        """
        gone = set(leaving)
        for gpu in sorted(gpus):
            free = self.free.get(gpu)
            if free is None or free + self.bytes_of((gpu,), gone) >= needed:
                continue
            keepers = self.keepers(gpu, gone)
            text = f"GPU {gpu} has {free >> 20} MB free of the {needed >> 20} MB that the job needs"
            return f"{text}: {keepers}" if keepers else text
        return None

    def keepers(self, gpu: int, but: Iterable[int]) -> str:
        """Return the processes with most memory on a GPU, other than ``but``; "" for none."""
        others = (self.on_gpu.get(gpu) or {}).keys() - set(but)
        sizes = sorted(((self.bytes_of((gpu,), (pid,)), pid) for pid in others), reverse=True)
        return ", ".join(f"pid {pid} has {size >> 20} MB" for size, pid in sizes[:MAX_KEEPERS])


class GpuWatch:
    """Looks when asked. ``wake`` is called in the thread after each look."""

    def __init__(
        self, clock: Clock, find_devices: Callable[[], Sequence[GpuDevice]], wake: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._gpus = GpuFinder(clock, find_devices)
        self._wake = wake
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done = threading.Event()
        self.looking = False
        """True while an answer is still to come."""
        self.asked_s = float("-inf")
        """Monotonic time of the last request."""
        self.last = Look(float("-inf"), {}, {}, {})
        self._thread = threading.Thread(target=self._serve, name="cadenza-gpu-watch", daemon=True)

    def start(self) -> OnGpu:
        """Start the thread, and return its first look; nothing where there is no driver or it does not answer."""
        self.ask()
        self._thread.start()
        if not self._done.wait(FIRST_LOOK_S):
            log.error("the GPU driver has not answered within %g s: processes on the GPUs are not known", FIRST_LOOK_S)
        return self.last.on_gpu

    @property
    def sees(self) -> bool:
        """True if there is a driver that names the processes on the GPUs."""
        return any(there is not None for there in self.last.on_gpu.values())

    def names_processes(self, gpus: Iterable[int]) -> bool:
        """Return True if the driver names the processes on all of these GPUs."""
        return self.sees and all(self.last.on_gpu.get(gpu) is not None for gpu in gpus)

    def tick(self) -> None:
        """Ask for a look if the last one is old."""
        if self._clock.monotonic() - self.asked_s >= LOOK_EVERY_S:
            self.ask()

    def ask(self) -> None:
        """Ask for a look, unless one is under way."""
        if not self.looking:
            self.looking, self.asked_s = True, self._clock.monotonic()
            self._asked.put("look")

    def busy(self, gpus: Iterable[int], pids: Iterable[int], since_s: float) -> str | None:
        """Return the reason why GPUs are not free of these processes, "" if they are; None without a later look.

        ``since_s``: monotonic time after which a look must begin to count.
        """
        if self.last.began_s <= since_s:
            self.ask()
            return None
        mine = set(pids)
        for gpu in sorted(gpus):
            for pid, size in sorted((self.last.on_gpu.get(gpu) or {}).items()):
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
        while self._asked.get():
            began = self._clock.monotonic()
            try:
                devices = self._gpus.devices()
                self.last = Look(
                    began,
                    {device.index: device.processes() for device in devices},
                    {device.index: device.free_bytes() for device in devices},
                    {device.index: fault for device in devices if (fault := device.fault())},
                )
            except Exception:
                log.exception("the GPUs could not be looked at")
            self.looking = False
            self._done.set()
            self._wake()
