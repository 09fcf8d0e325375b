"""A training job that is bound by the CPUs of its loader: prints each step's time, loss and number of workers.

It ends after ``--steps`` steps, or when its standard input ends.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch

from cadenza.sidecar import client
from cadenza.sidecar.client.data import ElasticDataLoader

torch.set_num_threads(1)


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Items that take CPU time to make and come out the same wherever they are made."""

    def __init__(self, work: int) -> None:
        self.work = work

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(8)
        value = index
        for _ in range(self.work):
            value = (value * 1_103_515_245 + 12_345) % 2**31
        return noise + value / 2**31


def train(steps: int, work: int, out: Path) -> None:
    """Train until told to stop."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = client.attach(model, optimizer)
    loader = ElasticDataLoader(Pictures(work), batch_size=4, shuffle=True, workers=round)
    told = threading.Event()
    if not steps:
        threading.Thread(target=lambda: (os.read(0, 1), told.set()), daemon=True).start()
    with out.open("w", buffering=1) as lines:
        for step, batch in enumerate(loader, 1):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.boundary(4)
            print(step, time.monotonic(), float(loss.detach()).hex(), loader.num_workers, file=lines)
            if told.is_set() or step == steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--work", type=int, default=20_000)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    train(options.steps, options.work, options.out)
