"""One of two ranks of a gloo group that trains with an accumulation; run as a child process.

``PLACE`` gets a file for each checkpoint. Every fourth boundary follows a step; ``one``: rank 1 passes every other one
of these, too; ``never``: gradients are pending at each boundary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed, nn

from cadenza.sidecar import client

MEETING, PLACE, KIND, RANK = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{MEETING}", rank=RANK, world_size=2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = client.attach(model, optimizer)

    def save() -> Path:
        path = PLACE / f"{session.step}.{RANK}"
        path.touch()
        return path

    passes = KIND == "one" and RANK == 1
    session.add_saver(save, lambda place: place.obstacle(at_epoch_end=passes and session.step % 8 == 0))
    while not (PLACE / "END").exists():
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        if session.step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if KIND == "never":
            model(torch.ones(1, 2)).sum().backward()
        client.boundary()
        if session.step == 1:
            PLACE.with_name(f"up.{RANK}").touch()


main()
