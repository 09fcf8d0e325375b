"""Objects that are not torch's own come back by their own methods, or are named before the job can be moved."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from cadenza.sidecar import client
from cadenza.sidecar.client import checkpoints
from cadenza.sidecar.client.checkpoints import MismatchError, checkpoint, parts, round_trip
from cadenza.sidecar.client.errors import UsageError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process outside Slurm, and without a session at the end."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield
    client.detach()


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, whose groups and state are its own, and keeps slow weights beside them."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]
        self.count = 0
        self.defaults = base.defaults

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def step(self, closure: Any = None) -> None:
        del closure
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.base.param_groups, self.slow, strict=True):
                for param, kept in zip(group["params"], slow, strict=True):
                    kept.lerp_(param.detach(), 0.5)
                    param.data.copy_(kept)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.slow, self.count = state["slow"], state["count"]


class Flat(torch.optim.Optimizer):
    """Keeps its moments in attributes, and its state dict has them in a form of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.moments = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        del closure
        params = [p for group in self.param_groups for p in group["params"]]
        for param, moment in zip(params, self.moments, strict=True):
            moment.mul_(0.9).add_(param.grad)
            param.data.sub_(moment, alpha=self.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments, self.param_groups[0]["lr"] = state["moments"], state["lr"]


class Forgetful(Flat):
    """Loads nothing of its moments."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["lr"]


class Broken(Flat):
    """Cannot load what it has saved."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("param_groups")


class Hidden(Flat):
    """Has torch's state dict, in which its moments are not."""

    state_dict = torch.optim.Optimizer.state_dict
    load_state_dict = torch.optim.Optimizer.load_state_dict


class Sam(torch.optim.Optimizer):
    """Steps an optimizer inside, which its state dict lacks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        del closure
        self.inner.step()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, keeper: Any = None) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if keeper is not None:
            keeper.at(step + 1)
    return losses


def lookahead(params: Any) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.Adam(params, lr=0.05))


def hooked(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer that adds to its state dict by a hook, and takes it out by another."""
    optimizer = torch.optim.Adam(params, lr=0.05)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "added": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "added"})
    return optimizer


@pytest.mark.parametrize("make", [lookahead, Flat, hooked, torch.optim.Muon, torch.optim.Adafactor])
def test_an_optimizer_of_another_kind_goes_on_bit_for_bit(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 4, bias=False)
    other = copy.deepcopy(model)
    optimizer = make(model.parameters())
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer)
    run(model, optimizer, 3, keeper)
    assert (keeper._trips.failures, keeper._trips.left, keeper._registration.ready) == ([], False, True)
    keeper.save(3)
    expected = run(model, optimizer, 4)
    fresh = make(other.parameters())
    assert checkpoint(tmp_path, model=other, optimizer=fresh).restore() == 3
    assert run(other, fresh, 4) == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Forgetful, "optimizer: what was saved of a Forgetful cannot be restored: its state['moments'][0] is not as"),
        (Broken, "optimizer: what was saved of a Broken cannot be restored: KeyError: 'param_groups'"),
        (Hidden, "optimizer: what was saved of a Hidden cannot be restored: its state_dict() lacks the state in .mom"),
        (Sam, "optimizer: what was saved of a Sam cannot be restored: its state_dict() lacks the state in .inner"),
    ],
)
def test_one_that_cannot_be_restored_is_named_before_the_job_can_be_moved(
    tmp_path: Path, make: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer)
    run(model, optimizer, 2, keeper)
    before = copy.deepcopy(optimizer.state_dict())
    keeper.save(2)
    registration = keeper._registration
    assert not registration.ready
    assert registration.unready.startswith(reason)
    assert caplog.text.count("cannot be restored") == 1
    assert str(optimizer.state_dict()) == str(before)


