#!/usr/bin/env python3
"""The checks of ``acceptance.py`` on the engine and the driver in one process.

``checks.py rows NAME …`` prints a JSON line for each row, and ``checks.py facts`` one of the machine. With
$SIMULATED_GPUS the GPU is the simulated one. Other first words of the command line are processes that a check starts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rows import SPEEDS, Figures, MissedError, NotRunError, check, require, speed_row, tell

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.driver.cuda import Cuda, CudaError
from cadenza.sidecar.agent.telemetry.gpus import driver_version, nvml_devices
from cadenza.sidecar.client.bootstrap.offload_trial import random_tensors, segments_of, use
from cadenza.sidecar.client.errors import NoRoomError
from cadenza.sidecar.client.offload import device as devices
from cadenza.sidecar.client.offload import unregistered
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import Segment, survey
from cadenza.sidecar.client.session.communicators import Communicators

SEED = 4
MIB = 1 << 20
PATIENCE_S = 60.0
LOCK_MS = 10_000
SAMPLED_S = 0.5 if os.environ.get("SIMULATED_GPUS") else 2.0
"""Time over which a process's use of the GPU is looked at."""
FREED_S = 2.0
"""The longest time for which a killed process may have GPU memory."""
SIMULATED = "SIMULATED_GPUS"


@dataclass(frozen=True)
class Scale:
    """Sizes in MiB and limits of one type of GPU."""

    kind: str
    state: int
    kept: int
    """The most memory that may stay beyond that of a process which has only multiplied two matrices."""
    rounds: int
    """Times that each speed is measured; the best counts."""
    cycles: int
    grown: int
    """The most growth in these cycles."""
    models: float
    """Factor of the widths of the trained models."""
    yields: int
    """Yields of each trained model."""
    interrupts: int


SCALES = {
    "cuda": Scale(
        "cuda", state=8 << 10, kept=64, rounds=5, cycles=10, grown=16, models=1.0, yields=20, interrupts=20,
    ),
    "simulated": Scale(
        "simulated", state=12, kept=2, rounds=3, cycles=3, grown=16, models=0.05, yields=2, interrupts=5,
    ),
}  # fmt: skip


class Gpu:
    """The GPU of this process, with the sizes and limits of its type."""

    def __init__(self, index: int = 0) -> None:
        if os.environ.get(SIMULATED):
            sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "simulated"))
            import simulated_gpu  # noqa: PLC0415

            simulated_gpu.load()
            self.scale = SCALES["simulated"]
        else:
            self.scale = SCALES["cuda"]
        torch.set_num_threads(1)
        self.place = torch.device(self.scale.kind, index)
        self.accelerator = devices.ACCELERATORS[self.scale.kind]
        if not self.accelerator.module.is_available():
            tell(machine={"no_gpu": f"torch {torch.__version__} finds none"})
            raise SystemExit(1)
        use(self.accelerator, self.place)
        self.nvml = next((one for one in nvml_devices() if os.getpid() in (one.processes() or {})), None)
        self.context = self.bytes_by_nvml() if self.nvml else 0
        """What a process has on the GPU that has only multiplied two matrices."""

    def bytes_by_nvml(self, pid: int = 0) -> int:
        """Return a process's bytes on the GPU by NVML, this one's by default."""
        if self.nvml is None:
            raise NotRunError("NVML lists no process with this pid: no nvidia-ml-py, MIG, or a container's pids")
        return (self.nvml.processes() or {}).get(pid or os.getpid()) or 0

    def pace(self, operator_ns: int) -> None:
        """Let each operator of the simulated GPU take some time; those of a GPU do by themselves."""
        if self.scale.kind == "simulated":
            import simulated_gpu  # noqa: PLC0415

            simulated_gpu.open_file(Path(os.environ[SIMULATED])).operator_ns = operator_ns

    def tensors(self, mib: int, kib: int = 1 << 12) -> list[torch.Tensor]:
        """Return tensors of random content, and a few small ones."""
        return random_tensors(self.place, mib << 20, kib << 10, SEED)

    def facts(self) -> Figures:
        """Return what identifies the machine."""
        cuda = self.scale.kind == "cuda"
        return {
            "device": torch.cuda.get_device_name(0) if cuda else "simulated GPU, whose speeds are those of no GPU",
            "GPUs": self.accelerator.module.device_count(),
            "memory_MiB": self.accelerator.total(self.place) >> 20,
            "torch": torch.__version__,
            "CUDA": torch.version.cuda or "none",
            "driver": driver_version() or "unknown",
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",  # type: ignore[no-untyped-call]
            **(board() if cuda else {}),
        }


