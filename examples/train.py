#!/usr/bin/env python3
"""Train a small PyTorch model on generated data, reproducibly, and say what it did in a JSON file.

It runs anywhere: alone, in a Slurm job, or as the ranks of ``torchrun`` (data-parallel over gloo). The lines
marked with `# Cadenza` are all that sharing a GPU takes; ``--no-attach`` leaves them out, which is also how a
script that knows nothing of Cadenza runs under ``cadenza run -- python train.py``.

``--iteration-s`` paces the training: a step that is done early sleeps until that time has passed since it
began. That lets a few cores stand in for many GPUs, and it hides costs smaller than the slack, so say so with
results.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
import time  # noqa: TID251 (a training script of a user, not part of the packages)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[Tensor, Tensor]
CLASSES = 10
BATCH = 16
SAMPLES = 512
WORDS = 32
"""Size of the vocabulary of the text models."""
LENGTH = 12
"""Words of a text."""
MILESTONE = 100
"""The iteration whose time a waiting user cares about first."""
NOTED = {number: f"iteration_{number}_s" for number in (1, MILESTONE)}
"""Iterations whose times are kept, also in a checkpoint."""


class Text(nn.Module):
    """Embedding, a sequence model, and a classifier on the mean over the text."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.body = body
        self.head = nn.Linear(width, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        """Return one row of class scores for each text."""
        out = self.body(self.words(text))
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return torch.as_tensor(self.head(states.mean(dim=1)))


def mlp() -> nn.Module:
    """Two hidden layers on flattened images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def wide() -> nn.Module:
    """Two wide layers: 27 MB of parameters, gradients and momenta."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, CLASSES)
    )


def cnn() -> nn.Module:
    """Two convolutions with batch normalization, so that there are buffers besides the parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, CLASSES),
    )  # fmt: skip


def transformer() -> nn.Module:
    """One encoder layer."""
    return Text(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 32)


def lstm() -> nn.Module:
    """One recurrent layer."""
    return Text(nn.LSTM(32, 32, batch_first=True), 32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn, "lstm": lstm, "mlp": mlp, "transformer": transformer, "wide": wide,
}  # fmt: skip


def dataset(model: str, seed: int) -> Batch:
    """Return inputs and the classes that a fixed random teacher gives them."""
    generator = torch.Generator().manual_seed(seed)
    if model in {"transformer", "lstm"}:
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
        teacher = torch.randn(WORDS, CLASSES, generator=generator)
        return words, teacher[words].mean(dim=1).argmax(dim=1)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    teacher = torch.randn(64, CLASSES, generator=generator)
    return images, (images.flatten(1) @ teacher).argmax(dim=1)


def batch_of(data: Batch, step: int, rank: int, ranks: int) -> Batch:
    """Return this rank's part of the batch of one step: the data in order, round and round."""
    first = (step * ranks + rank) * BATCH % SAMPLES
    return data[0][first : first + BATCH], data[1][first : first + BATCH]


