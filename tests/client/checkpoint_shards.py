"""Two ranks with a sharded model (FSDP2 on CPU, gloo) save; two ranks, one plain process and so on restore.

``python checkpoint_shards.py FOLDER`` writes one JSON file a job into the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_jobs import fork, wait
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver  # noqa: F401 - once for all forks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cadenza.sidecar.client.checkpoints import checkpoint
from cadenza.sidecar.client.errors import CheckpointError, UsageError

SAVED_AT, STEPS = 3, 6


def job(*, sharded: bool, background: bool) -> dict[str, Any]:
    """Return a model of an odd size, so that the shards differ, under AdamW, with an average of the weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    average = torch.zeros(7, 4)
    if sharded:
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        average = torch.zeros_like(model[0].weight, requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "own": {"average": average}, "background": background}


def whole(tensor: torch.Tensor) -> list[Any]:
    """Return all values of a tensor."""
    values: list[Any] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().tolist()
    return values


def losses(things: dict[str, Any], steps: int) -> list[float]:
    """Train on the same batch on every rank; return the losses."""
    found = []
    for _ in range(steps):
        loss = things["model"](torch.linspace(-1, 1, 32).view(8, 4)).square().mean()
        loss.backward()
        things["optimizer"].step()
        things["optimizer"].zero_grad()
        things["own"]["average"].lerp_(things["model"][0].weight.detach(), 0.5)
        found.append(loss.item())
    return found


def first_life(place: Path, told: Path, rank: int, size: int, background: bool) -> None:
    """Train, save, and continue training."""
    meet(rank, size, told)
    things = job(sharded=size > 1, background=background)
    before = losses(things, SAVED_AT)
    with checkpoint(place, **things) as keeper:
        keeper.save(SAVED_AT)
        after = losses(things, STEPS - SAVED_AT)
    write(told, rank, {"before": before, "after": after, "average": whole(things["own"]["average"])})


def second_life(place: Path, told: Path, rank: int, size: int) -> None:
    """Restore and continue training."""
    meet(rank, size, told)
    things = job(sharded=size > 1, background=False)
    weight = things["model"][0].weight
    step = checkpoint(place, **things).restore()
    assert things["model"][0].weight is weight
    after = losses(things, STEPS - SAVED_AT)
    write(told, rank, {"step": step, "after": after, "average": whole(things["own"]["average"])})


def one_rank_fails(place: Path, told: Path, rank: int, size: int) -> None:
    """Fail on both ranks because rank 1 has state that cannot be saved, and then a model of another shape."""
    meet(rank, size, told)
    messages = []
    for things in ({"own": {"odd": {"set": {1} if rank else 1}}}, {"model": nn.Linear(2, 2 + rank)}):
        try:
            checkpoint(place / "failed", **things).save(1)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001
            messages.append([type(error).__name__, str(error)])
    try:
        things = job(sharded=True, background=False)
        checkpoint(place / "failed", own={"values": {"deep": [things["model"][0].weight]}}).save(1)
    except UsageError as error:
        messages.append([type(error).__name__, str(error)])
    try:
        things = job(sharded=True, background=False)
        things["own"]["average"] = torch.zeros(7, 4 + rank)
        checkpoint(place, **things).restore()
    except CheckpointError as error:
        messages.append([type(error).__name__, str(error)])
    write(told, rank, {"messages": messages, "left": (place / "failed").exists()})


def meet(rank: int, size: int, told: Path) -> None:
    """Join the other ranks, if there are any."""
    if size > 1:
        meeting = told.with_name(told.name + ".meeting")
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)


def write(told: Path, rank: int, found: dict[str, Any]) -> None:
    """Write a rank's record."""
    told.with_name(f"{told.name}.{rank}").write_text(json.dumps(found))


def main() -> None:
    """Run all jobs."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)

    def run(name: str, life: Any, place: str, size: int, *more: object) -> None:
        codes = wait(*(fork(life, folder / place, folder / name, rank, size, *more) for rank in range(size)))
        assert set(codes) == {0}, (name, codes)

    run("saved", first_life, "sharded", 2, False)
    run("background", first_life, "background", 2, True)
    run("alone", first_life, "plain", 1, False)
    run("two", second_life, "sharded", 2)
    run("two-background", second_life, "background", 2)
    run("three", second_life, "sharded", 3)
    run("one", second_life, "sharded", 1)
    run("from-plain", second_life, "plain", 2)
    run("failing", one_rank_fails, "sharded", 2)


if __name__ == "__main__":
    main()
