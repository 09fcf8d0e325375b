"""A training script without Cadenza: two optimizers, accumulation, a scheduler; prints its losses."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

STEPS = 20


def train() -> list[float]:
    """Train a generator and a critic for STEPS of the first one's steps."""
    torch.manual_seed(5)
    first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    slow, fast = torch.optim.AdamW(first.parameters(), lr=1e-2), torch.optim.SGD(second.parameters(), 1e-3, 0.9)
    schedule = torch.optim.lr_scheduler.StepLR(slow, 5, 0.5)
    losses = []
    for _ in range(STEPS):
        for _ in range(3):  # accumulation, and two steps of the other optimizer for one of the first
            loss = (second(first(torch.randn(6, 8))) - 1).square().mean()
            loss.backward()
        slow.step()
        for _ in range(2):
            fast.step()
        slow.zero_grad()
        fast.zero_grad(set_to_none=False)
        schedule.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(train()))
