"""One of two ranks whose process groups can be suspended: ``suspending_ranks.py FOLDER``.

The groups are gloo's with NCCL's way to suspend: all ranks wait for each other, without a limit. What happens at each
stop is written as JSON to FOLDER/RANK.json, in its order. The stops come after the steps of FAULTS, and there rank 1
has no room at the resume, cannot move, fails in on_yield, or has a suspend that raises and is complete later. Then
both begin a second session, whose steps count from 0 again, and in which rank 0 alone is stopped.
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

FAULTS = {2: "", 4: "room", 6: "move", 8: "on_yield", 10: "suspend"}
SECOND = 100
"""What the second session's steps count from in the events."""
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
events: dict[int, list[str]] = {}
"""By step."""
groups: list[Any] = []
"""They must not go: C++ has no hold on the objects of Python."""
model = torch.nn.Linear(64, 64)
session, first_step = client.attach(model), 0


def note(text: str) -> None:
    """Write an event of the present stop down."""
    events.setdefault(first_step + session.step, []).append(text)


def fails(what: str) -> bool:
    """Return True at the first call of a fault that this stop has."""
    text = f"{what} fails"
    step = first_step + session.step
    hit = rank == 1 and FAULTS.get(step) == what and text not in events.get(step, [])
    if hit:
        note(text)
    return hit


def here() -> str:
    return "state here" if model.weight.untyped_storage().nbytes() else "state away"


class Suspending(ProcessGroupGloo):
    """A group of gloo that meets in the store to suspend and to resume."""

    def __init__(self, store: Any, number: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, number, size, timeout=timeout)
        self._store, self._size, self._meetings = store, size, 0
        self._suspended, self._looks = 0, 0
        self.name = f"group {len(groups)}"
        groups.append(self)

    def suspend(self) -> None:
        self._meet()
        note(f"suspend {self.name}, {here()}")
        self._suspended, self._looks = 1, 0
        if fails("suspend"):
            self._looks = 3
            raise RuntimeError("NCCL operation in progress")

    def resume(self) -> None:
        if fails("room"):
            raise RuntimeError("out of memory")
        assert self._suspended
        self._meet()
        self._suspended = 0
        note(f"resume {self.name}, {here()}")

    def memory_stats(self) -> dict[str, int]:
        """Some looks after a suspend that has raised it is complete."""
        self._looks -= 1
        return {"suspend": 3 << 20, "suspended": self._suspended if self._looks < 0 else 0, "total": 9 << 20}

    def _meet(self) -> None:
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        if self._store.add(f"{key}/ranks", 1) == self._size:
            self._store.set(f"{key}/all", "")
        self._store.wait([f"{key}/all"], timedelta(seconds=60))


def on_yield() -> None:
    if fails("on_yield"):
        raise ValueError("no")
    note("on_yield")


def main() -> None:
    global session, first_step
    torch.set_num_threads(1)
    communicators.BACKENDS["suspending"] = "cpu"
    communicators.RETRY_S = 0.01
    communicators.AGREE_NS = 1_000_000_000
    original = Offload.offload

    def offload(self: Offload, segments: Any) -> Any:
        if fails("move"):
            raise MoveError("no")
        return original(self, segments)

    Offload.offload = offload  # type: ignore[method-assign]
    distributed.Backend.register_backend("suspending", Suspending, devices=["cpu"])
    distributed.init_process_group("suspending", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    distributed.new_group([0, 1], backend="gloo")
    group = distributed.new_group([0, 1], backend="suspending")
    session.call(on_yield=on_yield, on_resume=lambda: note(f"on_resume, {here()}"))

    def train(steps: int) -> None:
        for _ in range(steps):
            total = torch.ones(1)
            distributed.all_reduce(total)
            distributed.all_reduce(total, group=group)
            assert total.item() == 4
            session.boundary()

    train(max(FAULTS) + 2)
    client.detach()
    session, first_step = client.attach(model), SECOND
    session.call(on_yield=on_yield, on_resume=lambda: note(f"on_resume, {here()}"))
    train(4)
    (folder / f"{rank}.json").write_text(json.dumps(events))
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
