"""One of two ranks (gloo): each of the benchmark's jobs for several ranks, alone and sharing; writes both as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

import offload_jobs
import torch
from torch import distributed

from cadenza.sidecar import client


def train(name: str, steps: int, *, shared: bool) -> list[str]:
    """Train from a fixed seed; return losses and the final state, bit by bit."""
    torch.manual_seed(4)
    job = offload_jobs.RANKED[name](offload_jobs.Place(torch.device("cpu"), 0.06))
    if shared:
        client.attach(*(thing for _, thing in job.sources))
    found = []
    for _ in range(steps):
        found.append(job.step().item().hex())
        client.boundary()
    client.detach()
    return [*found, offload_jobs.digest(job)]


def main() -> None:
    """Write each job's results of training alone and sharing to a folder."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {name: [train(name, steps, shared=False), train(name, steps, shared=True)] for name in offload_jobs.RANKED}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
