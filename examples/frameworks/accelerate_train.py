#!/usr/bin/env python3
"""Train a small model with a loop of one's own under Accelerate, with accumulation and a schedule.

The three lines marked with `# Cadenza` are all that sharing a GPU takes. ``--no-attach`` leaves them out, which is
how a script that knows nothing of Cadenza runs under ``cadenza run -- python accelerate_train.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
ACCUMULATED = 2


def digest(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer, bit for bit."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()))
    return total.hexdigest()


def train(options: argparse.Namespace, accelerator: Accelerator, model: nn.Module, data: DataLoader[Any]) -> list[str]:
    """Train one epoch; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    if not options.no_attach:
        from cadenza.sidecar import client  # noqa: PLC0415  # Cadenza

        client.attach(model, optimizer)  # Cadenza: after prepare(); the scaler is in the prepared optimizer
    for inputs, classes in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        if accelerator.sync_gradients and not options.no_attach:
            client.boundary(BATCH * ACCUMULATED)  # Cadenza: once for each optimizer step
    return losses


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64, help="optimizer steps in all")
    parser.add_argument("--no-attach", action="store_true", help="run without a line of Cadenza")
    options = parser.parse_args(argv)
    set_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    inputs = torch.randn(options.steps * BATCH * ACCUMULATED, 16)
    classes = (inputs @ torch.randn(16, 4)).argmax(1)
    losses = train(options, accelerator, model, DataLoader(TensorDataset(inputs, classes), BATCH, shuffle=True))
    return {"steps": len(losses) // ACCUMULATED, "losses": losses, "parameters_sha256": digest(model)}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
