"""One of two ranks of a DDP job (gloo, CPU): trains alone and sharing, with both bucket settings; prints losses.

With ``--no-code`` it trains once, with gradients as bucket views, and without Cadenza's lines.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn

STEPS = 14


def train(*, view: bool, shared: bool) -> list[float]:
    """Train from a fixed seed, different data on each rank; with ``shared`` as an attached rank."""
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)), gradient_as_bucket_view=view
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + distributed.get_rank())
    if shared:
        from cadenza.sidecar import client  # noqa: PLC0415

        session = client.attach(model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if shared:
            session.boundary(8)
        optimizer.zero_grad(set_to_none=False)
    if shared:
        client.detach()
    return losses


def main() -> None:
    """Print this rank's losses, by setting, as one line of JSON."""
    torch.set_num_threads(1)
    rendezvous = os.environ.get("TEST_RENDEZVOUS")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}" if rendezvous else "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if "--no-code" in sys.argv:
        found = {"True": train(view=True, shared=False)}
    else:
        found = {
            f"{view}{' shared' if shared else ''}": train(view=view, shared=shared)
            for view in (False, True)
            for shared in (False, True)
        }
    Path(sys.argv[1], f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    # Gloo's threads may still let go of Python objects while the interpreter ends, which aborts about every
    # fortieth process (pytorch/pytorch#179291, with or without an attached session).
    os._exit(0)


if __name__ == "__main__":
    main()
