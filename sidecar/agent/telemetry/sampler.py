"""Use of the host by each job's processes, sampled in a thread of its own so that no job waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import psutil  # type: ignore[import-untyped]

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, GpuFinder, GpuUse
from cadenza.sidecar.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A job to sample: the processes known to the agent, and its GPUs by Slurm's index."""

    key: JobKey
    pids: tuple[int, ...]
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Use by one job; rates are over the time since the last sample, and None in the first one."""

    processes: int = 0
    rss_bytes: int = 0
    cpu_percent: float | None = None
    read_bytes_s: float | None = None
    write_bytes_s: float | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """One process: seconds of CPU time, bytes of memory, bytes from and to storage, all since it began."""

    cpu_s: float
    rss: int
    shared: int
    read: int
    written: int


Processes: TypeAlias = Mapping[psutil.Process, Counters]
"""By psutil's processes, which are equal if pid and start time are: a reused pid is another process."""


class Sampler:
    """Keeps the last counters to compute rates. ``find_devices`` is called at the first sample, see GpuFinder."""

    def __init__(self, clock: Clock, find_devices: Callable[[], Sequence[GpuDevice]]) -> None:
        self._clock = clock
        self._gpus = GpuFinder(clock, find_devices)
        self._before: dict[JobKey, tuple[float, Processes]] = {}

    def sample(self, targets: Sequence[Target]) -> dict[JobKey, Usage]:
        """Return each job's use; one pass over the host's processes and one over its GPUs serve all jobs."""
        children = _children()
        devices = self._gpus.devices()
        # Where a GPU is divided (MIG), Slurm's indices are those of instances.
        looks = {} if any(one.divided for one in devices) else {one.index: one.look() for one in devices}
        before, self._before = self._before, {}
        usage = {}
        for target in targets:
            processes = _counted(_tree(target.pids, children))
            now = self._clock.monotonic()
            self._before[target.key] = (now, processes)
            usage[target.key] = _usage(now, processes, before.get(target.key), _gpu_use(target, processes, looks))
        return usage


def _children() -> dict[int, list[psutil.Process]]:
    """Return every process of the host by its parent's pid."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            children.setdefault(process.ppid(), []).append(process)
        except psutil.Error:
            continue
    return children


def _tree(pids: Iterable[int], children: Mapping[int, Sequence[psutil.Process]]) -> set[psutil.Process]:
    """Return the processes and all their descendants, such as loader workers; each once."""
    roots = set(pids)
    waiting = [process for family in children.values() for process in family if process.pid in roots]
    tree: set[psutil.Process] = set()
    while waiting:
        process = waiting.pop()
        if process not in tree:
            tree.add(process)
            waiting += children.get(process.pid, ())
    return tree


def _counted(processes: Iterable[psutil.Process]) -> dict[psutil.Process, Counters]:
    """Return the counters of the processes that still live."""
    counters = {}
    for process in processes:
        try:
            counters[process] = _counters(process)
        except psutil.Error:
            continue
    return counters


def _counters(process: psutil.Process) -> Counters:
    """Read one process; raise psutil.Error if it is gone. Only root and its owner can read its I/O."""
    with process.oneshot():
        cpu, memory = process.cpu_times(), process.memory_info()
    try:
        io = process.io_counters()
        read, written = io.read_bytes, io.write_bytes
    except (psutil.AccessDenied, NotImplementedError):
        read = written = 0
    return Counters(cpu.user + cpu.system, memory.rss, memory.shared, read, written)


def _usage(
    now: float, processes: Processes, before: tuple[float, Processes] | None, gpu: tuple[float | None, int | None]
) -> Usage:
    """Return a job's use from two readings of its processes; a new process began between them."""
    rss = sum(one.rss - one.shared for one in processes.values())
    # Forked workers share pages with the training: a plain sum would count these pages once for each process.
    rss += max((one.shared for one in processes.values()), default=0)
    if before is None or now <= before[0]:
        return Usage(len(processes), rss, gpu_percent=gpu[0], gpu_memory_bytes=gpu[1])
    span, old = now - before[0], before[1]
    zero = Counters(0.0, 0, 0, 0, 0)
    pairs = [(old.get(process, zero), one) for process, one in processes.items()]
    return Usage(
        processes=len(processes),
        rss_bytes=rss,
        cpu_percent=100 * sum(one.cpu_s - was.cpu_s for was, one in pairs) / span,
        read_bytes_s=sum(one.read - was.read for was, one in pairs) / span,
        write_bytes_s=sum(one.written - was.written for was, one in pairs) / span,
        gpu_percent=gpu[0],
        gpu_memory_bytes=gpu[1],
    )


def _gpu_use(target: Target, processes: Processes, looks: Mapping[int, GpuUse]) -> tuple[float | None, int | None]:
    """Return the mean use and the memory of the job's GPUs by its own processes; None where not reported."""
    pids = {process.pid for process in processes}
    each = [_own(looks[index], pids) for index in target.gpus if index in looks]
    percents = [percent for percent, _ in each if percent is not None]
    memories = [memory for _, memory in each if memory is not None]
    return (sum(percents) / len(percents) if percents else None, sum(memories) if memories else None)


def _own(look: GpuUse, pids: set[int]) -> tuple[float | None, int | None]:
    """Return the use of one GPU by ``pids``.

    If the driver does not tell processes apart, all of it is theirs as long as no other process is on the GPU. If it
    names none, or some by pids of another namespace, their use is not known.
    """
    if look.processes is None:
        return None, None
    own = [use for pid, use in look.processes.items() if pid in pids]
    if not own:
        return (0.0, 0) if all(map(psutil.pid_exists, look.processes)) else (None, None)
    alone = len(own) == len(look.processes)
    percents = [use.percent for use in own if use.percent is not None]
    memories = [use.memory_bytes for use in own if use.memory_bytes is not None]
    percent = sum(percents) if percents else (look.percent if alone else None)
    memory = sum(memories) if memories else (look.memory_bytes if alone else None)
    return percent, memory


class Background:
    """Runs a sampler in a daemon thread; a driver that hangs costs samples and nothing else."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._asked: queue.SimpleQueue[Sequence[Target] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[JobKey, Usage]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False
        """True while an answer is still to come."""

    def ask(self, targets: Sequence[Target]) -> None:
        """Request a sample of the jobs, unless one is still being taken; the first call starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="cadenza-sampling", daemon=True)
            self._thread.start()
        if not self.busy:
            self.busy = True
            self._asked.put(targets)

    def answer(self) -> dict[JobKey, Usage] | None:
        """Return the requested sample, once; None while there is none."""
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        return answer

    def close(self) -> None:
        """Let the thread end after its present sample."""
        self._asked.put(None)

    def _serve(self) -> None:
        """Answer until the end; a sample that fails is empty."""
        logged = False
        while (targets := self._asked.get()) is not None:
            usage: dict[JobKey, Usage] = {}
            try:
                usage = self._sampler.sample(targets)
            except Exception:
                if not logged:
                    log.exception("jobs could not be sampled; this is logged once")
                logged = True
            self._answers.put(usage)
