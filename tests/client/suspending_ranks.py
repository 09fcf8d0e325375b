"""One of two ranks whose process groups can be suspended: ``suspending_ranks.py FOLDER FAULT``.

The groups are gloo's with NCCL's way to suspend: all ranks wait for each other, without a limit. What happens is
written as JSON to FOLDER/RANK.json, in its order. FAULT: on_yield, move or room fails on rank 1 at the first stop.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import ProcessGroupGloo

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import MoveError
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.session import communicators

STEPS = 6
folder, fault, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
events: list[str] = []
groups: list[Any] = []
"""They must not go: C++ has no hold on the objects of Python."""
model = torch.nn.Linear(64, 64)


def here() -> str:
    return "state here" if model.weight.untyped_storage().nbytes() else "state away"


class Suspending(ProcessGroupGloo):
    """A group of gloo that meets in the store to suspend and to resume."""

    def __init__(self, store: Any, number: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, number, size, timeout=timeout)
        self._store, self._size, self._meetings = store, size, 0
        self.name, self.full = f"group {len(groups)}", fault == "room" and rank == 1
        groups.append(self)

    def suspend(self) -> None:
        self._meet()
        events.append(f"suspend {self.name}, {here()}")

    def resume(self) -> None:
        if self.full:
            self.full = False
            raise RuntimeError("out of memory")
        self._meet()
        events.append(f"resume {self.name}, {here()}")

    def _meet(self) -> None:
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        if self._store.add(f"{key}/ranks", 1) == self._size:
            self._store.set(f"{key}/all", "")
        self._store.wait([f"{key}/all"], timedelta(seconds=60))


def fail_once(what: str) -> bool:
    """Return True at the first call of a fault that this run has."""
    hit = fault == what and rank == 1 and f"{what} fails" not in events
    if hit:
        events.append(f"{what} fails")
    return hit


def on_yield() -> None:
    if fail_once("on_yield"):
        raise ValueError("no")
    events.append("on_yield")


def main() -> None:
    torch.set_num_threads(1)
    communicators.BACKENDS["suspending"] = "cpu"
    communicators.RETRY_S = 0.01
    if fault == "on_yield":
        communicators.AGREE_NS = 300_000_000
    original = Offload.offload

    def offload(self: Offload, segments: Any) -> Any:
        if fail_once("move"):
            raise MoveError("no")
        return original(self, segments)

    Offload.offload = offload  # type: ignore[method-assign]
    distributed.Backend.register_backend("suspending", Suspending, devices=["cpu"])
    distributed.init_process_group("suspending", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    distributed.new_group([0, 1], backend="gloo")
    group = distributed.new_group([0, 1], backend="suspending")
    session = client.attach(model)
    session.call(on_yield=on_yield, on_resume=lambda: events.append(f"on_resume, {here()}"))
    for _ in range(STEPS):
        total = torch.ones(1)
        distributed.all_reduce(total)
        distributed.all_reduce(total, group=group)
        assert total.item() == 4
        session.boundary()
    (folder / f"{rank}.json").write_text(json.dumps(events))
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
