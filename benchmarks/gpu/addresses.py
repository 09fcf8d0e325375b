#!/usr/bin/env python3
"""The rows of ``acceptance.py`` for addresses that stay, each in a process with the preloaded library.

``addresses.py`` prints all of them; ``addresses.py graphs|training|small|large`` is the process of one row: it
prints its figures, or why the row has failed.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checks import MIB, Gpu, PlainCopy, available_mib
from rows import Figures, MissedError, NotRunError, check, require
from torch import nn

from cadenza.sidecar.client.offload.addresses import address_survey, preloaded
from cadenza.sidecar.client.offload.copy_plan import AddressPlan
from cadenza.sidecar.client.offload.engine import Offload

SOURCE = Path(__file__).resolve().parents[2] / "sidecar" / "agent" / "addresses"
LIMITS_S = {"graphs": 50.0, "training": 80.0, "small": 50.0, "large": 90.0}
"""Longest time of each row's process."""
YIELDS, STEPS = 50, 10
SMALL, LARGE_MIB = 512, 40 << 10
SHARES = {"small": 0.55, "large": 0.93}
"""The least speed of both ways, of the plain copy's."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process with the library, which is built into a folder if it is not there."""
    if os.environ.get("SIMULATED_GPUS"):
        import simulated_gpu  # noqa: PLC0415

        return {**os.environ, **simulated_gpu.preloaded()}
    place = preloaded.path()
    if place is None:
        if not (shutil.which("make") and shutil.which("cc")):
            raise NotRunError(f"there is no {preloaded.NAME}, and no compiler to build it")
        shutil.copytree(SOURCE, folder / "source")
        subprocess.run(["make", "--silent", "-C", str(folder / "source")], check=True)
        place = folder / "source" / preloaded.NAME
    return preloaded.environment(os.environ, place)


def row(word: str, _gpu: Gpu | None, figures: Figures) -> None:
    """Run a row's process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, word]
        done = subprocess.run(
            command,
            env=environment(Path(folder)),
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMITS_S[word],
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    require(lines, f"its process ended with {done.returncode}")
    found = json.loads(lines[-1])
    figures |= found["figures"]
    if found["outcome"] != "passed":
        raise (NotRunError if found["outcome"] == "not run" else MissedError)(found["why"])


def graphs(gpu: Gpu, figures: Figures) -> None:
    """Replay a captured training step with a yield after each; on the simulated GPU write by captured addresses."""
    alone, yielding = (_losses(gpu, yields=yields) for yields in (False, True))
    figures |= {"yields": YIELDS, "captured": gpu.scale.kind == "cuda"}
    require(alone == yielding, "the results differ")


def _losses(gpu: Gpu, *, yields: bool) -> list[str]:
    """Return what each of some replays computes, in hexadecimal."""
    torch.manual_seed(4)
    offload, found = Offload(), []
    weight = torch.randn(256, 256).to(gpu.place).requires_grad_()
    batch = torch.randn(32, 256).to(gpu.place)

    def step() -> torch.Tensor:
        loss = (batch @ weight).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight.sub_(gradient, alpha=0.01)
        return loss

    replay, graph = step, None
    if gpu.scale.kind == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        replay = lambda: (graph.replay(), captured)[1]  # noqa: E731
    for _ in range(YIELDS):
        found.append(replay().item().hex())
        if yields:
            offload.offload_in_place()
            offload.restore()
    offload.close()
    return found


def training(gpu: Gpu, figures: Figures) -> None:
    """Train plainly, by DDP and by compiled CUDA graphs, with fused AdamW, alone and with a yield at each step."""
    cuda = gpu.scale.kind == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if cuda else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        for kind in ("plain", "DDP", "reduce-overhead") if cuda else ("plain", "DDP"):
            _trained(gpu, kind, yields=False)  # compiles, and chooses algorithms
            alone, yielding = (_trained(gpu, kind, yields=yields) for yields in (False, True))
            figures[kind] = "identical" if alone == yielding else f"from step {_first_other(alone, yielding)} on other"
        torch.distributed.destroy_process_group()
    require(set(figures.values()) == {"identical"}, "the losses differ")


def _trained(gpu: Gpu, kind: str, *, yields: bool) -> list[str]:
    """Return the losses of some steps, in hexadecimal."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(gpu.place)
    run: Any = nn.parallel.DistributedDataParallel(model) if kind == "DDP" else model
    run = torch.compile(model, mode="reduce-overhead") if kind == "reduce-overhead" else run
    optimizer = torch.optim.AdamW(model.parameters(), fused=gpu.scale.kind == "cuda")
    offload, found = Offload(), []
    for _ in range(STEPS):
        if kind == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = run(torch.randn(64, 256).to(gpu.place)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item().hex())
        del loss
        if yields:
            offload.offload_in_place()
            offload.restore()
    offload.close()
    return found


def _first_other(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of the first loss that differs."""
    return next(step for step, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1])


def speed(word: str, gpu: Gpu, figures: Figures) -> None:
    """Yield and resume; compare with a plain copy of as many bytes."""
    small, cuda = word == "small", gpu.scale.kind == "cuda"
    mib = (2 * SMALL if small else LARGE_MIB) if cuda else 32
    if available_mib() < 1.2 * mib:
        raise NotRunError(f"needs {int(1.2 * mib)} MiB of host memory")
    block = MIB if small else 20 * MIB if mib >= 40 else mib * MIB  # noqa: PLR2004 - 1 MiB: torch's small segments
    tensors = [torch.full((block,), n % 251, dtype=torch.uint8, device=gpu.place) for n in range(mib * MIB // block)]
    plan = address_survey.look()
    require(isinstance(plan, AddressPlan), f"addresses cannot stay: {plan}")
    offload = Offload()
    for _ in range(2):  # the first pins
        out, back = offload.offload_in_place(), offload.restore()
    require(all(int(one[0]) == int(one[-1]) == n % 251 for n, one in enumerate(tensors)), "the content differs")
    nbytes, figures["segments"] = out.nbytes, len(plan.segments) if isinstance(plan, AddressPlan) else 0
    del tensors
    offload.close()
    gpu.accelerator.empty_cache()
    plain = PlainCopy(gpu, min(nbytes, 4 << 30))
    peer = [max(plain.rate(out=way) for _ in range(3)) for way in (True, False)]
    plain.close()
    shares = [nbytes / moved.seconds / rate for moved, rate in zip((out, back), peer, strict=True)]
    figures |= {"MiB": nbytes / MIB, "out_s": out.seconds, "back_s": back.seconds}
    figures |= {"out_share": shares[0], "back_share": shares[1], "left_MiB": out.left / MIB}
    if cuda:
        require(min(shares) >= SHARES[word], f"below {SHARES[word]:.0%} of a plain copy")


NAMES = {
    "graphs": "C addresses that stay: CUDA graphs, 50 yields",
    "training": "C addresses that stay: fused AdamW, DDP, reduce-overhead",
    "small": "B addresses that stay: 512 segments of 2 MiB",
    "large": "B addresses that stay: 40 GiB",
}
WORDS = {"graphs": graphs, "training": training, **{word: functools.partial(speed, word) for word in SHARES}}


if __name__ == "__main__":
    if os.environ.get("SIMULATED_GPUS"):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "simulated"))
    if sys.argv[1:]:
        device_of_process = Gpu()
        check(sys.argv[1], functools.partial(WORDS[sys.argv[1]], device_of_process))
    for each in NAMES if not sys.argv[1:] else ():
        check(NAMES[each], functools.partial(row, each, None))
