#!/usr/bin/env python3
"""Train a small transformer on text: a batch is looked up, not computed, so a fraction of a CPU serves it.

    cadenza profile run -- python text.py

Without a GPU a step takes at least ``--device-ms``, as if one computed during that time.
"""

from __future__ import annotations

import argparse

import torch
from pace import DEVICE, Device, forever, step, workers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.sidecar import client

WORDS = 64
LENGTH = 16
TEXTS = 4096
BATCH = 16
WIDTH = 32


class Classifier(nn.Module):
    """Embedding, one encoder layer, and a classifier on the mean over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, text: Tensor) -> Tensor:
        """Return one row of class scores for each text."""
        return torch.as_tensor(self.head(self.body(self.words(text)).mean(dim=1)))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-ms", type=float, default=40.0, help="least time of a step without a GPU")
    parser.add_argument("--busy", type=float, default=1.0, help="part of it in which the stand-in for a GPU computes")
    parser.add_argument("--iterations", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = TensorDataset(torch.randint(WORDS, (TEXTS, LENGTH)), torch.randint(10, (TEXTS,)))
    model = Classifier().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = client.attach(model, optimizer)
    loader = DataLoader(texts, BATCH, shuffle=True, num_workers=workers(), persistent_workers=True)
    for _, batch in zip(range(options.iterations), session.timed(forever(loader)), strict=False):
        step(model, optimizer, batch, Device(options.device_ms / 1000, options.busy))
        session.boundary(len(batch[0]))


if __name__ == "__main__":
    main()
