"""A rank that sees two GPUs, uses the second and never chose one: ``second_gpu_rank.py``, with an agent to stop it."""

from __future__ import annotations

import threading

import simulated_gpu
import torch

from cadenza.sidecar import client


def main() -> None:
    """Train until the agent has stopped it once."""
    simulated_gpu.load()
    tensor = torch.zeros(8 << 20, dtype=torch.uint8, device="simulated:1")
    peak = torch.zeros(4 << 20, dtype=torch.uint8, device="simulated:1")
    del peak
    session = client.attach(tensors=[tensor])
    for thread in threading.enumerate():
        if thread.name == "cadenza-pinning":  # the agent's side lets the next pinning fail
            thread.join()
    for _ in range(3):
        tensor.add_(1)
        session.boundary()
    assert int(tensor.cpu().max()) == int(tensor.cpu().min()) == 3
    client.detach()


if __name__ == "__main__":
    main()
