"""Saved state comes back in place, exactly, and only where it fits."""

from __future__ import annotations

import collections
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadenza.sidecar.client import rng_state
from cadenza.sidecar.client.checkpoints import CheckpointError, MismatchError, ResumableSampler, checkpoint, files
from cadenza.sidecar.client.errors import UsageError


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step, so that there is optimizer state."""
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_objects_stay_the_same_ones(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    trained(model, optimizer)
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer)
    keeper.save(1)
    objects = {
        "weight": model[0].weight,
        "buffer": model[1].running_mean,
        "groups": optimizer.param_groups,
        "group": optimizer.param_groups[0],
        "params": optimizer.param_groups[0]["params"],
        "rate": rate,
        "momentum": optimizer.state[model[0].weight]["momentum_buffer"],
        "state": optimizer.state,
    }
    before = [tensor.clone() for tensor in model.state_dict().values()]
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    trained(model, optimizer)
    rate.fill_(0.5)
    optimizer.param_groups[0]["added"] = True
    assert keeper.restore() == 1
    assert model[0].weight is objects["weight"]
    assert model[1].running_mean is objects["buffer"]
    assert optimizer.param_groups is objects["groups"]
    assert optimizer.param_groups[0] is objects["group"]
    assert optimizer.param_groups[0]["params"] is objects["params"]
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.state is objects["state"]
    assert optimizer.state[model[0].weight]["momentum_buffer"] is objects["momentum"]
    assert "added" not in optimizer.param_groups[0]
    assert rate.item() == pytest.approx(0.1)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)
    trained(model, optimizer)


def test_nothing_restored_holds_the_file(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    values: dict[str, Any] = {"table": torch.arange(5.0), "list": [torch.ones(2)]}
    trained(model, optimizer)
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer, own={"values": values})
    keeper.save(1)
    keeper.restore()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_what_is_inside_a_mapping_stays_the_same_too(tmp_path: Path) -> None:
    """The script holds it by names of its own, and a defaultdict has to stay one."""
    losses, seen, mean = [3.0], collections.defaultdict(list, {1: [2]}), torch.ones(2)
    shared = torch.zeros(1)
    log: dict[str, Any] = {"losses": losses, "inner": {"seen": seen}, "mean": mean, "best": shared, "last": shared}
    keeper = checkpoint(tmp_path, own={"log": log})
    log["last"] = torch.ones(1)
    keeper.save(1)
    losses[:], log["last"] = [1.0, 2.0], shared
    seen[5].append(7)
    mean.zero_()
    keeper.restore()
    assert (losses, dict(seen), mean.tolist()) == ([3.0], {1: [2]}, [1.0, 1.0])
    assert log["losses"] is losses
    assert log["inner"]["seen"] is seen
    assert [log["best"].item(), log["last"].item()] == [0.0, 1.0], "one object for two of them is none for both"


def test_the_order_of_parameters_may_be_another_one(tmp_path: Path) -> None:
    """A script that collects their names in a set has another order in each process, and equal shapes."""
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    given = dict(model.named_parameters())

    def made(names: list[str]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [given[name] for name in names]}])

    first = made(["0.weight", "1.weight", "2.bias"])
    for number, name in enumerate(["0.weight", "1.weight", "2.bias"]):
        given[name].grad = torch.full_like(given[name], float(number))
    first.step()
    checkpoint(tmp_path, model=model, optimizer=first).save(1)
    other = made(["2.bias", "1.weight", "0.weight"])
    checkpoint(tmp_path, model=model, optimizer=other).restore()
    for name in ("0.weight", "1.weight", "2.bias"):
        assert torch.equal(other.state[given[name]]["exp_avg"], first.state[given[name]]["exp_avg"])


@pytest.mark.parametrize("job", ["7", "8"])
def test_what_a_job_has_unfrozen_stays_so_in_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """``if epoch == 2: unfreeze()`` is passed only once."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    checkpoint(tmp_path, model=model).save(1)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    again = nn.Linear(2, 2)
    checkpoint(tmp_path, model=again).restore(adopt=True)
    assert again.bias.requires_grad is (job == "8"), "another job decides by itself"