def board() -> Figures:
    """Return what NVML tells of the first GPU's link and settings, "unknown" for what it does not."""
    questions = {
        "PCIe_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
        "PCIe_width": "nvmlDeviceGetCurrPcieLinkWidth",
        "NUMA_node": "nvmlDeviceGetNumaNodeId",
        "MIG": "nvmlDeviceGetMigMode",
        "persistence": "nvmlDeviceGetPersistenceMode",
    }
    found: Figures = {}
    for name, question in questions.items():
        try:
            import pynvml  # noqa: PLC0415

            pynvml.nvmlInit()
            found[name] = getattr(pynvml, question)(pynvml.nvmlDeviceGetHandleByIndex(0))
        except Exception:  # noqa: BLE001 - no module, no library, no driver, or no answer
            found[name] = "unknown"
    return found


def link(gpu: Gpu, row: Figures) -> None:
    """Measure the yardstick: one pinned copy each way, the best of five."""
    mib = 24 if gpu.scale.kind == "simulated" else 4 << 10
    plain = PlainCopy(gpu, mib << 20)
    row |= {
        f"{way}_GB_s": max(plain.rate(out=out) for _ in range(5)) / 1e9 for way, out in (("out", True), ("back", False))
    }
    plain.close()


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a sum over each tensor's bytes that depends on their order."""
    words = [tensor.view(torch.int64) for tensor in tensors]
    weights = torch.arange(1, 1 + max(map(len, words)), device=words[0].device)
    return [int((each * weights[: len(each)]).sum()) for each in words]


# --- moves: the engine in this process -------------------------------------------------------------------


def identical(gpu: Gpu, row: Figures, kinds: str) -> None:
    """Train each job of a table of offload_jobs alone, and with yields at random boundaries."""
    import offload_jobs  # noqa: PLC0415
    from offload import compared  # noqa: PLC0415

    place, jobs = offload_jobs.Place(gpu.place, gpu.scale.models), getattr(offload_jobs, kinds)
    rows = [compared(name, make, place, gpu.scale.yields) for name, make in jobs.items()]
    row |= {"jobs": len(rows), "yields": gpu.scale.yields * len(rows), "MiB": max(one["bytes"] for one in rows) / MIB}
    different = [one["case"] for one in rows if not one["identical"]]
    require(not different, f"differ: {', '.join(different)}")


def free(gpu: Gpu, row: Figures) -> None:
    """Look at NVML before and after a yield."""
    tensors = gpu.tensors(gpu.scale.state)
    held = gpu.bytes_by_nvml()
    offload = Offload()
    moved = offload.offload(segments_of(tensors))
    away = gpu.bytes_by_nvml()
    offload.restore()
    offload.close()
    row |= {
        "context_MiB": gpu.context / MIB,
        "held_MiB": held / MIB,
        "away_MiB": away / MIB,
        "left_MiB": moved.left / MIB,
    }
    require(held >= gpu.context + moved.nbytes, "NVML does not show what the process holds")
    require(away <= gpu.context + gpu.scale.kept * MIB, f"over {gpu.scale.kept} MiB stay by NVML")
    require(moved.left <= gpu.scale.kept * MIB, f"over {gpu.scale.kept} MiB stay by torch's allocator")


