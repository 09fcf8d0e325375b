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

MAX_CONTEXT_BYTES = 2 << 30
"""Most memory of each GPU that a process may keep after a yield as its CUDA context, with the handles of its libraries,
which only the driver path frees; and most that it may keep as what torch says to have left."""
SLACK_BYTES = 64 << 20
"""Growth of a process's CUDA context in a yield that is no fault, in bytes."""
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

    def sizes(self, gpus: Iterable[int], pid: int) -> dict[int, int | None]:
        """Return a process's bytes on each of some GPUs that it is on; None where they are not told."""
        return {gpu: there[pid] for gpu in sorted(gpus) if pid in (there := self.on_gpu.get(gpu) or {})}

    def context_bytes(self, gpus: Iterable[int], pid: int, held: int) -> int | None:
        """Return the memory of a process beyond the ``held`` bytes of torch's allocator: its CUDA contexts.

        At most ``MAX_CONTEXT_BYTES`` on each GPU, because ``held`` is the process's own word. None where the driver
        does not tell the memory.
        """
        known = [size for size in self.sizes(gpus, pid).values() if size is not None]
        return min(max(sum(known) - held, 0), MAX_CONTEXT_BYTES * len(known)) if known else None

    def shortage(
        self, gpus: Iterable[int], needed: int, named: Callable[[int], str], leaving: Iterable[int] = ()
    ) -> str | None:
        """Return the reason why some GPUs have less than ``needed`` bytes free each; None if all have them.

        ``named`` returns a process's name by its pid. The memory of the processes ``leaving`` counts as free.
        """
        gone = set(leaving)
        for gpu in sorted(gpus):
            free = self.free.get(gpu)
            if free is None or free + self.bytes_of((gpu,), gone) >= needed:
                continue
            keepers = self.keepers(gpu, gone, named)
            text = f"GPU {gpu} has {free >> 20} MB free of the {needed >> 20} MB that the job needs"
            return f"{text}: {keepers}" if keepers else text
        return None

    def keepers(self, gpu: int, but: Iterable[int], named: Callable[[int], str]) -> str:
        """Return the processes with most memory on a GPU, other than ``but``; "" for none."""
        others = (self.on_gpu.get(gpu) or {}).keys() - set(but)
        sizes = sorted(((self.bytes_of((gpu,), (pid,)), pid) for pid in others), reverse=True)
        return ", ".join(f"{named(pid)} has {size >> 20} MB" for size, pid in sizes[:MAX_KEEPERS])


def may_keep(context: int | None, left: int) -> int | None:
    """Return the bytes that a process may keep after a yield: a measured context, and what torch says to have left.

    None for a context that was not measured: then ``MAX_CONTEXT_BYTES`` on each GPU is all that it may keep.
    """
    return None if context is None else context + min(left, MAX_CONTEXT_BYTES) + SLACK_BYTES


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

    def looked_since(self, since_s: float) -> bool:
        """Return True if the last look began after a monotonic time; else ask for one."""
        if self.last.began_s <= since_s:
            self.ask()
        return self.last.began_s > since_s

    def busy(self, gpus: Sequence[int], allowed: Mapping[int, int | None], since_s: float) -> str | None:
        """Return the reason why GPUs are not free of processes, "" if they are; None without a look since ``since_s``.

        ``allowed`` has the bytes that each process may keep, None for ``MAX_CONTEXT_BYTES`` on each GPU.
        """
        if not self.looked_since(since_s):
            return None
        for pid, limit in sorted(allowed.items()):
            sizes = self.last.sizes(gpus, pid)
            size, unknown = self.last.bytes_of(gpus, (pid,)), None in sizes.values()
            if unknown or size > (MAX_CONTEXT_BYTES * len(sizes) if limit is None else limit):
                self.ask()
                kept = "memory" if unknown else f"{size >> 20} MB"
                return f"pid {pid} still has {kept} on GPU {', '.join(map(str, sizes))}"
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
