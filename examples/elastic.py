#!/usr/bin/env python3
"""Train on as many GPUs as Slurm grants at the moment, each sample of an epoch once, and note which were trained.

One rank for each GPU, by torchrun or by srun; the number is Slurm's at each start of the script::

    sbatch --gpus=1 --cpus-per-task=2 --mem=4G --cadenza=min_gpus=1,max_gpus=4 --wrap='
        torchrun --standalone --nproc-per-node=$SLURM_GPUS_ON_NODE examples/elastic.py --checkpoint-dir /shared/run7'

Cadenza makes such a job larger and smaller by a checkpoint and a requeue, so there is nothing in here about that but
the number of ranks: the batch follows it (`client.batch`), the sampler deals the same samples to more or fewer ranks,
and the learning rate is left alone. ``--samples-dir`` gets a file for each rank and start, a line for each step: the
epoch, and the indices of the samples that the rank trained in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time  # noqa: TID251 (a training script of a user, not part of the packages)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from train import MODELS, SAMPLES, dataset, device_here, where, write
from train import distributed as data_parallel

from cadenza.sidecar import client
from cadenza.sidecar.client.checkpoints import ResumableSampler


@dataclass
class Log:
    """Part of a checkpoint besides the training: the loss of each step, and the number of ranks after each start."""

    losses: list[float] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Steps done at each start, and ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"losses": self.losses, "sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.losses, self.sizes = list(state["losses"]), [(steps, ranks) for steps, ranks in state["sizes"]]


class Trained:
    """A file of the samples that this rank has trained; nothing without a directory."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self._file = (folder / f"{where()['restart']}-{rank}").open("a")

    def add(self, epoch: int, indices: torch.Tensor) -> None:
        """Note one step's samples, at once."""
        if self._file is not None:
            print(epoch, *indices.tolist(), file=self._file, flush=True)


def train(model: nn.Module, options: argparse.Namespace, ranks: tuple[int, int]) -> Log:
    """Train all epochs, or what is left of them."""
    log, trained = Log(), Trained(options.samples_dir, ranks[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    client.attach(model, optimizer)
    data, device = TensorDataset(torch.arange(SAMPLES), *dataset("mlp", options.seed)), device_here()
    sampler = ResumableSampler(data, seed=options.seed)
    mine = client.batch(options.batch)
    loader, step_s = DataLoader(data, batch_size=mine, sampler=sampler), options.iteration_s * mine / options.batch
    keeper = client.checkpoint(
        options.checkpoint_dir, model=model, optimizer=optimizer, sampler=sampler, own={"log": log}
    )
    done = keeper.restore() or 0  # first, for it replaces the lists of the log
    log.sizes.append((done, ranks[1]))
    for epoch in range(sampler.epoch, options.epochs):
        for indices, inputs, classes in sampler.batches(loader):
            began = time.monotonic()
            log.losses.append(step(model, optimizer, inputs.to(device), classes.to(device)))
            trained.add(epoch, indices)
            time.sleep(max(0.0, began + step_s - time.monotonic()))
            keeper.at(len(log.losses))
            client.boundary(len(indices))
    keeper.close()
    return log


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, classes: torch.Tensor) -> float:
    """Train one batch and return its loss, the mean over all ranks."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), classes)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mean = loss.detach()
    if distributed.is_initialized():
        distributed.all_reduce(mean)
        mean = mean / distributed.get_world_size()
    return float(mean)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--epochs", type=int, default=10, help=f"of {SAMPLES} samples each")
    parser.add_argument("--batch", type=int, default=64, help="samples a step with one GPU")
    parser.add_argument("--iteration-s", type=float, default=0.0, help="pace: least time of a step of --batch samples")
    parser.add_argument("--seed", type=int, default=0, help="of the model and its data")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="where checkpoints go, for all nodes to see")
    parser.add_argument("--samples-dir", type=Path, help="write down here which samples were trained")
    parser.add_argument("--out", type=Path, help="JSON file to write at the end (rank 0)")
    return parser.parse_args()


def main() -> None:
    """Train and report."""
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model, ranks = data_parallel(MODELS["mlp"]().to(device_here()))
    log = train(model, options, ranks)
    if ranks[0] == 0:
        text = json.dumps({**where(), "batch": os.environ.get("CADENZA_BATCH", ""), **log.state_dict()})
        print(text)
        if options.out:
            write(options.out, text + "\n")
    if "WORLD_SIZE" in os.environ:
        distributed.destroy_process_group()
        # gloo's threads may abort an interpreter that ends the usual way (pytorch/pytorch#179291).
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
