#!/usr/bin/env python3
"""Train with checkpoints of torch.distributed.checkpoint (DCP), as torchtitan does, so that Cadenza may move the job.

The lines marked with `# Cadenza` are all that it takes: one saver, and a word about what was loaded. A run that was
moved ends bit for bit as one that was not. Runs alone, or on several ranks with FSDP2 under ``torchrun``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from cadenza.sidecar import client  # Cadenza

BATCH, WIDTH = 8, 16


class TrainState(Stateful):
    """All that a run is made of; DCP asks for it when it saves, and gives it back when it loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """Return model and optimizer, sharded as they are, the step, and the random numbers."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        others = {"step": torch.tensor(self.step), "random": torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, **others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.step = int(state["step"])
        torch.set_rng_state(state["random"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train from the newest checkpoint on, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps in all")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="all nodes see it")
    options = parser.parse_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        fully_shard(model, mesh=distributed.init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainState(model, optimizer)

    def save() -> Path:
        """Save on all ranks; the name says that it is complete."""
        path = options.checkpoints.absolute() / f"step-{state.step:08d}"
        part = path.with_suffix(".part")
        dcp.save({"train": state}, checkpoint_id=part, no_dist=ranks == 1)
        if ranks == 1 or distributed.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            part.rename(path)
        return path

    session = client.attach(model, optimizer)  # Cadenza: after fully_shard()
    session.add_saver(save)  # Cadenza
    complete = sorted(path for path in options.checkpoints.glob("step-*") if path.suffix != ".part")
    if complete:
        dcp.load({"train": state}, checkpoint_id=complete[-1], no_dist=ranks == 1)
        session.restored(complete[-1], state.step)  # Cadenza
    losses = []
    while state.step < options.steps:
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(state.step))  # a position in the data
        loss = nn.functional.cross_entropy(model(batch), (batch.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        state.step += 1
        session.boundary(BATCH)  # Cadenza
    values = sorted(get_state_dict(model, optimizer)[0].items())
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for _, value in values]
    digest = hashlib.sha256(b"".join(bytes(value.flatten().view(torch.uint8).tolist()) for value in whole))
    return {"steps": state.step, "losses": losses, "parameters_sha256": digest.hexdigest()}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