class PlainCopy:
    """One pinned copy of some bytes, without the engine; at most 4 GiB, since its rate does not grow beyond."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self.there = torch.ones(min(nbytes, 4 << 30), dtype=torch.uint8, device=gpu.place)
        self._host = torch.ones_like(self.there, device="cpu")
        code = gpu.accelerator.register_host(self._host.data_ptr(), self._host.nbytes)
        require(code == 0, f"host memory cannot be pinned: CUDA error {code}")

    def rate(self, *, out: bool) -> float:
        """Copy once; return bytes a second."""
        target, source = (self._host, self.there) if out else (self.there, self._host)
        started = time.monotonic()
        target.copy_(source, non_blocking=True)
        self._gpu.accelerator.synchronize(self._gpu.place)
        return self._host.nbytes / (time.monotonic() - started)

    def close(self) -> None:
        """Unpin the host's part."""
        self._gpu.accelerator.unregister_host(self._host.data_ptr())


def speed(gpu: Gpu, row: Figures, kib: int, count: int, share: float) -> None:
    """Yield and resume some tensors of some KiB after some plain copies; the best of each is compared.

    The survey, which finds and examines the tensors while the GPU waits, counts as time of the yield.
    """
    mib = kib * count >> 10
    room = [gpu.accelerator.total(gpu.place) >> 20, available_mib()]
    needed = 1.1 * mib + min(mib, 4096) + 1024
    if gpu.scale.kind == "cuda" and needed > min(room):
        raise NotRunError(f"takes {needed:.0f} MiB, and there are {room[0]} on the GPU and {room[1]} of host memory")
    plain = PlainCopy(gpu, mib << 20)
    peers = [max(plain.rate(out=way) for _ in range(gpu.scale.rounds)) for way in (True, False)]
    plain.close()
    del plain  # its memory is not registered
    gpu.accelerator.empty_cache()
    offload, times = Offload(), list[tuple[float, float, float]]()
    tensors = [torch.full((kib << 10,), n % 251, dtype=torch.uint8, device=gpu.place) for n in range(count)]
    for _ in range(1 + gpu.scale.rounds):  # the first pins the memory
        began = time.monotonic()
        plan = survey([("tensors", tensors)])
        survey_s = time.monotonic() - began
        require(plan.refusal is None, f"refused: {plan.refusal}")
        times.append((survey_s, survey_s + offload.offload(plan.segments).seconds, offload.restore().seconds))
    row["survey_s"], row["out_s"], row["back_s"] = (min(column) for column in zip(*times[1:], strict=True))
    row |= {"MiB": plan.nbytes / MIB, "pinning_s": times[0][1] - row["out_s"]}
    for way, peer in zip(("out", "back"), peers, strict=True):
        row |= {
            f"{way}_GB_s": plan.nbytes / row[f"{way}_s"] / 1e9,
            f"{way}_ratio": plan.nbytes / row[f"{way}_s"] / peer,
        }
    offload.close()
    require(all(int(one[0]) == int(one[-1]) == n % 251 for n, one in enumerate(tensors)), "the content differs")
    require(min(row["out_ratio"], row["back_ratio"]) >= share, f"below {share:.0%} of the plain copy")