@pytest.mark.parametrize("what", ["a group", "a layer", "data", "nothing"])
def test_what_has_outgrown_its_start_is_not_ordered(tmp_path: Path, what: str) -> None:
    """The next start restores before it comes to the place where the script adds it."""
    model, more, data = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), [*range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer, sampler=ResumableSampler(data))
    keeper.restore()
    keeper.at(1)
    if what == "a group":
        optimizer.add_param_group({"params": more.parameters()})
    elif what == "a layer":
        model.append(more)
    elif what == "data":
        data.append(8)
    if what == "nothing":
        keeper._save_on_request()
        return
    with pytest.raises(CheckpointError, match="has grown or changed since restore"):
        keeper._save_on_request()
    assert not keeper._registration.ready
    keeper.save(2)


def test_tied_weights_and_views_are_written_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    part = torch.zeros(1000, 1000)[:2, :2]
    for background in (False, True):
        place = tmp_path / str(background)
        with checkpoint(place, model=model, own=[part], background=background) as keeper:
            keeper.save(1)
        assert 256 * 256 * 4 < (place / "step-00000001" / "shared.pt").stat().st_size < 1.1 * 256 * 256 * 4


def test_float32_moments_of_bfloat16_parameters_stay_exact(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moment = torch.randn(4, 4)
    optimizer.state[model.weight]["momentum_buffer"] = moment.clone()
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer)
    keeper.save(1)
    optimizer.state.clear()
    keeper.restore()
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], moment)


def test_lists_of_tensors_in_an_optimizers_state(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.eye(4)) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer)
    keeper.save(1)
    expected = [optimizer.step(closure).item() for _ in range(3)]
    keeper.restore()
    assert [optimizer.step(closure).item() for _ in range(3)] == expected


def test_several_of_a_kind_and_ones_own(tmp_path: Path) -> None:
    def things() -> dict[str, Any]:
        models = [nn.Linear(4, 4), nn.Linear(4, 4)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.5, total_steps=9)
        own = {"best": {"loss": float("inf")}, "clock": torch.zeros((), dtype=torch.int64), "inner": nn.Linear(2, 2)}
        return {"model": models, "optimizer": optimizers, "scheduler": (plateau, cycle), "own": own}

    old = things()
    for loss in (np.float32(3.0), np.float64(4.0)):
        old["scheduler"][0].step(loss)
        old["optimizer"][1].step()
        old["scheduler"][1].step()
    old["own"]["best"]["loss"] = np.float32(2.5)
    old["own"]["clock"].fill_(7)
    checkpoint(tmp_path, **old).save(4)
    new = things()
    best, clock = new["own"]["best"], new["own"]["clock"]
    assert checkpoint(tmp_path, **new).restore() == 4
    assert best == {"loss": 2.5}
    assert clock.item() == 7
    assert new["scheduler"][0].best == 3.0
    assert [o.param_groups[0]["lr"] for o in new["optimizer"]] == [o.param_groups[0]["lr"] for o in old["optimizer"]]
    assert torch.equal(new["model"][1].weight, old["model"][1].weight)
    assert torch.equal(new["own"]["inner"].weight, old["own"]["inner"].weight)


