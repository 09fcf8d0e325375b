"""A real client that keeps checkpoints in a directory which fills up; run as a child process.

Saves step 1, trains until the file ``END`` is there, and prints how many steps it made and what a restore finds.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from cadenza.sidecar import client

PLACE, END, LIMIT = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
nap = threading.Event()


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Linear(1 << 20, 1, bias=False)  # 4 MB
    keeper = client.checkpoint(PLACE, model=model)
    session = client.attach(model)
    while not END.exists():
        nn.init.constant_(model.weight, float(session.step + 1))
        if session.step == 0:
            keeper.save(1)
            if LIMIT:
                resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        keeper.at(session.step + 1)
        session.boundary()
        nap.wait(0.01)
    steps, restored = session.step, keeper.restore()
    print(json.dumps({"steps": steps, "restored": restored, "weight": model.weight[0, 0].item()}))


main()