def available_mib() -> int:
    """Return the host memory that is available (proc_meminfo(5))."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable"))


def full(gpu: Gpu, row: Figures) -> None:
    """Let a neighbor take the memory while the state is away."""
    tensors = gpu.tensors(gpu.scale.state)
    before, offload, began = sums(tensors), Offload(), gpu.accelerator.allocated(gpu.place)
    offload.offload(segments_of(tensors))
    with helper("fill") as neighbor:
        for _ in range(2):
            try:
                offload.restore()
            except NoRoomError as error:
                row["said"] = str(error)[:60]
            else:
                raise MissedError("the state came back to a full GPU")
            require(offload.away, "the state is not away after a resume without room")
    ended = time.monotonic()
    while gpu.nvml and neighbor.pid in (gpu.nvml.processes() or {}) and time.monotonic() - ended < FREED_S:
        time.sleep(0.01)
    row["neighbor_freed_s"] = time.monotonic() - ended
    require(row["neighbor_freed_s"] < FREED_S, f"a killed process has its memory for over {FREED_S:g} s")
    offload.restore()
    require(sums(tensors) == before, "the content differs after the resume")
    require(gpu.accelerator.allocated(gpu.place) <= began, "failed resumes have left memory behind")
    offload.close()


@contextlib.contextmanager
def helper(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run another process of this file until the end of the context; it is ready when it has said a line."""
    command = [sys.executable, __file__, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            require(process.stdout and process.stdout.readline(), f"the process {' '.join(words)} has ended")
            yield process
        finally:
            process.kill()


def fill() -> None:
    """Be a neighbor that takes all of the GPU's memory, until it is killed."""
    gpu, kept, size = Gpu(), [], 1 << 30
    while size >= MIB:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=gpu.place))
        except RuntimeError:
            size //= 2
    print("full", flush=True)
    sys.stdin.read()


def checkpoint(gpu: Gpu, row: Figures) -> None:
    """Save tensors whose storages are away, as a preempted job does."""
    tensors, offload, file = gpu.tensors(min(gpu.scale.state, 1 << 10)), Offload(), io.BytesIO()
    before = [tensor.cpu() for tensor in tensors]
    offload.offload(segments_of(tensors))
    torch.save(tensors, file)
    row["MiB"] = file.tell() / MIB
    file.seek(0)
    same = all(map(torch.equal, torch.load(file, map_location="cpu"), before))
    offload.restore()
    offload.close()
    require(same, "the checkpoint's content differs")


def interrupts(gpu: Gpu, row: Figures) -> None:
    """Let a signal's handler raise at random moments of both ways: as Ctrl-C does, and as one of SIGTERM may."""
    tensors, offload, moments = gpu.tensors(gpu.scale.state), Offload(), random.Random(SEED)
    before, segments = sums(tensors), segments_of(tensors)
    for _ in range(2):
        cycle_s = offload.offload(segments).seconds + offload.restore().seconds
    previous = signal.getsignal(signal.SIGALRM)
    away = 0
    try:
        for number in range(gpu.scale.interrupts):
            signal.signal(signal.SIGALRM, raise_interrupt if number % 2 else raise_exit)
            struck(offload, segments, moments.uniform(0.0, cycle_s))
            away += offload.away
            if offload.away:
                offload.restore()
            require(all(one.storage.nbytes() == one.nbytes for one in segments), f"interrupt {number} lost memory")
            require(sums(tensors) == before, f"the content differs after interrupt {number}")
    finally:
        signal.signal(signal.SIGALRM, previous)
    offload.close()
    row |= {"interrupts": gpu.scale.interrupts, "on_the_way_out": away}


def raise_interrupt(*_: object) -> None:
    """Interrupt the program as Ctrl-C does."""
    raise KeyboardInterrupt


def raise_exit(*_: object) -> None:
    """End the program as a script's handler of SIGTERM does."""
    raise SystemExit(1)


def struck(offload: Offload, segments: Sequence[Segment], after_s: float) -> None:
    """Move out and back, and be interrupted once meanwhile or afterwards."""
    try:
        signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-4))
        offload.offload(segments)
        offload.restore()
        while True:
            time.sleep(0.01)
    except (KeyboardInterrupt, SystemExit):
        return