def test_torchs_own_are_tried_without_a_trace(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    kinds = (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop)
    optimizers = [kind(model.parameters(), lr=0.01) for kind in kinds]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=9)]
    schedulers += [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1])]  # type: ignore[list-item]
    schedulers += [torch.optim.lr_scheduler.LambdaLR(optimizers[2], lambda step: 0.9**step)]  # type: ignore[list-item]
    for optimizer in optimizers:
        run(model, optimizer, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    keeper = checkpoint(
        tmp_path, model=model, optimizer=optimizers, scheduler=schedulers, scaler=torch.amp.GradScaler("cpu"),
        own={"average": average, "best": {"loss": 2.0}},
    )  # fmt: skip
    states = [optimizer.state_dict() for optimizer in optimizers]
    tensors = [*model.state_dict().values(), *(tensor for state in states for tensor in parts.tensors_in(state))]
    versions, drawn = [tensor._version for tensor in tensors], torch.get_rng_state()
    keeper.save(1)
    assert keeper._trips.failures == []
    assert not keeper._trips.left
    assert [tensor._version for tensor in tensors] == versions
    assert torch.equal(drawn, torch.get_rng_state())


class Counting(nn.Module):
    """Saves in a form of its own what it cannot load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None:
        raise TypeError(f"no count in {sorted(state)}")


def test_a_module_of_ones_own_form_is_tried(tmp_path: Path) -> None:
    keeper = checkpoint(tmp_path, model=nn.Sequential(nn.Linear(2, 2), Counting()))
    keeper.save(1)
    assert "model: what was saved of a Sequential cannot be restored" in keeper._trips.failures[0]
    assert "no count in ['count']" in keeper._trips.failures[0]


def test_an_object_that_is_too_large_or_cannot_be_copied_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip, "LIMIT_BYTES", 10)
    model = nn.Linear(4, 4)
    optimizer = Forgetful(model.parameters())
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer)
    run(model, optimizer, 1)
    keeper.save(1)
    assert keeper._trips.failures == []


def test_a_module_without_shapes_yet_is_filled_as_load_state_dict_does(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    keeper = checkpoint(tmp_path, model=model)
    with pytest.raises(
        UsageError, match=r"model: 0\.weight has no shape yet: run the module once before the first save"
    ):
        keeper.save(1)
    model(torch.ones(2, 5))
    keeper.save(1)
    fresh = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    assert checkpoint(tmp_path, model=fresh).restore() == 1
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert optimizer.param_groups[0]["params"][0] is fresh[0].weight


# --- generators ---------------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(3),
        "pcg": np.random.default_rng(3),
        "philox": np.random.Generator(np.random.Philox(3)),
        "twister": np.random.Generator(np.random.MT19937(3)),
        "legacy": np.random.RandomState(3),
        "python": random.Random(3),  # noqa: S311
    }


def drawn(own: dict[str, Any]) -> list[float]:
    python, torchs = own["python"].random(), torch.rand(1, generator=own["torch"]).item()
    return [python, torchs, *(own[name].normal() for name in ("pcg", "philox", "twister", "legacy"))]


def test_generators_of_ones_own_go_on_in_place(tmp_path: Path) -> None:
    own = generators()
    drawn(own)
    keeper = checkpoint(tmp_path, own=own)
    keeper.save(1)
    expected = [drawn(own), drawn(own)]
    assert keeper.restore() == 1
    assert [drawn(own), drawn(own)] == expected
    fresh = generators()
    assert checkpoint(tmp_path, own=fresh).restore() == 1
    assert [drawn(fresh), drawn(fresh)] == expected


def test_a_generator_of_another_kind_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, own={"draws": np.random.default_rng(1)}).save(1)
    with pytest.raises(
        MismatchError, match=r"own\['draws'\]: the checkpoint has a Generator of PCG64, this job a .*MT1"
    ):
        checkpoint(tmp_path, own={"draws": np.random.Generator(np.random.MT19937(1))}).restore()
    with pytest.raises(MismatchError, match=r"own\['more'\]: the checkpoint was saved without this generator"):
        checkpoint(tmp_path, own={"more": torch.Generator()}).restore()


def test_what_is_not_restored_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoints, "_told", [])
    loader = DataLoader(TensorDataset(torch.arange(4)), generator=torch.Generator())
    for _ in range(2):
        checkpoint(tmp_path, model=nn.Linear(2, 2))
    (record,) = caplog.records
    text = record.getMessage()
    assert "the position in the data (sampler=); nor the generator of a DataLoader (own=); nor anything else" in text
    caplog.clear()
    monkeypatch.setattr(checkpoints, "_told", [])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    checkpoint(tmp_path, model=nn.Linear(2, 2))
    assert not caplog.records
    del loader


# --- what is in no keeper -----------------------------------------------------------------------------------


class Job:
    """A training with a keeper, in which each boundary is looked at."""

    def __init__(self, folder: Path, wrap: Any = lambda optimizer: optimizer) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.session = client.attach()
        state = {"scheduler": self.schedule, "optimizer": wrap(self.optimizer)}
        self.keeper = checkpoint(folder, model=torch.compile(self.model), **state)

    def train(self, steps: int = 200) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            self.session.boundary()
            self.session.memory_step = 0


def made_anew(job: Job) -> None:
    job.optimizer = torch.optim.AdamW(job.model.parameters())


def scheduled_again(job: Job) -> None:
    job.later = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)


def grown(job: Job) -> None:
    job.more = nn.Linear(4, 4)
    job.optimizer.add_param_group({"params": job.more.parameters()})


LATER = {
    made_anew: "the state of an optimizer that steps (AdamW); give it as optimizer=",
    scheduled_again: "the state of a ExponentialLR; give it as scheduler=",
    grown: "2 parameters that SGD trains; give their module as model=",
}


@pytest.mark.parametrize("change", LATER)
def test_what_trains_and_is_in_no_keeper_is_named_once(
    tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip, "_told", set())
    monkeypatch.setattr("cadenza.sidecar.client.session.save_points.REST", 2)
    job = Job(tmp_path)
    job.train()
    assert "will not bring back" not in caplog.text
    change(job)
    job.train()
    assert caplog.text.count("will not bring back") == 1
    assert LATER[change] in caplog.text


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("every", [1, 3])
def test_a_schedule_that_steps_after_the_boundary_is_named_before_the_job_can_be_moved(
    tmp_path: Path, first: bool, every: int
) -> None:
    """``every``: steps of an epoch, after which its scheduler steps in any script."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    parts = [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)]
    kinds = {1: lambda: schedules.ChainedScheduler(parts), 3: lambda: schedules.SequentialLR(optimizer, parts, [2])}
    scheduler = kinds[every]()
    session = client.attach(model, optimizer)
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    for step in range(1, 8):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        if first and step % every == 0:
            scheduler.step()
        keeper.at(step)
        session.boundary()
        if not first and step % every == 0:
            scheduler.step()
    assert keeper._registration.ready is (first or every > 1)
    assert ("ChainedScheduler steps after boundary()" in keeper._registration.unready) is (not first and every == 1)
    assert keeper._schedules._end is None, "it follows no steps any more"


@pytest.mark.parametrize("kept", [True, False])
def test_an_averaged_model_is_named_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(round_trip, "_told", set())
    model = nn.ModuleDict({"averaged": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = AveragedModel(model)
    session = client.attach(model, optimizer)
    keeper = checkpoint(tmp_path, model=model, optimizer=optimizer, own={"mean": mean} if kept else None)
    for step in range(4):
        model["averaged"](torch.ones(2, 2)).sum().backward()
        optimizer.step()
        keeper.at(step + 1)
        session.boundary()
    assert ("an averaged model" in caplog.text) is not kept


@pytest.mark.parametrize("changes", ["in place", "anew", "plain", "not"])
def test_a_buffer_that_changes_and_is_not_saved_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    monkeypatch.setattr(round_trip, "_told", set())
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2), persistent=False)
    keeper = checkpoint(tmp_path, model=nn.Sequential(model))
    for _ in range(3):
        if changes == "in place":
            model.mean.add_(1)
        elif changes == "anew":
            model.mean = model.mean + 1
        elif changes == "plain":
            model.hidden = torch.ones(2)
        keeper._learn()
    name = "hidden" if changes == "plain" else "mean"
    assert caplog.text.count(f"will not bring back the tensor 0.{name}") == (changes != "not")
    assert caplog.text.count("will not bring back the tensor") == (changes != "not")


def test_what_a_keeper_has_inside_another_object_is_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    monkeypatch.setattr(round_trip, "_told", set())
    Job(tmp_path, Wrapped).train(20)
    assert "will not bring back" not in caplog.text


class Files(Mapping[str, bytes]):
    """Values that are files, which nobody wants to have read."""

    def __getitem__(self, name: str) -> bytes:
        raise OSError(f"{name}: the file server is away")

    def __iter__(self) -> Iterator[str]:
        raise OSError("the file server is away")

    def __len__(self) -> int:
        return 1


class Refuses:
    """A proxy that reads no attribute before it is connected."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not connected")


@pytest.mark.parametrize("make", [Files, Refuses, lambda: classmethod(len)], ids=["files", "proxy", "classmethod"])
def test_an_odd_object_in_a_model_ends_no_training_and_hides_no_other(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip, "_told", set())
    monkeypatch.setattr("cadenza.sidecar.client.session.save_points.REST", 2)
    job = Job(tmp_path)
    job.model.odd = [make()]
    job.train(20)
    if make is not Refuses:
        made_anew(job)
        job.train()
        assert LATER[made_anew] in caplog.text


def test_an_optimizer_without_state_is_looked_into_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looks = []
    monkeypatch.setattr(round_trip, "has_state", lambda _: looks.append(1))
    keeper = checkpoint(tmp_path, optimizer=optimizer)
    run(model, optimizer, 100, keeper)
    assert len(looks) < 10
