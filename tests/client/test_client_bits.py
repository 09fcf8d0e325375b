"""A job that yields computes the same as one that does not, bit for bit, and its memory is free while it is away."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Script, Turns
from torch import nn

from cadenza.sidecar import client

STEPS = 24
STOPS = sorted(random.Random(7).sample(range(1, STEPS), 8))  # noqa: S311


def mlp() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return model, optimizer, lambda: model(torch.randn(8, 16)).square().mean()


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    return model, optimizer, lambda: model(torch.randint(0, 20, (4, 6))).square().mean()


class Tied(nn.Module):
    """An embedding and an output layer with one weight, and a frozen view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.output = nn.Linear(16, 20, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("first_rows", self.embedding.weight.detach()[:3])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.embedding(tokens))
        return logits + self.first_rows.sum()


def tied() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, lambda: model(torch.randint(0, 20, (4, 6))).square().mean()


def train(make: Callable[[], tuple[Any, ...]], *, keep_gradients: bool) -> tuple[list[float], dict[str, Any]]:
    """Train from a fixed seed; return losses and final state."""
    torch.manual_seed(1)
    model, optimizer, loss_of = make()
    client.attach(model, optimizer)
    losses = []
    for _ in range(STEPS):
        if keep_gradients:
            optimizer.zero_grad(set_to_none=False)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not keep_gradients:
            optimizer.zero_grad(set_to_none=True)
        client.boundary(8)
    return losses, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("make", [mlp, transformer, tied])
def test_losses_and_state_are_bit_identical(
    make: Callable[[], tuple[Any, ...]], keep_gradients: bool, request: pytest.FixtureRequest
) -> None:
    alone, state_alone = train(make, keep_gradients=keep_gradients)
    client.detach()
    turns = Turns(request.getfixturevalue("job"), STOPS)
    shared, state_shared = train(make, keep_gradients=keep_gradients)
    turns.finish()
    assert [message["step"] for message in turns.arrived] == STOPS
    assert all(message["bytes"] > 0 and not message["resident"] for message in turns.yielded)
    assert shared == alone
    torch.testing.assert_close(state_shared, state_alone, rtol=0, atol=0)


def mapped(address: int) -> bool:
    """Return whether an address belongs to this process's memory."""
    ranges = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_released_while_away_and_objects_stay(job: Peer) -> None:
    model = nn.Linear(3000, 3000)  # 36 MB: a mapping of its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3000)).sum().backward()
    optimizer.step()
    weight, before = model.weight, model.weight.detach().clone()
    address, view, gradient = weight.data_ptr(), weight.detach()[5:], weight.grad
    seen: dict[str, Any] = {}

    def look(cycle: int) -> None:
        assert gradient is not None
        momentum = optimizer.state[weight]["momentum_buffer"]
        seen["bytes"] = [t.untyped_storage().nbytes() for t in (weight, view, gradient, momentum, model.bias)]
        seen["mapped"] = mapped(address + 2**20)
        seen["rss"] = resident_bytes()

    turns = Turns(job, [1], while_away=look)
    client.attach(model, optimizer)
    rss = resident_bytes()
    client.boundary()
    turns.finish()
    assert seen["bytes"] == [0, 0, 0, 0, 0]
    assert not seen["mapped"]
    assert seen["rss"] < rss + 20 * 2**20  # one copy of the 108 MB in host memory, not two
    assert turns.yielded[0]["bytes"] == 3 * (3000 * 3000 + 3000) * 4
    assert model.weight is weight
    assert model.weight.grad is gradient
    assert torch.equal(weight, before)
    assert torch.equal(view, before[5:])
    assert view.data_ptr() == weight.data_ptr() + 5 * 3000 * 4
    assert optimizer.param_groups[0]["params"][0] is weight


def test_without_the_lease_the_state_moves_out_before_the_first_step(job: Peer) -> None:
    job.answer = "yielded"
    model = nn.Linear(4, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def agent() -> list[int]:
        rank = job.rank()
        assert rank.hear("yielded")["bytes"] == 80
        sizes = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
        rank.say("resume", order=1)
        rank.hear("resumed")
        return sizes

    script = Script(agent, job)
    session = client.attach(model)
    assert script.finish() == [0, 0]
    assert session.step == 0
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_registered_tensors_scalers_and_averages_move_too(job: Peer) -> None:
    model = nn.Linear(4, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(model(torch.ones(1, 4)).sum())
    loss.backward()
    table = {"table": torch.arange(10.0)}
    made = torch.arange(5)
    kept: list[torch.Tensor] = [*average.parameters(), scaler._scale, table["table"], made]
    copies = [tensor.detach().clone() for tensor in kept]
    empty: list[int] = []
    turns = Turns(job, [1], while_away=lambda cycle: empty.extend(t.untyped_storage().nbytes() for t in kept))
    client.attach(model, None, average, scaler, lambda: [made], tensors=table)
    client.boundary()
    turns.finish()
    assert empty == [0] * len(kept)
    assert all(torch.equal(now, then) for now, then in zip(kept, copies, strict=True))


def test_only_the_state_at_the_boundary_moves(job: Peer) -> None:
    """The state is smallest after zero_grad(set_to_none=True), because it has no gradients then."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    turns = Turns(job, [1, 2, 3])
    client.attach(model, optimizer)
    for to_none in (None, False, True):
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        if to_none is not None:
            optimizer.zero_grad(set_to_none=to_none)
        client.boundary()
    turns.finish()
    parameters, step_counters = (100 * 100 + 100) * 4, 2 * 4
    with_gradients = 4 * parameters + step_counters
    assert [message["bytes"] for message in turns.yielded] == [with_gradients] * 2 + [with_gradients - parameters]


def test_hooks_groups_and_schedules_stay_valid(job: Peer) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(requires_grad=False)
    groups = [{"params": [model[1].weight], "lr": 0.5}, {"params": [model[1].bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    fired: list[str] = []
    model[0].register_forward_hook(lambda *_: fired.append("forward"))
    model[1].weight.register_hook(lambda _: fired.append("gradient"))
    model[1].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    optimizer.register_step_post_hook(lambda *_: fired.append("step"))
    frozen = model[0].weight.clone()
    turns = Turns(job, [1])
    client.attach(model, optimizer, schedule)
    client.boundary()
    turns.finish()
    before = model[1].weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    assert model[1].weight.grad is not None
    expected = before - 0.5 * model[1].weight.grad
    optimizer.step()
    schedule.step()
    assert fired == ["forward", "gradient", "accumulated", "step"]
    assert torch.equal(model[1].weight, expected)
    assert torch.equal(model[0].weight, frozen)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])
    assert optimizer.param_groups[0]["params"][0] is model[1].weight
