#!/usr/bin/env python3
"""The rows of ``acceptance.py`` with several ranks, each on a GPU of its own.

``ranks.py rows NAME …`` prints a JSON line for each row. ``ranks.py job KIND RANKS OUT [STEPS]`` is one of two
jobs that take turns: it starts its ranks, of which the first writes OUT as ``alternation.py`` reads it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checks
import torch
from alternation import SIMULATED, Alternation
from checks import MIB, Gpu
from rows import RANK_KINDS, WORLDS, Figures, NotRunError, check, rank_row, require, tell
from torch import distributed, nn

from cadenza.sidecar import client
from cadenza.sidecar.client.bootstrap.offload_trial import segments_of
from cadenza.sidecar.client.offload import library_caches
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.host import numa

PATIENCE_S = 60.0
WIDTH, LAYERS = (1280, 1) if SIMULATED else (4096, 42)
"""Hidden layers: 0.7 billion parameters on a GPU, whose buckets in float32 take 2.8 GB."""
INPUTS = 2048
SAMPLES = 4
ROUNDS = 3


def gpus() -> int:
    """Return the number of GPUs, without a context on any."""
    return len(os.environ["SIMULATED_GPUS"].split(os.pathsep)) if SIMULATED else torch.cuda.device_count()


class Ranks(Alternation):
    """Two jobs of several ranks that take turns on the same GPUs."""

    def __init__(self, folder: Path, kind: str, world: int) -> None:
        super().__init__(folder, "job", range(world))
        self._kind, self._world = kind, world

    def command(self, out: Path, *words: str) -> list[str]:
        """Return the command of a job."""
        return [sys.executable, __file__, "job", self._kind, str(self._world), str(out), *words]

    def turns(self, row: Figures) -> None:
        """Let the jobs take turns; each must get its own, and compute what it computes alone."""
        if (count := gpus()) < self._world:
            raise NotRunError(f"needs {self._world} GPUs, and there are {count}")
        if SIMULATED and self._kind == "FSDP2":
            raise NotRunError("needs NCCL, whose collectives FSDP2 uses")
        self.run(row)
        for job in self.jobs:
            job.read()
        row |= {
            f"{key}_MiB": job.said[key] / MIB for job in self.jobs[:1] for key in ("context", "NCCL") if key in job.said
        }
        row |= {f"job{n}_away_MiB": (job.fewest_bytes or 0) / MIB for n, job in enumerate(self.jobs, 1)}
        self.switch(row)
        self.same(row)


def job(kind: str, world: str, out: str, *steps: str) -> None:
    """Start the ranks of a job and wait for them; the end of one is that of all."""
    variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", kind, out, *steps],
            env={**os.environ, **variables, "RANK": str(number), "LOCAL_RANK": str(number)},
        )
        for number in range(int(world))
    ]
    with Path(out).open("a", buffering=1) as file:
        for number, one in enumerate(ranks):
            print(f"pid{number}", one.pid, file=file)
    try:
        while any(one.poll() is None for one in ranks) and not any(one.returncode for one in ranks):
            time.sleep(0.05)
    finally:
        for one in ranks:
            one.kill()
    raise SystemExit(max(abs(one.wait()) for one in ranks))


def rank(kind: str, out: str, steps: str = "1000000000") -> None:
    """Be a rank of a job."""
    # 1. Take the GPU and meet the others; the first collective makes NCCL's communicator. A job that is killed takes
    #    its ranks along (prctl(2), PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = Gpu(number)
    if gpu.scale.kind == "cuda":
        torch.cuda.set_device(gpu.place)
    distributed.init_process_group(
        "nccl" if gpu.scale.kind == "cuda" else "gloo",
        init_method=f"file://{out}.meeting", rank=number, world_size=world,
    )  # fmt: skip
    second = distributed.new_group(list(range(world))) if "second" in kind else None
    for group in (None, second) if second else (None,):
        distributed.all_reduce(torch.ones(1, device=gpu.place), group=group)
    nccl = gpu.bytes_by_nvml() - gpu.context - gpu.accelerator.reserved(gpu.place) if gpu.nvml else 0
    # 2. Train until the end, with a line for each boundary.
    model, optimizer = training(gpu, kind)
    client.attach(model, optimizer)
    with Path(out if number == 0 else os.devnull).open("a", buffering=1) as file:
        print("context", gpu.context, file=file)
        print("NCCL", max(0, nccl), file=file)
        ended = time.monotonic()
        torch.manual_seed(100 + number)
        for _ in range(int(steps)):
            loss = model(torch.randn(SAMPLES, INPUTS).to(gpu.place)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            distributed.all_reduce(total, group=second)
            value = total.item().hex()
            del loss, total
            began = time.monotonic()
            client.boundary()
            ended = time.monotonic()
            print(began, ended, value, file=file)
        client.detach()
        del model, optimizer
        gc.collect()
        library_caches.release([gpu.place])
        gpu.accelerator.empty_cache()
        print("freed", gpu.bytes_by_nvml() if gpu.nvml else 0, file=file)
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends (pytorch/pytorch#179291)


def training(gpu: Gpu, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model on each rank, and its optimizer."""
    torch.manual_seed(4)
    inner = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)]
    model: Any = nn.Sequential(nn.Linear(INPUTS, WIDTH), *inner, nn.ReLU(), nn.Linear(WIDTH, 10)).to(gpu.place)
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - since torch 2.6

        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def nccl_memory(row: Figures) -> None:
    """Train with two ranks over NCCL, alone and with yields, and suspend their communicators."""
    if SIMULATED or (count := gpus()) < 2:  # noqa: PLR2004
        raise NotRunError(f"needs two GPUs of NVIDIA, and there are {0 if SIMULATED else count}")
    with tempfile.TemporaryDirectory() as folder:
        commands = [[sys.executable, checks.__file__, "rank", str(one), folder, "nccl"] for one in range(2)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        found = [json.loads(one.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]) for one in ranks]
    row |= found[0]
    require(all(one["identical"] for one in found), "the ranks computed something else than without yields")
    require(all(one["sum_after"] == len(found) for one in found), "a sum after NCCL's resume is wrong")


