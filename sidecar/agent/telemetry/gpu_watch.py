"""The processes on each GPU as the driver sees them, looked at in a thread of its own: a driver may hang."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, GpuFinder, GpuMemory
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)

UNMEASURED_BYTES = 2 << 30
"""Most memory of each GPU that a process may keep after a yield if it was not measured before: the CUDA context of one
that is no rank, or of a rank that the driver did not show in time."""
SLACK_BYTES = 64 << 20
"""Growth of a process's CUDA context in a yield that is no fault, in bytes."""
FIRST_LOOK_S = 5.0
"""Longest wait for the driver when the agent starts."""

LOOK_EVERY_S = 10.0
"""Time between two looks in which nothing is expected but a GPU that fails, in seconds."""
MAX_KEEPERS = 3
"""Processes that a text names as those that have a GPU's memory."""

Asked: TypeAlias = frozenset[int] | None
"""GPUs to look at, none for all; None to end."""
OnGpu: TypeAlias = Mapping[int, Mapping[int, int | None] | None]
"""Bytes of each process (None: not told), by GPU and pid; None for a GPU whose processes the driver does not name."""


class Look(NamedTuple):
    """The last look at each GPU; the driver need not be asked for all of them at once."""

    began_s: float
    """Monotonic time before the last look at all GPUs."""
    on_gpu: OnGpu
    memory: Mapping[int, GpuMemory]
    """Memory of each GPU, or its fault."""
    divided: tuple[int, ...] = ()
    """GPUs with MIG, of which no processes are named: Slurm numbers their instances."""
    later_s: Mapping[int, float] = {}
    """Monotonic time before a later look at some GPUs."""
    names: Mapping[int, tuple[str, ...]] = {}
    """The names that exporters have for each GPU, see ``GpuDevice``."""

    def since_s(self, gpus: Iterable[int]) -> float:
        """Return the monotonic time before the look at the one of some GPUs that was looked at first."""
        return min((self.later_s.get(gpu, self.began_s) for gpu in gpus), default=self.began_s)

    @property
    def faults(self) -> dict[int, str]:
        """The driver's word on each GPU that has failed."""
        return {gpu: memory.fault for gpu, memory in self.memory.items() if memory.fault}

    def bytes_of(self, gpus: Iterable[int], pids: Iterable[int]) -> int:
        """Return the memory of processes on some GPUs, as far as the driver reports it."""
        mine = set(pids)
        sizes = (size for gpu in gpus for pid, size in (self.on_gpu.get(gpu) or {}).items() if pid in mine)
        return sum(size or 0 for size in sizes)

    def sizes(self, gpus: Iterable[int], pid: int) -> dict[int, int | None]:
        """Return a process's bytes on each of some GPUs that it is on; None where they are not told."""
        return {gpu: there[pid] for gpu in sorted(gpus) if pid in (there := self.on_gpu.get(gpu) or {})}

    def by_gpu(self, gpus: Sequence[int], pid: int, sizes: Sequence[int]) -> dict[int, int]:
        """Return sizes that a process told by the indices of its devices by the GPUs of its job that they are.

        A process may see some of them only (CUDA_VISIBLE_DEVICES): the driver shows on which it is.
        """
        used = {index: size for index, size in enumerate(sizes) if size}
        here = list(self.sizes(gpus, pid))
        if len(used) == len(here):
            return dict(zip(here, used.values(), strict=True))
        if len(sizes) == len(here):
            return {here[index]: size for index, size in used.items()}
        if max(used, default=0) < len(gpus):
            return {gpus[index]: size for index, size in used.items()}
        return dict.fromkeys(here, sum(used.values()))

    def beyond(self, gpus: Sequence[int], pid: int, held: Sequence[int]) -> dict[int, int] | None:
        """Return a process's memory on each GPU beyond what torch holds: its CUDA context, NCCL's and other buffers.

        ``held`` is the process's own word, by the indices of its devices. None where the driver tells no memory.
        """
        sizes, torch = self.sizes(gpus, pid), self.by_gpu(gpus, pid, held)
        known = {gpu: size for gpu, size in sizes.items() if size is not None}
        return {gpu: max(size - torch.get(gpu, 0), 0) for gpu, size in known.items()} if known else None

    def shortage(
        self,
        needed: Mapping[int, int],
        named: Callable[[int], str],
        leaving: Iterable[int] = (),
        kept: Mapping[int, int] | None = None,
    ) -> str | None:
        """Return the reason why some GPUs have less free than the bytes ``needed`` of each; None if all have them.

        ``named`` returns a process's name by its pid. The memory of the processes ``leaving`` counts as free, but for
        the bytes that they will have ``kept`` on each GPU.
        """
        gone, stay = set(leaving), kept or {}
        for gpu, nbytes in sorted(needed.items()):
            known = self.memory.get(gpu, GpuMemory()).free
            if known is None:
                continue
            free = max(known + self.bytes_of((gpu,), gone) - stay.get(gpu, 0), 0)
            if free < nbytes:
                keepers = self.keepers(gpu, gone, named)
                text = f"GPU {gpu} has {free >> 20} MB free of the {nbytes >> 20} MB that the job needs"
                text += f", beside {stay[gpu] >> 20} MB that stay of the job that makes way" if stay.get(gpu) else ""
                return f"{text}: {keepers}" if keepers else text
        return None

    def keepers(self, gpu: int, but: Iterable[int], named: Callable[[int], str]) -> str:
        """Return the processes with most memory on a GPU, other than ``but``; "" for none."""
        others = (self.on_gpu.get(gpu) or {}).keys() - set(but)
        sizes = sorted(((self.bytes_of((gpu,), (pid,)), pid) for pid in others), reverse=True)
        return ", ".join(f"{named(pid)} has {size >> 20} MB" for size, pid in sizes[:MAX_KEEPERS])


