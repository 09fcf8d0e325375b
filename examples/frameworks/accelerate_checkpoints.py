#!/usr/bin/env python3
"""Train under Accelerate with its own ``save_state`` and ``skip_first_batches``, so that Cadenza may move the job.

The lines marked with `# Cadenza` are all that it takes: one saver, and a word about what was loaded. A run that was
moved ends bit for bit as one that was not. ``--checkpoints`` is a directory that all nodes see.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.sidecar import client  # Cadenza

BATCH, ACCUMULATED, EPOCHS = 8, 2, 3


class Progress:
    """Where the training is; Accelerate saves it with the rest."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        vars(self).update(state)


def rest_of_epoch(accelerator: Accelerator, data: DataLoader[Any], done: int) -> Iterator[Any]:
    """Yield the batches of an epoch but the first ``done``; random numbers are as if it had not been begun again."""
    batches = iter(accelerator.skip_first_batches(data, done) if done else data)
    with torch.random.fork_rng([]) if done else contextlib.nullcontext():
        first = next(batches, None)
    if first is not None:
        yield first
        yield from batches


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train from the newest checkpoint on, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps in each of the three epochs")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    options = parser.parse_args(argv)
    set_seed(1)
    inputs = torch.randn(options.steps * BATCH * ACCUMULATED, 16)
    classes = (inputs @ torch.randn(16, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # a step at the end of each epoch
    loader = DataLoader(TensorDataset(inputs, classes), BATCH, shuffle=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATED, step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    def save() -> Path:
        """Save on all ranks; the name says that it is complete."""
        path = options.checkpoints.absolute() / f"step-{progress.step:08d}"
        accelerator.save_state(str(path.with_suffix(".part")))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".part").rename(path)
        accelerator.wait_for_everyone()
        return path

    session = client.attach(model, optimizer)  # Cadenza: after prepare()
    # Cadenza: after the last batch of an epoch the schedule's step is still to come
    session.add_saver(save, lambda place: place.obstacle(at_epoch_end=progress.batch == len(loader)))
    complete = sorted(path for path in options.checkpoints.glob("step-*") if path.suffix != ".part")
    if complete:
        accelerator.load_state(str(complete[-1]))
        session.restored(complete[-1], progress.step)  # Cadenza
    losses = []
    while progress.epoch < EPOCHS:
        loader.set_epoch(progress.epoch)
        for features, labels in rest_of_epoch(accelerator, loader, progress.batch):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            progress.batch += 1
            if accelerator.sync_gradients:
                progress.step += 1
                session.boundary(BATCH * ACCUMULATED)  # Cadenza: once for each optimizer step
        schedule.step()
        progress.epoch, progress.batch = progress.epoch + 1, 0
    values = accelerator.unwrap_model(model).state_dict().items()
    digest = hashlib.sha256(b"".join(bytes(value.flatten().view(torch.uint8).tolist()) for _, value in sorted(values)))
    return {"steps": progress.step, "losses": losses, "parameters_sha256": digest.hexdigest()}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
