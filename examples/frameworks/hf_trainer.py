#!/usr/bin/env python3
"""Train a tiny language model, made from a configuration, with ``transformers.Trainer``: nothing is downloaded.

The lines marked with `# Cadenza` are all that sharing a GPU takes. ``--no-callback`` leaves them out, which is
how a script that knows nothing of Cadenza runs under ``cadenza run -- python hf_trainer.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

BATCH = 4
ACCUMULATED = 2
WORDS = 24
LENGTH = 8


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts in which each word leads to the next one by a fixed rule."""

    def __init__(self, count: int) -> None:
        starts = torch.randint(WORDS, (count, 1))
        self.texts = (starts + torch.arange(LENGTH) * 5) % WORDS

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


class Losses(TrainerCallback):
    """Remembers what the Trainer logs of its losses."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Take a loss of the training or of an evaluation."""
        self.seen += [value for key, value in logs.items() if key in {"loss", "eval_loss"}]


def digest(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer, bit for bit."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()))
    return total.hexdigest()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps in all")
    parser.add_argument("--no-callback", action="store_true", help="run without a line of Cadenza")
    options = parser.parse_args(argv)
    set_seed(1)
    losses = Losses()
    callbacks: list[TrainerCallback] = [losses]
    if not options.no_callback:
        from cadenza.sidecar.client.integrations.transformers import CadenzaTrainerCallback  # noqa: PLC0415  # Cadenza

        callbacks.append(CadenzaTrainerCallback())  # Cadenza
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=BATCH, logging_steps=1, eval_steps=8,
            gradient_accumulation_steps=ACCUMULATED, eval_strategy="steps", save_strategy="no", report_to=[],
            disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-2, seed=1,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Texts(64), eval_dataset=Texts(32), callbacks=callbacks
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {"steps": trainer.state.global_step, "losses": losses.seen, "parameters_sha256": digest(model)}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