def counted(gpu: Gpu, row: Figures) -> None:
    """Keep a tensor that was not registered, below the limit."""
    tensors, offload = gpu.tensors(gpu.scale.state), Offload()
    segments = segments_of(tensors)
    kept = torch.ones(2 * gpu.scale.kept << 20, dtype=torch.uint8, device=gpu.place)
    moved = offload.offload(segments)
    row |= {"kept_MiB": kept.nbytes / MIB, "left_MiB": moved.left / MIB}
    stays = gpu.bytes_by_nvml() - gpu.context if gpu.nvml else moved.left
    offload.restore()
    offload.close()
    require(min(moved.left, stays) >= kept.nbytes, "the figures do not show what stays")


def refused(gpu: Gpu, row: Figures) -> None:
    """Keep more than the limit."""
    limit = max(unregistered.LIMIT_BYTES, int(unregistered.LIMIT_SHARE * gpu.accelerator.total(gpu.place)))
    tensors = gpu.tensors(1)
    kept = torch.empty(limit + (8 << 20), dtype=torch.uint8, device=gpu.place)
    refusal = survey([("tensors", tensors)]).refusal or ""
    row["said"] = refusal[:120]
    require(f"uint8 [{kept.numel()}]" in refusal, "the tensor is not named")


def registration(gpu: Gpu, row: Figures) -> None:
    """Pin the same memory twice; the error must not come up at the next kernel."""
    host = torch.ones(MIB, dtype=torch.uint8)
    try:
        first, second = (gpu.accelerator.register_host(host.data_ptr(), host.nbytes) for _ in range(2))
        gpu.accelerator.clear_error()
        row |= {"first": first, "second": second, "sum": int(torch.ones(8, device=gpu.place).sum())}
    finally:
        gpu.accelerator.unregister_host(host.data_ptr())
    require(first == 0 and second != 0, "pinning the same memory twice is no error here")


