#!/usr/bin/env python3
"""The rows of ``acceptance.py`` on peers: the same state by other ways off the GPU, and processes that share it.

``peers.py rows NAME …`` prints a JSON line for each row. Other first words are processes that a check starts.
torch_memory_saver takes part where its wheel is importable; it is preloaded, and asked by the functions of its library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checks import LOCK_MS, MIB, Gpu, sums
from rows import Figures, NotRunError, check, require

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.driver.cuda import Cuda, CudaError
from cadenza.sidecar.client.bootstrap.offload_trial import segments_of
from cadenza.sidecar.client.offload.engine import Offload

SIMULATED = bool(os.environ.get("SIMULATED_GPUS"))
SAVER = "torch_memory_saver"
SAVER_SETTINGS = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_RETAIN_CPU_BACKUP": "1"}
"""It serves all memory from the start, and keeps the content and its host copy."""
PAIRS = (("busy", "busy"), ("busy", "idle"), ("idle", "idle"))
IDLE_S = 0.02
"""Time of each step of an idle process in which it waits, as for data."""
PACKED_S = 1.0 if SIMULATED else 4.0
ROUNDS = 3


class Process:
    """A process that a check asks by lines."""

    def __init__(self, *words: str, **environment: str) -> None:
        command = [sys.executable, __file__, *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
        require(self.answer() == "ready", f"the process {words[0]} has ended")

    def answer(self) -> str:
        """Return the next line."""
        return self.process.stdout.readline().strip() if self.process.stdout else ""

    def ask(self, word: str) -> float:
        """Return the number that it answers."""
        print(word, file=self.process.stdin, flush=True)
        return float(self.answer() or "nan")

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def same_state(row: Figures) -> None:
    """Take the same tensors off the GPU and back by each way; what stays on the GPU meanwhile is NVML's word."""
    gpu = Gpu()
    row["MiB"] = gpu.scale.state
    ways: dict[str, Callable[[Gpu, Figures], None]] = {"cadenza": by_engine, "driver": by_driver, "saver": by_saver}
    for name, way in ways.items():
        figures: Figures = {}
        try:
            way(gpu, figures)
        except NotRunError as error:
            row[name] = f"not run: {error}"
        row |= {f"{name}_{key}": value for key, value in figures.items()}
    require("cadenza_out_s" in row, "Cadenza's own move did not run")


def by_engine(gpu: Gpu, figures: Figures) -> None:
    """Move by the engine, in a process of its own; the best of some rounds."""
    _by_process(gpu, figures, Process("engine", str(gpu.scale.state)))


def by_saver(gpu: Gpu, figures: Figures) -> None:
    """Pause and resume by torch_memory_saver."""
    found = importlib.util.find_spec(SAVER)
    if gpu.scale.kind != "cuda" or found is None or not found.origin:
        raise NotRunError(f"needs CUDA, and the package {SAVER}")
    places = [Path(found.origin).parent, Path(found.origin).parents[1]]
    hooks = [one for place in places for one in sorted(place.glob("*hook_mode_preload*.so"))]
    major = (torch.version.cuda or "").split(".")[0]
    hook = next((one for one in hooks if f"cu{major}" in one.name), hooks[0] if hooks else None)
    if hook is None:
        raise NotRunError(f"{SAVER} has no library to preload")
    # It links the CUDA runtime, which a wheel of torch has where the loader does not look.
    roots = [Path(sysconfig.get_paths()["purelib"]), Path("/usr/local")]
    runtime = next((one.parent for root in roots for one in root.glob(f"**/libcudart.so.{major}*")), None)
    libraries = os.pathsep.join(filter(None, [str(runtime or ""), os.environ.get("LD_LIBRARY_PATH", "")]))
    settings = {**SAVER_SETTINGS, "LD_PRELOAD": str(hook), "LD_LIBRARY_PATH": libraries}
    _by_process(gpu, figures, Process("saver", str(gpu.scale.state), **settings))


def _by_process(gpu: Gpu, figures: Figures, process: Process) -> None:
    try:
        outs, backs = [], []
        for _ in range(ROUNDS):
            outs.append(process.ask("out"))
            figures["left_MiB"] = gpu.bytes_by_nvml(process.process.pid) / MIB if gpu.nvml else None
            backs.append(process.ask("back"))
        figures |= {"out_s": min(outs), "back_s": min(backs)}
        require(process.ask("same") == 1, "the content differs")
    finally:
        process.end()


