"""Jobs that save, get killed and restore: each is a process forked from this one, which imports torch once for all.

``python checkpoint_jobs.py FOLDER`` runs them all and writes what each saw as JSON lines into the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it, which takes a second: once for all forks
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.sidecar.client.checkpoints import ResumableSampler, checkpoint

STEPS, SAVE_EVERY, KILLED_AT = 22, 4, 14
SAMPLES, GLOBAL_BATCH = 48, 8


def fork(work: Callable[..., object], *arguments: object) -> int:
    """Run a function in a separate process; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        except BaseException:  # noqa: BLE001 - a child must never return
            traceback.print_exc()
            os._exit(1)
        # Gloo's threads may abort an interpreter that ends (see client_ddp.py).
        os._exit(0)
    return pid


def wait(*pids: int) -> list[int]:
    """Return the exit codes; a killed process has the negative number of the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def mlp(rank: int, size: int) -> dict[str, Any]:
    """Return an MLP with dropout and batch norm under SGD with momentum, with data loading in this process."""
    model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)}


def transformer(rank: int, size: int) -> dict[str, Any]:
    """Return a transformer under AdamW with a warm-up, a GradScaler and an average of the weights."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    cool = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], 0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [6]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3),
        "own": {"average": torch.optim.swa_utils.AveragedModel(model), "seen": {"samples": 0}},
        "background": True,
    }


def ddp(rank: int, size: int) -> dict[str, Any]:
    """Return the MLP without dropout, as one of the ranks of a DDP job when there are several."""
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    model = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def train(
    make: Callable[..., dict[str, Any]], told: Path, place: Path | None, kill_at: int, ranks: tuple[int, int]
) -> None:
    """Train, from the newest checkpoint if there is one; write a line for each step and one for the end."""
    rank, size = ranks
    random.seed(5 + rank)
    np.random.seed(6 + rank)  # noqa: NPY002
    torch.manual_seed(7 + rank)
    job = make(rank, size)
    data = TensorDataset(torch.arange(SAMPLES), torch.linspace(-1, 1, SAMPLES * 4).view(SAMPLES, 4))
    sampler = ResumableSampler(data, seed=3, ranks=ranks)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    keeper = None if place is None else checkpoint(place, sampler=sampler, **job)
    step = (keeper.restore() if keeper else None) or 0
    with told.open("a") as lines:
        while step < STEPS:
            for indices, batch in sampler.batches(loader):
                loss = one_step(job, batch, 0.0 if make is ddp else draw())
                step += 1
                lines.write(json.dumps({"step": step, "loss": loss, "samples": indices.tolist()}) + "\n")
                lines.flush()
                if keeper and step % SAVE_EVERY == 0:
                    keeper.save(step)
                if step == kill_at:
                    if keeper:
                        keeper.wait()  # so that it is known which checkpoint there is
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == STEPS:
                    break
        lines.write(json.dumps({"end": digest(job)}) + "\n")


def draw() -> float:
    """Return a number drawn from Python's and numpy's generators."""
    return random.random() + float(np.random.rand())  # noqa: S311, NPY002


def one_step(job: dict[str, Any], batch: torch.Tensor, noise: float) -> float:
    """Train one batch; return the loss."""
    scaler = job.get("scaler")
    with torch.autocast("cpu", torch.bfloat16, enabled=scaler is not None):
        loss = (job["model"](batch) - noise).float().square().mean()
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.step(job["optimizer"])
        scaler.update()
        job["scheduler"].step()
        job["own"]["average"].update_parameters(job["model"])
        job["own"]["seen"]["samples"] += len(batch)
    else:
        job["optimizer"].step()
    job["optimizer"].zero_grad(set_to_none=True)
    return loss.item()


def digest(job: dict[str, Any]) -> str:
    """Return a digest of the job's whole state."""
    model = getattr(job["model"], "module", job["model"])
    tensors = [*model.state_dict().values()]
    for state in job["optimizer"].state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    text = json.dumps([job["optimizer"].param_groups[0]["lr"], str(job.get("own", {}).get("seen"))])
    if "scaler" in job:
        tensors += [*job["own"]["average"].state_dict().values(), torch.tensor(job["scaler"].get_scale())]
    return hashlib.sha256(text.encode() + b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def one_rank(make: Callable[..., Any], told: Path, place: Path | None = None, kill_at: int = 0) -> list[int]:
    """Run a job of one rank to its end."""
    return wait(fork(train, make, told, place, kill_at, (0, 1)))


def rank_of_two(rank: int, told: Path, place: Path | None, kill_at: int, meeting: Path) -> None:
    """Run one of two ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    train(ddp, told.with_name(f"{told.name}.{rank}"), place, kill_at, (rank, 2))


def two_ranks(told: Path, place: Path | None = None, kill_at: int = 0) -> list[int]:
    """Run a job of two ranks to its end."""
    meeting = told.with_name(f"{told.name}.meeting")
    return wait(*(fork(rank_of_two, rank, told, place, kill_at, meeting) for rank in range(2)))


def main() -> None:
    """Run all jobs."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    codes: dict[str, list[int]] = {}
    for name, make in (("mlp", mlp), ("transformer", transformer)):
        codes[f"{name}.alone"] = one_rank(make, folder / f"{name}.alone")
        place = folder / f"{name}.checkpoints"
        codes[f"{name}.killed"] = one_rank(make, folder / f"{name}.killed", place, KILLED_AT)
        codes[f"{name}.resumed"] = one_rank(make, folder / f"{name}.resumed", place)
    codes["two.alone"] = two_ranks(folder / "two.alone")
    place = folder / "two.checkpoints"
    codes["two.killed"] = two_ranks(folder / "two.killed", place, KILLED_AT)
    codes["copy"] = [os.system(f"cp -r {place} {place}.2")]  # noqa: S605
    codes["two.resumed"] = two_ranks(folder / "two.resumed", folder / "two.checkpoints.2")
    codes["two.shrunk"] = one_rank(ddp, folder / "two.shrunk", place)
    codes["two.grown"] = two_ranks(folder / "two.grown", place)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
