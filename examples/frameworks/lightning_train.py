#!/usr/bin/env python3
"""Train a small LightningModule on generated data, with accumulation, an averaged copy and validation.

The lines marked with `# Cadenza` are all that sharing a GPU takes. ``--no-callback`` leaves them out, which is
how a script that knows nothing of Cadenza runs under ``cadenza run -- python lightning_train.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
ACCUMULATED = 2
EPOCHS = 2


class Net(LightningModule):
    """A classifier with dropout and batch normalization that remembers its losses, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        )  # fmt: skip
        self.losses: list[str] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.losses.append(loss.item().hex())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Remember the validation's losses as well."""
        self.losses.append(nn.functional.cross_entropy(self.body(batch[0]), batch[1]).item().hex())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(samples: int, *, shuffle: bool) -> DataLoader[Any]:
    """Return inputs, and the classes that a fixed random teacher gives them."""
    inputs = torch.randn(samples, 16)
    return DataLoader(TensorDataset(inputs, (inputs @ torch.randn(16, 4)).argmax(1)), batch_size=BATCH, shuffle=shuffle)


def digest(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer, bit for bit."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()))
    return total.hexdigest()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="optimizer steps in all")
    parser.add_argument("--no-callback", action="store_true", help="run without a line of Cadenza")
    options = parser.parse_args(argv)
    seed_everything(1, verbose=False)
    callbacks: list[Callback] = [EMAWeightAveraging(decay=0.9)]
    if not options.no_callback:
        from cadenza.sidecar.client.integrations.lightning import CadenzaCallback  # noqa: PLC0415  # Cadenza

        callbacks.append(CadenzaCallback())  # Cadenza
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    net = Net()
    trainer = Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATED, callbacks=callbacks, devices=1,
        enable_model_summary=False, log_every_n_steps=1000, **quiet,
    )  # fmt: skip
    samples = options.steps * BATCH * ACCUMULATED // EPOCHS
    trainer.fit(net, loader(samples, shuffle=True), loader(6 * BATCH, shuffle=False))
    return {"steps": trainer.global_step, "losses": net.losses, "parameters_sha256": digest(net)}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