def by_driver(gpu: Gpu, figures: Figures) -> None:
    """Checkpoint and restore a process with this state by the driver."""
    try:
        cuda = Cuda()
    except EnvironmentLacks as error:
        raise NotRunError(str(error)) from None
    process = Process("engine", str(gpu.scale.state))
    pid = process.process.pid
    try:
        cuda.lock(pid, timeout_ms=LOCK_MS)
        began = time.monotonic()
        cuda.checkpoint(pid)
        figures["out_s"] = time.monotonic() - began
        figures["left_MiB"] = gpu.bytes_by_nvml(pid) / MIB if gpu.nvml else None
        began = time.monotonic()
        cuda.restore(pid)
        figures["back_s"] = time.monotonic() - began
        cuda.unlock(pid)
        require(process.ask("same") == 1, "the content differs")
    except CudaError as error:
        raise NotRunError(str(error)) from None
    finally:
        process.end()


def hold(kind: str, mib: str) -> None:
    """Be a process with some state, which moves as it is asked; it answers with seconds."""
    gpu = Gpu()
    tensors = gpu.tensors(int(mib), 64 << 10)
    before, offload, segments = sums(tensors), Offload(), segments_of(tensors)
    hook = ctypes.CDLL(os.environ["LD_PRELOAD"]) if kind == "saver" else None
    calls: dict[str, Callable[[], object]] = {"out": lambda: offload.offload(segments), "back": offload.restore}
    if hook is not None:
        calls = {"out": lambda: hook.tms_pause(None), "back": lambda: hook.tms_resume(None)}
    print("ready", flush=True)
    for line in sys.stdin:
        if (word := line.strip()) == "same":
            print(int(sums(tensors) == before), flush=True)
            continue
        gpu.accelerator.synchronize(gpu.place)
        began = time.monotonic()
        calls[word]()
        gpu.accelerator.synchronize(gpu.place)
        print(time.monotonic() - began, flush=True)


def packing(row: Figures) -> None:
    """Compare the rates of pairs of processes on one GPU with their rates alone; without MPS they take time slices."""
    alone = {kind: rates([kind])[0] for kind in ("busy", "idle")}
    row |= {f"{kind}_alone_per_s": rate for kind, rate in alone.items()}
    for pair in PAIRS:
        found = [rate / alone[kind] for kind, rate in zip(pair, rates(pair), strict=True)]
        row["_".join(pair)] = sum(found)
    if not SIMULATED:
        require(row["busy_busy"] <= 1.2, "two busy processes are faster together than one: the figures are wrong")  # noqa: PLR2004


def rates(kinds: Sequence[str]) -> list[float]:
    """Return the steps a second of processes that run at once."""
    processes = [Process("pack", kind) for kind in kinds]
    try:
        for one in processes:
            print("go", file=one.process.stdin, flush=True)
        return [float(one.answer()) for one in processes]
    finally:
        for one in processes:
            one.end()


def pack(kind: str) -> None:
    """Be one of these processes: a step is twenty products of matrices, and for an idle one a wait."""
    gpu, size = Gpu(), 64 if SIMULATED else 4096
    dtype = torch.float32 if SIMULATED else torch.bfloat16
    matrix = torch.ones(size, size, device=gpu.place, dtype=dtype)
    print("ready", flush=True)
    sys.stdin.readline()
    steps, ends = 0, time.monotonic() + PACKED_S
    while time.monotonic() < ends:
        for _ in range(20):
            matrix @ matrix
        gpu.accelerator.synchronize(gpu.place)
        steps += 1
        time.sleep(IDLE_S if kind == "idle" else 0)
    print(steps / PACKED_S, flush=True)


CHECKS: dict[str, Callable[[Figures], None]] = {
    "P the same state by Cadenza, the driver and torch_memory_saver": same_state,
    "P packing of three pairs of processes": packing,
}


def main(role: str, *words: str) -> None:
    """Run rows, or be one of the processes that a check starts."""
    if role == "rows":
        for name in words:
            check(name, CHECKS[name])
    else:
        {"pack": pack, "engine": functools.partial(hold, "engine"), "saver": functools.partial(hold, "saver")}[role](
            *words
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
