"""One of two DDP ranks (gloo) on a simulated GPU whose addresses stay: ``staying_ranks.py FOLDER``.

It trains alone and then with an agent, and writes both times' losses and addresses to FOLDER/RANK.json: those of its
parameters, and those at which each step's gradient buckets were reduced, as a captured collective would have them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import simulated_gpu
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from cadenza.sidecar import client

STEPS, WIDTH = 8, 640


def train(*, shared: bool) -> dict[str, Any]:
    """Train from a fixed seed, different data on each rank."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    model = nn.parallel.DistributedDataParallel(layers.to("simulated"), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    buckets: list[list[int]] = []

    def reduced(group: Any, bucket: Any) -> Any:
        buckets[-1].append(bucket.buffer().data_ptr())
        return allreduce_hook(group, bucket)

    # DDP reads annotations of a hook, and takes no text.
    model.register_comm_hook(None, lambda group, bucket: reduced(group, bucket))  # noqa: PLW0108
    torch.manual_seed(100 + distributed.get_rank())
    session = client.attach(model, optimizer, addresses="stay") if shared else None
    losses = []
    for _ in range(STEPS):
        buckets.append([])
        loss = model(torch.randn(8, WIDTH).to("simulated")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if session is not None:
            session.boundary()
        optimizer.zero_grad(set_to_none=False)
    if session is not None:
        client.detach()
    return {"losses": losses, "buckets": buckets, "parameters": [one.data_ptr() for one in model.parameters()]}


def main() -> None:
    """Write this rank's results."""
    torch.set_num_threads(1)
    simulated_gpu.load()
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {"alone": train(shared=False), "shared": train(shared=True)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort at the interpreter's end (client_ddp.py)


if __name__ == "__main__":
    main()
