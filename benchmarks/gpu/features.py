#!/usr/bin/env python3
"""The checks of ``acceptance.py`` on settings of torch and kinds of jobs, each in a process of its own.

``features.py rows NAME …`` prints a JSON line for each row.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import addresses
import torch
from checks import MIB, Gpu, PlainCopy, available_mib
from rows import Figures, NotRunError, check, require
from torch import nn
from torch.nn import functional

from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import survey

PATIENCE_S = 100.0
STEPS, STOPS = 6, (2, 4)
"""Steps of the large model, and those after which it yields."""
RESERVE_S = 0.5
"""Time of a yield or resume beyond that of its bytes."""
SHARES = {"GPU": 0.72, "host": 0.8}
"""The most of the GPU's and of the host's free memory that the large model's state takes."""


# --- C: trains as without yields ---------------------------------------------------------------------------


def compiled(gpu: Gpu, row: Figures) -> None:
    """Train a compiled model; without CUDA by the compiler's front end alone."""
    backend = "inductor" if gpu.scale.kind == "cuda" else "aot_eager"
    train = functools.partial(_losses, gpu, functools.partial(torch.compile, backend=backend))
    with _compiler():
        train(())  # it compiles, and may compute in another order than the later ones
    alone, yielding = train(()), train((3, 6, 9))
    row |= {"backend": backend, "steps": len(alone)}
    require(alone == yielding, "the losses differ")


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """Say that a row is not run where torch's compiler fails before any yield, as without Triton."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the compiler, Triton and the C compiler raise anything
        raise NotRunError(f"torch.compile fails here: {type(error).__name__}: {error}"[:200]) from None


def _losses(gpu: Gpu, compile_model: Callable[[nn.Module], Any], stops: tuple[int, ...]) -> list[str]:
    """Train a small model, with yields after some steps; return the losses in hexadecimal."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(gpu.place)
    run, optimizer, offload = compile_model(model), torch.optim.AdamW(model.parameters()), Offload()
    losses = []
    for step in range(12):
        loss = run(torch.randn(16, 64).to(gpu.place)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if step in stops:
            _cycle(offload, [("model", model), ("optimizer", optimizer)])
    offload.close()
    return losses


def _cycle(offload: Offload, sources: list[tuple[str, object]]) -> tuple[float, float, int]:
    """Yield and resume; return the seconds of both, and the bytes."""
    plan = survey(sources)
    require(plan.refusal is None, f"refused: {plan.refusal}")
    out = offload.offload(plan.segments)
    return out.seconds, offload.restore().seconds, out.nbytes


def expandable(gpu: Gpu, row: Figures) -> None:
    """Train and yield with segments that grow; NVML must show the memory gone."""
    _needs_cuda(gpu)
    offload, tensors = Offload(), gpu.tensors(min(gpu.scale.state, 2 << 10))
    before, plan = [tensor.cpu() for tensor in tensors], survey([("tensors", tensors)])
    require(plan.refusal is None, f"refused: {plan.refusal}")
    moved = offload.offload(plan.segments)
    row |= {"left_MiB": moved.left / MIB, "away_MiB": gpu.bytes_by_nvml() / MIB if gpu.nvml else None}
    offload.restore()
    require(all(torch.equal(now.cpu(), then) for now, then in zip(tensors, before, strict=True)), "the content differs")
    require(moved.left <= gpu.scale.kept * MIB, "torch keeps memory")
    require((row["away_MiB"] or 0) <= gpu.context / MIB + gpu.scale.kept, "NVML shows memory after the yield")
    del tensors, before, plan
    losses = [_losses(gpu, lambda model: model, stops) for stops in ((), (3, 6, 9))]
    require(losses[0] == losses[1], "the losses differ")


def side_stream(gpu: Gpu, row: Figures) -> None:
    """Make a tensor on another stream: its memory must come back there, and go to that stream's next tensor."""
    stream, offload = gpu.accelerator.new_stream(gpu.place), Offload()
    with gpu.accelerator.using(stream):
        tensor = torch.full((4 * MIB,), 6, dtype=torch.uint8, device=gpu.place)
    gpu.accelerator.synchronize(gpu.place)
    _cycle(offload, [("tensors", [tensor])])
    address, same = tensor.data_ptr(), int(tensor.cpu().min()) == int(tensor.cpu().max()) == 6  # noqa: PLR2004
    del tensor
    others = torch.empty(4 * MIB, dtype=torch.uint8, device=gpu.place).data_ptr()
    with gpu.accelerator.using(stream):
        row["again"] = torch.empty(4 * MIB, dtype=torch.uint8, device=gpu.place).data_ptr() == address
    offload.close()
    require(same, "the content differs")
    require(others != address and row["again"], "the memory came back on another stream")


def one_rank(gpu: Gpu, row: Figures) -> None:
    """Train DDP with both settings of its buckets and FSDP, one rank over NCCL."""
    import checks  # noqa: PLC0415

    _needs_cuda(gpu)
    _needs_nccl()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, checks.__file__, "rank", "0", folder, "nccl", "1"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    require(done.returncode == 0, f"the rank ended with {done.returncode}")
    row |= json.loads(done.stdout.splitlines()[-1])
    require(row["identical"], "it computed something else than without yields")


# --- C': refused by name -----------------------------------------------------------------------------------


def cudagraph_trees(gpu: Gpu, row: Figures) -> None:
    """Compile with the mode that captures CUDA graphs."""
    _needs_cuda(gpu)
    model = nn.Linear(64, 64).to(gpu.place)
    run = torch.compile(model, mode="reduce-overhead")
    with _compiler(), torch.no_grad():
        for _ in range(4):
            run(torch.ones(8, 64, device=gpu.place))
    row["said"] = survey([("model", model)]).refusal or "moves"
    require("reduce-overhead" in row["said"], "the graphs are not refused by name")


def hidden_graph(gpu: Gpu, row: Figures) -> None:
    """Hide a captured graph from Python's collector, so that only its pool tells of it."""
    _needs_cuda(gpu)
    tensor, graph = torch.ones(MIB, device=gpu.place), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor * 2
    gc.freeze()
    row["said"] = survey([("tensors", [tensor])]).refusal or "moves"
    require("graph" in row["said"], "the graph's pool is not refused")


def async_allocator(gpu: Gpu, row: Figures) -> None:
    """Survey under an allocator that does not give memory back."""
    _needs_cuda(gpu)
    row["said"] = survey([("tensors", gpu.tensors(1))]).refusal or "moves"
    require("cudaMallocAsync" in row["said"], "the allocator is not refused by name")


# --- D: a large model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A decoder in Llama's shape (Touvron et al., 2023, table 2): the widths of its 6.7 billion parameters."""

    width: int = 4096
    inner: int = 11008
    words: int = 32000
    layers: int = 32

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width

    @property
    def others(self) -> int:
        """Parameters of the two embeddings."""
        return 2 * self.words * self.width


STATE_BYTES, PEAK_BYTES = 2 + 4 + 4, 2 + 4 + 4 + 2
"""Bytes of each parameter that move: bfloat16 with two moments in float32; and with its gradient."""


class Layer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = max(1, shape.width // 128)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        batch, length, width = hidden.shape
        parts = self.qkv(self.norms[0](hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner = self.norms[1](hidden)
        return hidden + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Moments(torch.optim.Optimizer):
    """AdamW for parameters in bfloat16, with both moments in float32 (Loshchilov and Hutter, 2019)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002
        """Update each parameter on its own, so that little memory is needed beyond the state."""
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad.float()
            if not state:
                state |= {key: torch.zeros_like(gradient) for key in ("first", "second")}
            state["first"].lerp_(gradient, 0.1)
            state["second"].lerp_(gradient.square_(), 0.05)
            parameter.mul_(1 - 1e-5)
            parameter.sub_((state["first"] / state["second"].sqrt().add_(1e-8)).mul_(1e-4).to(parameter.dtype))


def large_model(gpu: Gpu, row: Figures) -> None:
    """Train a model of 6.7 billion parameters, or of as many layers as fit, with and without yields."""
    small = gpu.scale.kind != "cuda"
    shape = Shape(64, 128, 320, 2) if small else Shape()
    rooms = {"GPU": gpu.accelerator.total(gpu.place) / PEAK_BYTES, "host": (available_mib() << 20) / STATE_BYTES}
    parameters = min(share * rooms[place] for place, share in SHARES.items()) - shape.others
    layers = min(shape.layers, int(parameters / shape.layer_parameters))
    if layers < 1:
        raise NotRunError("memory is short for a single layer")
    plain = PlainCopy(gpu, 1 << 20 if small else 4 << 30)
    link = [max(plain.rate(out=out) for _ in range(3)) for out in (True, False)]
    plain.close()
    del plain
    gpu.accelerator.empty_cache()
    (alone, _, _), (losses, times, peaks) = (_train_large(gpu, shape, layers, stops) for stops in ((), STOPS))
    moved = times[0][2]
    row |= {"layers": layers, "MiB": moved / MIB, "out_s": times[-1][0], "back_s": times[-1][1]}
    row |= {"peak_MiB": peaks[1] / MIB, "peak_before_MiB": peaks[0] / MIB}
    require(losses == alone, "the losses differ")
    require(peaks[1] <= 1.01 * peaks[0] + MIB, "the peak has grown by over 1 % after the resume")
    allowed = [moved / (0.9 * rate) + RESERVE_S for rate in link]
    require(row["out_s"] <= allowed[0] and row["back_s"] <= allowed[1], f"over {max(allowed):.2f} s")


def _train_large(
    gpu: Gpu, shape: Shape, layers: int, stops: tuple[int, ...]
) -> tuple[list[str], list[tuple[float, float, int]], tuple[int, int]]:
    """Return the losses, the times and bytes of each yield, and the peaks of memory before and after the yields."""
    gc.collect()
    gpu.accelerator.empty_cache()
    torch.manual_seed(4)
    with gpu.place:
        blocks = [Layer(shape).to(torch.bfloat16) for _ in range(layers)]
        ends = nn.Embedding(shape.words, shape.width), nn.Linear(shape.width, shape.words, bias=False)
        model = nn.Sequential(ends[0].to(torch.bfloat16), *blocks, ends[1].to(torch.bfloat16))
    optimizer, offload = Moments(model.parameters()), Offload()
    losses, times, peaks = [], [], [0, 0]
    for step in range(STEPS):
        words = torch.randint(0, shape.words, (1, 256)).to(gpu.place)
        loss = functional.cross_entropy(model(words)[0].float(), words[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        del loss
        peaks[bool(times)] = gpu.accelerator.in_use_and_peak(gpu.place)[1]
        if step in stops:
            times.append(_cycle(offload, [("model", model), ("optimizer", optimizer)]))
    offload.close()
    return losses, times, (peaks[0], peaks[1])


# --- F, H: other processes ---------------------------------------------------------------------------------


def driver_trial(gpu: Gpu, row: Figures) -> None:
    """Run the trial of ``cadenza doctor --gpu``: memory out and back, and managed memory told from other."""
    _needs_cuda(gpu)
    try:
        import pynvml  # noqa: PLC0415

        from cadenza.sidecar.agent.driver import driver_trial as trial  # noqa: PLC0415
        from cadenza.sidecar.agent.telemetry.gpus import driver_version  # noqa: PLC0415
    except ImportError as error:
        raise NotRunError(str(error)) from None
    pynvml.nvmlInit()
    record = trial.run(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)), driver_version())
    row |= {"checkpoint_s": record.checkpoint_s, "restore_s": record.restore_s}
    row |= {"plain_MiB": record.plain_bytes / MIB, "managed_MiB": (record.managed_bytes or 0) / MIB}
    if "not installed" in record.failed:
        raise NotRunError(record.failed)
    require(not record.failed, record.failed)


def watchdog(gpu: Gpu, row: Figures) -> None:
    """Look at a process with NCCL's watchdog as the agent does before it freezes one."""
    _needs_cuda(gpu)
    try:
        from cadenza.sidecar.agent.driver.inspection import Inspector  # noqa: PLC0415
    except ImportError as error:
        raise NotRunError(str(error)) from None
    _needs_nccl()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        torch.distributed.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1, device=gpu.place))
        row["said"] = Inspector().refusal([os.getpid()]) or "frozen"
        torch.distributed.destroy_process_group()  # its threads would wait at the end for the file of the meeting
    require("watchdog" in row["said"], "a process that its watchdog would end is not refused")


def killed(gpu: Gpu, row: Figures) -> None:
    """Kill a process in the midst of its copies; its memory must be free soon."""
    if gpu.nvml is None:
        raise NotRunError("NVML lists no process with this pid")
    command = [sys.executable, __file__, "move"]
    for number in range(1 if SIMULATED else 3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            require(process.stdout and process.stdout.readline(), "the process has ended")
            time.sleep(0.05 * number)
            process.kill()
            ended = time.monotonic()
            while process.pid in (gpu.nvml.processes() or {}) and time.monotonic() - ended < 10:  # noqa: PLR2004
                time.sleep(0.005)
            row["freed_s"] = max(row.get("freed_s", 0.0), time.monotonic() - ended)
    require(row["freed_s"] <= 2, "a killed process has its memory for over 2 s")  # noqa: PLR2004


def move() -> None:
    """Be a process that moves its state out and back until it is killed."""
    gpu, offload = Gpu(), Offload()
    tensors = gpu.tensors(gpu.scale.state)
    while True:
        print("moving", flush=True)
        _cycle(offload, [("tensors", tensors)])


def short_host(gpu: Gpu, row: Figures) -> None:
    """Ask for more host memory than there is."""
    segments, ranks = survey([("tensors", gpu.tensors(1))]).segments, 1 << 40
    row["said"] = (Offload().memory_refusal(segments, ranks) or "moves")[:100]
    require("host memory" in row["said"], "it would move")


def _needs_cuda(gpu: Gpu) -> None:
    if gpu.scale.kind != "cuda":
        raise NotRunError("needs CUDA")


def _needs_nccl() -> None:
    if not torch.distributed.is_nccl_available():
        raise NotRunError("this torch has no NCCL")


Check = Callable[[Gpu, Figures], None]
SIMULATED = bool(os.environ.get("SIMULATED_GPUS"))
CHECKS: dict[str, Check] = {
    "C torch.compile computes the same": compiled,
    "C expandable segments leave the GPU": expandable,
    "C memory of a side stream comes back on it": side_stream,
    "C DDP and FSDP with one rank": one_rank,
    "C torch.compile's CUDA graphs refuse by name": cudagraph_trees,
    "C a graph behind gc.freeze() refuses": hidden_graph,
    "C cudaMallocAsync refuses by name": async_allocator,
    **{name: functools.partial(addresses.row, word) for word, name in addresses.NAMES.items()},
    "D a large language model": large_model,
    "F the driver's trial of doctor --gpu": driver_trial,
    "F NCCL's watchdog keeps a process from freezing": watchdog,
    "H a process killed in its copies": killed,
    "H host memory that is short refuses": short_host,
}
"""The check of each row."""


def main(role: str, *names: str) -> None:
    """Run rows, or be the process that a check kills."""
    if role == "move":
        move()
        return
    gpu = Gpu()
    for name in names:
        check(name, functools.partial(CHECKS[name], gpu))


if __name__ == "__main__":
    main(*sys.argv[1:])