class Odd:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2}]}, r"own\['odd'\].state.a\[1\] is a set, which cannot be restored without running code"),
        ({"a": np.zeros(2)}, r"own\['odd'\].state.a is a ndarray"),
        ({"a": torch.eye(3).to_sparse()}, r"own\['odd'\].state.a is a tensor of a kind that cannot be saved"),
        ({"a": lambda: 0}, r"own\['odd'\].state.a is a function"),
    ],
)
def test_state_that_could_not_be_restored_is_refused_when_saving(tmp_path: Path, state: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint(tmp_path, own={"odd": Odd(state)}).save(1)
    assert not list(tmp_path.iterdir())


def mismatches() -> list[Any]:
    def of(old: dict[str, Any], new: dict[str, Any], message: str, name: str) -> Any:
        return pytest.param(old, new, message, id=name)

    def sgd(*models: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model.parameters()} for model in models])

    one, wide, half = nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(4, 4, dtype=torch.float16)
    bare = nn.Linear(4, 4, bias=False)
    step = torch.optim.lr_scheduler.StepLR(sgd(one), 3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd(one), 3)
    adam = torch.optim.Adam(one.parameters())
    off = torch.amp.GradScaler("cpu", enabled=False)
    on = torch.amp.GradScaler("cpu")
    return [
        of({"model": one}, {"model": wide}, r"model: weight: the checkpoint has shape \[4, 4\].*\[5, 4\]", "shape"),
        of({"model": one}, {"model": half}, "model: .*: .* of torch.float32, this job .* of torch.float16", "dtype"),
        of({"model": one}, {"model": bare}, "model: .* this job lacks bias", "less"),
        of({"model": bare}, {"model": one}, "model: .* it lacks bias", "more"),
        of({"optimizer": sgd(one)}, {"optimizer": adam}, "a SGD, this job a Adam", "kind"),
        of({"optimizer": sgd(one)}, {"optimizer": sgd(wide)}, r"group 0, parameter 0: .*\[4, 4\].*\[5, 4\]", "state"),
        of({"optimizer": sgd(one)}, {"optimizer": sgd(one, wide)}, r"groups of \[2\] .* \[2, 2\]", "groups"),
        of({"scheduler": step}, {"scheduler": cosine}, "scheduler: .* a StepLR, this job a Cosine", "scheduler"),
        of({"scaler": on}, {"scaler": off}, "scaler: it is enabled in one", "scaler"),
        of({"model": one}, {"own": {"x": one}}, r"own\['x'\]: is not in .*step-00000001, which has model", "missing"),
        of({"own": [torch.ones(2)]}, {"own": [torch.ones(3)]}, r"own\[0\]: .* \[2\] .* \[3\]", "own"),
    ]


@pytest.mark.parametrize(("old", "new", "message"), mismatches())
def test_what_does_not_fit_is_named_and_nothing_changes(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], message: str
) -> None:
    first = nn.Linear(2, 2)
    checkpoint(tmp_path, **{"own": {"first": first}, **old}).save(1)
    nn.init.zeros_(first.weight)
    random_before = torch.get_rng_state()
    with pytest.raises(MismatchError, match=message):
        checkpoint(tmp_path, **{"own": {"first": first}, **new}).restore()
    assert bool((first.weight == 0).all())
    assert torch.equal(torch.get_rng_state(), random_before)


def test_a_background_save_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with checkpoint(tmp_path, model=model, optimizer=optimizer, background=True) as keeper:
        for step in range(1, 5):
            nn.init.constant_(model.weight, float(step))
            keeper.save(step)
            nn.init.constant_(model.weight, -1.0)
    for step in (4, 3):
        assert checkpoint(tmp_path, model=model).restore() == step
        assert bool((model.weight == float(step)).all())
        (tmp_path / f"step-0000000{step}" / "complete.json").unlink()


def test_wrappers_have_no_part_in_the_names(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    checkpoint(tmp_path, model=torch.compile(nn.DataParallel(model))).save(1)
    other = nn.Linear(4, 4)
    assert checkpoint(tmp_path, model=other).restore() == 1
    assert torch.equal(other.weight, model.weight)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    keeper = checkpoint(tmp_path)
    random.gauss(0, 1)  # draws two and keeps one for later
    np.random.standard_normal()  # noqa: NPY002
    keeper.save(1)

    def draw() -> list[float]:
        return [random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).sum().item(), random.random()]  # noqa: S311, NPY002

    expected = draw()
    draw()
    keeper.restore()
    assert draw() == expected


def test_new_ranks_get_numbers_of_their_own() -> None:
    told = rng_state.capture()
    drawn = []
    for step, rank in ((5, 2), (5, 3), (6, 2), (5, 2)):
        rng_state.seed_new_rank(told, step, rank)
        drawn.append((random.random(), float(np.random.rand()), torch.rand(1).item()))  # noqa: S311, NPY002
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


def test_importing_the_client_takes_no_torch() -> None:
    code = "import sys; from cadenza.sidecar import client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("size", [0, 1, 3, 4096, (1 << 20) + 7, 5_000_001])
def test_sums_made_beside_the_write_and_in_two_halves_are_those_of_zlib(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)  # noqa: S311
    written = files.write_new(tmp_path / "file", lambda sink: [sink.write(data[:9]), sink.write(data[9:])])
    assert written == files.entry_of(tmp_path / "file") == files.Entry(size, zlib.crc32(data))