@dataclass
class Log:
    """Times in seconds since the epoch; the losses as exact hexadecimal numbers."""

    times: dict[str, float] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    last_loss: float = 0.0

    def step(self, number: int, loss: float) -> None:
        """Note one finished iteration, counted from 1."""
        self.losses.append(loss.hex())
        self.last_loss = loss
        if number in NOTED:
            self.times[NOTED[number]] = time.time()

    def digest(self) -> str:
        """Return a digest of all losses."""
        return hashlib.sha256("".join(f"{loss}\n" for loss in self.losses).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        noted = {name: self.times[name] for name in NOTED.values() if name in self.times}
        return {"losses": self.losses, "last": self.last_loss, "times": noted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.losses, self.last_loss = list(state["losses"]), state["last"]
        self.times |= state["times"]


class Claim:
    """A lock on a file for each GPU while this process uses it.

    These models are so small that two of them fit on a GPU: a second user of a GPU ends with an error here.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: list[Any] = []

    def take(self) -> None:
        """Lock all GPUs of this job, or end the process when another one has one of them."""
        if self._folder is None:
            return
        self._folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user made it, open to all
            self._folder.chmod(0o1777)
        self._files = [open_shared(self._folder / str(gpu)) for gpu in where()["gpus"]]
        for file in self._files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(f"{file.name}: the GPU is in use by another process")

    def let_go(self) -> None:
        """Unlock them."""
        for file in self._files:
            file.close()
        self._files = []


def open_shared(path: Path) -> Any:
    """Open a lock file that every user may lock."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT, 0o644), "rb")


def train(model: nn.Module, data: Batch, options: argparse.Namespace, ranks: tuple[int, int], log: Log) -> None:
    """Run all iterations."""
    rank, world = ranks
    gpus = Claim(options.claim_dir if rank == 0 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    if not options.no_attach:
        from cadenza.sidecar import client  # noqa: PLC0415  # Cadenza

        client.attach(model, optimizer).call(on_yield=gpus.let_go, on_resume=gpus.take)  # Cadenza
    gpus.take()
    keeper, done = restored(model, optimizer, options, log)
    for step in range(done, options.iterations):
        began = time.monotonic()
        inputs, classes = batch_of(data, step, rank, world)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), classes)
        loss.backward()
        optimizer.step()
        log.step(step + 1, loss.item())
        time.sleep(max(0.0, began + options.iteration_s - time.monotonic()))
        if keeper is not None:
            keeper.at(step + 1)  # Cadenza
        if not options.no_attach:
            client.boundary()  # Cadenza


def restored(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, log: Log
) -> tuple[Any, int]:
    """Return the keeper of checkpoints, and the step to begin at: that of the newest one, or 0 without any."""
    if options.checkpoint_dir is None or options.no_attach:
        return None, 0
    from cadenza.sidecar import client  # noqa: PLC0415  # Cadenza

    keeper = client.checkpoint(options.checkpoint_dir, model=model, optimizer=optimizer, own={"log": log})  # Cadenza
    step = keeper.restore() or 0  # Cadenza
    log.times |= {"restored_step": int(step), "restored_s": time.time()}
    return keeper, step


def digest(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer, bit for bit."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def device_here() -> torch.device:
    """Return this rank's GPU, the CPU without one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    return torch.empty(0, device=torch.accelerator.current_accelerator()).device


def distributed(model: nn.Module) -> tuple[nn.Module, tuple[int, int]]:
    """Return the model, data-parallel when torchrun started several ranks, and (rank, ranks)."""
    if "WORLD_SIZE" not in os.environ:
        return model, (0, 1)
    torch.distributed.init_process_group("gloo")
    ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    # As views of the buckets, gradients lead to the buckets' memory, so that it can leave the GPU as well.
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), ranks


def write(path: Path, text: str) -> None:
    """Write a file that is there only when it is whole."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    draft.replace(path)


def where() -> dict[str, Any]:
    """Return what Slurm says of this job; empty outside it."""
    gpus = os.environ.get("SLURM_JOB_GPUS", "")
    return {
        "job": int(os.environ.get("SLURM_JOB_ID", "0")),
        "name": os.environ.get("SLURM_JOB_NAME", ""),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "user": os.environ.get("USER", ""),
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "allocated_s": float(os.environ.get("SLURM_JOB_START_TIME", "0")),
        "gpus": [int(index) for index in gpus.split(",") if index],
    }


def process_began() -> float:
    """Return when this process began, before its imports, in seconds since the epoch (proc_pid_stat(5))."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--device", help="where to train, such as cpu (default: on this rank's GPU if there is one)")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--iteration-s", type=float, default=0.0, help="pace: least duration of a step")
    parser.add_argument("--seed", type=int, default=0, help="of the model and its data")
    parser.add_argument("--no-attach", action="store_true", help="run without a line of Cadenza")
    parser.add_argument("--claim-dir", type=Path, help="lock a file in here for each GPU while using it")
    parser.add_argument("--checkpoint-dir", type=Path, help="save a checkpoint here whenever Cadenza moves the job")
    parser.add_argument("--out", type=Path, help="JSON file to write at the end (rank 0)")
    return parser.parse_args()


def main() -> None:
    """Train and report."""
    started = time.time()
    options = arguments()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)  # noqa: FBT003 (torch's own signature)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    device = options.device or device_here()
    model, ranks = distributed(MODELS[options.model]().to(device))
    log = Log({"process_s": process_began(), "started_s": started})
    inputs, classes = dataset(options.model, options.seed)
    train(model, (inputs.to(device), classes.to(device)), options, ranks, log)
    report = {
        **where(),
        "model": options.model, "seed": options.seed, "ranks": ranks[1], "iterations": options.iterations,
        "iteration_s": options.iteration_s, **log.times, "ended_s": time.time(),
        "loss": log.last_loss, "losses_sha256": log.digest(), "parameters_sha256": digest(model),
    }  # fmt: skip
    if ranks[0] == 0:
        text = json.dumps(report, indent=1)
        print(text)
        if options.out:
            write(options.out, text + "\n")
    if ranks[1] > 1:
        torch.distributed.destroy_process_group()
        # gloo's threads may abort an interpreter that ends the usual way (pytorch/pytorch#179291).
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