NO_LOOK = Look(float("-inf"), {}, {})


class GpuWatch:
    """Looks when asked. ``wake`` is called in the thread after each look."""

    def __init__(
        self, clock: Clock, find_devices: Callable[[], Sequence[GpuDevice]], wake: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._gpus = GpuFinder(clock, find_devices)
        self._wake = wake
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._done = threading.Event()
        self.looking = False
        """True while an answer is still to come."""
        self.asked_s = float("-inf")
        """Monotonic time of the last request."""
        self.last = NO_LOOK
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

    def ask(self, gpus: Iterable[int] = ()) -> None:
        """Ask for a look at some GPUs, by default at all, unless a look is under way."""
        if not self.looking:
            self.looking, asked = True, frozenset(gpus)
            if not asked:
                self.asked_s = self._clock.monotonic()
            self._asked.put(asked)

    def looked_since(self, since_s: float, gpus: Collection[int] = ()) -> bool:
        """Return True if the last look at some GPUs began after a monotonic time; else ask for one."""
        fresh = self.last.since_s(gpus) > since_s
        if not fresh:
            self.ask(gpus)
        return fresh

    def busy(self, gpus: Sequence[int], allowed: Mapping[int, int | None], since_s: float) -> str | None:
        """Return the reason why GPUs are not free of processes, "" if they are; None without a look since ``since_s``.

        ``allowed`` has the bytes that each process may keep, None for ``UNMEASURED_BYTES`` on each GPU.
        """
        if not self.looked_since(since_s, gpus):
            return None
        for pid, limit in sorted(allowed.items()):
            sizes = self.last.sizes(gpus, pid)
            size, unknown = self.last.bytes_of(gpus, (pid,)), None in sizes.values()
            most = UNMEASURED_BYTES * len(sizes) if limit is None else limit
            if unknown or size > most:
                self.ask(gpus)
                text = f"pid {pid} still has {'memory' if unknown else f'{size >> 20} MB'}"
                return f"{text} on GPU {', '.join(map(str, sizes))} and may keep {most >> 20} MB"
        return ""

    def close(self) -> None:
        """Let the thread end after its present look."""
        self._asked.put(None)

    def _serve(self) -> None:
        """Look until the end; a look that fails sees nothing, which frees nothing."""
        while (gpus := self._asked.get()) is not None:
            began = self._clock.monotonic()
            try:
                self.last = self._look(began, gpus)
            except Exception:
                log.exception("the GPUs could not be looked at")
            self.looking = False
            self._done.set()
            self._wake()

    def _look(self, began_s: float, gpus: frozenset[int]) -> Look:
        """Return the last look with these GPUs looked at anew; none: with all."""
        last = self.last
        devices = [one for one in self._gpus.devices(failed=bool(last.faults)) if not gpus or one.index in gpus]
        divided = last.divided if gpus else tuple(device.index for device in devices if device.divided)
        on_gpu = {device.index: None if divided else device.processes() for device in devices}
        memory = {device.index: device.memory() for device in devices}
        if not gpus:
            return Look(began_s, on_gpu, memory, divided, names={device.index: device.names for device in devices})
        later_s = {**last.later_s, **dict.fromkeys(gpus, began_s)}
        on_gpu, memory = {**last.on_gpu, **on_gpu}, {**last.memory, **memory}
        return Look(last.began_s, on_gpu, memory, divided, later_s, last.names)