def at_once(row: Figures) -> None:
    """Move the state of all GPUs at the same moment, each from a process of its own; then of the first alone."""
    if (count := gpus()) < 2:  # noqa: PLR2004
        raise NotRunError(f"needs two GPUs, and there are {count}")
    found = copies(range(count))
    row |= {"GPUs": count, "nodes": " ".join(str(one["node"]) for one in found)}
    for way in ("out", "back"):
        rates = [one[f"{way}_GB_s"] for one in found]
        row |= {f"{way}_GB_s_least": min(rates), f"{way}_GB_s_all": sum(rates)}
    (alone,) = copies([0])
    row |= {"alone_out_GB_s": alone["out_GB_s"], "alone_back_GB_s": alone["back_GB_s"]}
    require(all(one["same"] for one in found), "the content differs")


def copies(indices: Any) -> list[dict[str, Any]]:
    """Start a process for each GPU, and have all move at once when each has pinned its memory."""
    commands = [[sys.executable, __file__, "copy", str(index)] for index in indices]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        require(all(one.stdout and one.stdout.readline() for one in processes), "a process has ended")
        for one in processes:
            print("go", file=one.stdin, flush=True)
        return [json.loads(one.stdout.readline()) for one in processes if one.stdout]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def copy(index: str) -> None:
    """Be one of these processes."""
    gpu = Gpu(int(index))
    tensors, offload = gpu.tensors(4 if SIMULATED else gpu.scale.state), Offload()
    segments, before = segments_of(tensors), checks.sums(tensors)
    offload.offload(segments)
    offload.restore()
    print("pinned", flush=True)
    sys.stdin.readline()
    rounds = [(offload.offload(segments), offload.restore()) for _ in range(ROUNDS)]
    out, back = (min(moved.seconds for moved in column) for column in zip(*rounds, strict=True))
    nbytes = rounds[0][0].nbytes
    node = numa.node_of(gpu.accelerator.pci_address(gpu.place))
    tell(out_GB_s=nbytes / out / 1e9, back_GB_s=nbytes / back / 1e9, node=node, same=checks.sums(tensors) == before)
    sys.stdin.readline()


def main(*wanted: str) -> None:
    """Run rows."""
    with tempfile.TemporaryDirectory() as folder:
        checks: dict[str, Callable[[Figures], None]] = {
            rank_row(kind, world): functools.partial(_turns, Path(folder), kind, world)
            for world in WORLDS
            for kind in RANK_KINDS
        }
        checks |= {
            "R NCCL's memory is given back and comes back": nccl_memory,
            "R all GPUs move their state at once": at_once,
        }
        for name in wanted:
            check(name, checks[name])


def _turns(folder: Path, kind: str, world: int, row: Figures) -> None:
    Ranks(folder / f"{kind}{world}".replace(" ", "-"), kind, world).turns(row)


if __name__ == "__main__":
    {"job": job, "rank": rank, "copy": copy, "rows": main}[sys.argv[1]](*sys.argv[2:])