def fixed(gpu: Gpu, row: Figures) -> None:
    """Capture a CUDA graph, and allocate in a pool of its own."""
    if gpu.scale.kind != "cuda":
        raise NotRunError("needs CUDA graphs and torch.cuda.MemPool")
    tensor = torch.ones(8, device=gpu.place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor * 2
    row["graph"] = survey([("tensors", [tensor])]).refusal or "moves"
    graph.reset()
    del graph
    gc.collect()
    if hasattr(torch.cuda, "MemPool"):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            pooled = torch.ones(MIB, device=gpu.place)
        row["pool"] = survey([("tensors", [pooled])]).refusal or "moves"
        require("MemPool" in row["pool"], "memory of a pool is not refused by name")
    require("CUDA graphs" in row["graph"], "a captured graph is not refused by name")


def cycles(gpu: Gpu, row: Figures) -> None:
    """Yield and resume some times, and compare what the process has with the first."""
    tensors, offload = gpu.tensors(gpu.scale.state), Offload()
    before, rows = sums(tensors), []
    for _ in range(1 + gpu.scale.cycles):
        offload.offload(segments_of(tensors))
        offload.restore()
        statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
        rows.append((int(statm[1]) * os.sysconf("SC_PAGE_SIZE"), gpu.accelerator.reserved(gpu.place)))
    host, there = (last - first for first, last in zip(rows[0], rows[-1], strict=True))
    row |= {"cycles": gpu.scale.cycles, "host_grew_MiB": host / MIB, "GPU_grew_MiB": there / MIB}
    require(max(host, there) <= gpu.scale.grown * MIB, f"grown by over {gpu.scale.grown} MiB")
    require(sums(tensors) == before, "the content differs")
    offload.close()


# --- processes: another, unmodified one, and a job's ranks ------------------------------------------------


def process_checkpoint(gpu: Gpu, row: Figures) -> None:
    """Take an unmodified process off the GPU by the driver, and bring it back."""
    try:
        cuda = Cuda()
    except EnvironmentLacks as error:
        raise NotRunError(str(error)) from None
    plain = PlainCopy(gpu, gpu.scale.state << 20)
    peer = {way: max(plain.rate(out=out) for _ in range(3)) for way, out in (("checkpoint", True), ("restore", False))}
    plain.close()
    with helper("hold", str(gpu.scale.state)) as holder:
        held = gpu.bytes_by_nvml(holder.pid) if gpu.nvml else 0
        lock = functools.partial(cuda.lock, timeout_ms=LOCK_MS)
        calls = {"lock": lock, "checkpoint": cuda.checkpoint, "restore": cuda.restore, "unlock": cuda.unlock}
        try:
            for name, call in calls.items():
                began = time.monotonic()
                call(holder.pid)
                seconds = time.monotonic() - began
                row[f"{name}_s"] = seconds
                if name in peer:
                    row[f"{name}_ratio"] = held / seconds / peer[name]
                if name == "checkpoint" and gpu.nvml:
                    row |= {"held_MiB": held / MIB, "kept_MiB": gpu.bytes_by_nvml(holder.pid) / MIB}
        except CudaError as error:
            raise MissedError(f"{name}: {error}") from None
        print("on", file=holder.stdin, flush=True)
        same = holder.stdout.readline().strip() if holder.stdout else ""
    require(same == "same", f"the content differs: {same}")
    require(row.get("kept_MiB", 0) <= 1, "the process keeps GPU memory while it is checkpointed")


def hold(mib: str) -> None:
    """Be a training process that knows nothing of Cadenza, and compares its state after a line on standard input."""
    gpu = Gpu()
    tensors = gpu.tensors(int(mib))
    before = sums(tensors)
    print("holding", flush=True)
    sys.stdin.readline()
    print("same" if sums(tensors) == before else "different", flush=True)


def managed_memory(gpu: Gpu, row: Figures) -> None:
    """Compare a torch process's mappings with the size from which on they count as managed memory."""
    if not Path("/dev/nvidia-uvm").exists():
        raise NotRunError("there is no /dev/nvidia-uvm")
    try:
        from cadenza.sidecar.agent.driver.inspection import MIN_UVM_BYTES  # noqa: PLC0415
    except ImportError as error:
        raise NotRunError(str(error)) from None
    plain = PlainCopy(gpu, 1 << 30)
    mapped = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "/dev/nvidia-uvm" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            mapped += end - start
    plain.close()
    row |= {"mapped_MiB": mapped / MIB, "limit_MiB": MIN_UVM_BYTES / MIB}
    require(mapped <= MIN_UVM_BYTES, "the agent would take a plain torch process for one with managed memory")


def figures(gpu: Gpu, row: Figures) -> None:
    """Sample a process that works and one that does not as the agent does."""
    try:
        from cadenza.policies.core.model import JobKey  # noqa: PLC0415
        from cadenza.sidecar.agent.telemetry.sampler import Sampler, Target  # noqa: PLC0415
        from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415
    except ImportError as error:
        raise NotRunError(str(error)) from None
    if gpu.nvml is None:
        raise NotRunError("NVML lists no process with this pid: no nvidia-ml-py, MIG, or a container's pids")
    sampler = Sampler(SystemClock(), nvml_devices)
    with helper("work", str(gpu.scale.state)) as busy, helper("hold", str(gpu.scale.state)) as idle:
        jobs = [Target(JobKey(one.pid, 0), (one.pid,), (gpu.nvml.index,)) for one in (busy, idle)]
        gpu.pace(1_000_000)
        sampler.sample(jobs)
        time.sleep(SAMPLED_S)
        working, holding = sampler.sample(jobs).values()
        gpu.pace(0)
        held = int(busy.stdout.readline()) if busy.stdout else 0
    expected = held + gpu.context
    row |= {"busy_percent": working.gpu_percent, "idle_percent": holding.gpu_percent}
    row |= {"MiB": (working.gpu_memory_bytes or 0) / MIB, "by_torch_MiB": expected / MIB}
    require(abs((working.gpu_memory_bytes or 0) - expected) <= 0.05 * expected, "the bytes differ by over 5 %")
    if working.gpu_percent is None or holding.gpu_percent is None:
        raise NotRunError("NVML does not tell the use of each process")
    require(working.gpu_percent >= 80, "a busy process is not seen as one")  # noqa: PLR2004
    require(holding.gpu_percent <= 10, "an idle process is not seen as one")  # noqa: PLR2004


def work(mib: str) -> None:
    """Be a process that computes without a pause; it says what torch holds."""
    gpu = Gpu()
    tensors = gpu.tensors(int(mib))
    large = torch.ones(2048, 2048, device=gpu.place) if gpu.scale.kind == "cuda" else tensors[0]
    print("working", flush=True)
    print(gpu.accelerator.reserved(gpu.place), flush=True)
    while True:
        for _ in range(400):
            large.add_(1)
        gpu.accelerator.synchronize(gpu.place)


def rank(number: str, folder: str, backend: str, ranks: str = "2") -> None:
    """Be one of some ranks; without NCCL on the CPU."""
    import offload_jobs  # noqa: PLC0415
    from offload import compared  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    place = torch.device("cuda", int(number)) if backend == "nccl" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=int(number), world_size=int(ranks)
    )
    rows = [compared(name, make, offload_jobs.Place(place, 0.5), 10) for name, make in offload_jobs.RANKED.items()]
    found = {"jobs": len(rows), "yields": 10 * len(rows), "identical": all(one["identical"] for one in rows)}
    if place.type == "cuda":
        found |= suspended(Gpu(place.index or 0))
    tell(**found)
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends (pytorch/pytorch#179291)


def suspended(gpu: Gpu) -> Figures:
    """Suspend NCCL's communicators and take them back; return what each step left by NVML."""
    communicators, total = Communicators(0), torch.ones(1, device=gpu.place)
    held = gpu.bytes_by_nvml() if gpu.nvml else 0
    communicators.suspend("acceptance")
    away = gpu.bytes_by_nvml() if gpu.nvml else 0
    communicators.resume()
    torch.distributed.all_reduce(total)
    return {"NCCL_freed_MiB": (held - away) / MIB, "sum_after": int(total)}


Check = Callable[[Gpu, Figures], None]


def checks(scale: Scale) -> dict[str, Check]:
    """Return the checks by the names of their rows."""
    speeds: dict[str, Check] = {
        speed_row(mib, kib): functools.partial(speed, kib=kib, count=count, share=share)
        for mib, kib, count, share in SPEEDS[scale.kind]
    }
    return {
        "A the link": link,
        "B the GPU is free after a yield": free,
        **speeds,
        "B cycle after cycle keeps nothing": cycles,
        "C training that yields is bit-identical": functools.partial(identical, kinds="JOBS"),
        "C torch's optimizers compute the same": functools.partial(identical, kinds="OPTIMIZERS"),
        "C unregistered memory is counted": counted,
        "C unregistered memory above the limit refuses": refused,
        "C a CUDA graph and a pool refuse by name": fixed,
        "F process checkpoint by the driver": process_checkpoint,
        "F mappings of managed memory": managed_memory,
        "G the agent's figures are those of torch": figures,
        "H a full GPU at the resume": full,
        "H a checkpoint while the state is away": checkpoint,
        "H interrupts in the copy": interrupts,
        "H a refused registration spoils no kernel": registration,
    }


def main(role: str, *words: str) -> None:
    """Run rows, tell the machine's facts, or be one of the processes that a check starts."""
    if other := {"fill": fill, "hold": hold, "rank": rank, "work": work}.get(role):
        other(*words)
        return
    gpu = Gpu()
    if role == "facts":
        tell(machine=gpu.facts())
        return
    if gpu.scale.kind == "cuda":  # the simulated GPU has no others, and the call takes a second
        torch.use_deterministic_algorithms(mode=True)
    for name in words:
        check(name, functools.partial(checks(gpu.scale)[name], gpu))


if __name__ == "__main__":
    main(*sys.argv[1:])
