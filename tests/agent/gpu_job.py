"""A job on the simulated GPU, 31 MiB of state: ``gpu_job.py OUT [STEPS]`` writes a line for each boundary.

A line has the moments at which the boundary began and ended, the step, and the loss in hexadecimal.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulated"))

import simulated_gpu
import torch

from cadenza.sidecar import client

torch.set_num_threads(1)
torch.manual_seed(4)
simulated_gpu.load()
model = torch.nn.Sequential(torch.nn.Linear(2048, 1280), torch.nn.ReLU(), torch.nn.Linear(1280, 10)).to("simulated")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
client.attach(model, optimizer)
steps = int(sys.argv[2]) if sys.argv[2:] else 10**9
with Path(sys.argv[1]).open("a", buffering=1) as out:
    for step in range(1, steps + 1):
        inputs, labels = torch.randn(4, 2048).to("simulated"), torch.randint(0, 10, (4,)).to("simulated")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        value = loss.item().hex()
        began = time.monotonic()
        client.boundary()
        print(began, time.monotonic(), step, value, file=out)
