"""A job on the simulated GPU, 31 MiB of state: ``gpu_job.py OUT`` writes a line for each boundary.

A line has the moments at which the boundary began and ended, the step, and the loss in hexadecimal. ``--hidden`` makes
the state larger or smaller; ``--kept`` MiB of GPU memory are given to nothing and stay at each yield. It keeps
checkpoints in the directory ``--checkpoints``. On a full GPU it tries ``--retries`` times before it tells the agent.

``--wrap ddp`` or ``fsdp``: one of several ranks, by the environment of Slurm, which meet in the file ``--meeting``
(gloo). ``--nccl`` MiB beside torch's stand for NCCL's buffers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulated"))

import simulated_gpu
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cadenza.sidecar import client
from cadenza.sidecar.client.session import job_session

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--hidden", type=int, default=1280)
parser.add_argument("--kept", type=int, default=0)
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--wrap", choices=["ddp", "fsdp"])
parser.add_argument("--meeting", type=Path)
parser.add_argument("--nccl", type=int, default=0)
parser.add_argument("--retries", type=int, default=job_session.RESTORE_RETRIES)
options = parser.parse_args()
job_session.RESTORE_RETRIES = options.retries
torch.set_num_threads(1)
torch.manual_seed(4)
simulated_gpu.load()
kept = torch.empty(options.kept << 20, dtype=torch.uint8, device="simulated")
layers = (torch.nn.Linear(2048, options.hidden), torch.nn.ReLU(), torch.nn.Linear(options.hidden, 10))
model = torch.nn.Sequential(*layers).to("simulated")
if options.wrap:
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    torch.distributed.init_process_group("gloo", init_method=options.meeting.as_uri(), rank=rank, world_size=world)
if options.wrap == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
if options.wrap == "fsdp":
    mesh = init_device_mesh("simulated", (world,))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
gpu = simulated_gpu.open_file(Path(os.environ["SIMULATED_GPUS"]))
next(owner for owner in gpu.owners if owner.pid == os.getpid()).bytes += options.nccl << 20
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
client.attach(model, optimizer)
keeper = client.checkpoint(options.checkpoints, model=model) if options.checkpoints else None
with options.out.open("a", buffering=1) as out:
    for step in range(1, options.steps + 1):
        inputs, labels = torch.randn(4, 2048).to("simulated"), torch.randint(0, 10, (4,)).to("simulated")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        value = loss.item().hex()
        began = time.monotonic()
        if keeper is not None:
            keeper.at(step)
        client.boundary()
        print(began, time.monotonic(), step, value, file=out)
