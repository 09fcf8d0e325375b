"""Boundaries without a change of code, and the cases in which automatic attach is off."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from client_peer import Peer, Script
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cadenza.sidecar import client
from cadenza.sidecar.client.bootstrap import auto
from cadenza.sidecar.client.bootstrap.process import current


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[auto.OptimizerFollower]:
    """OptimizerFollower of all optimizers of this process, as under ``cadenza run``."""
    monkeypatch.setenv(auto.ATTACHED_ENV, "")
    one = auto.OptimizerFollower()
    handle = register_optimizer_step_post_hook(one.stepped)
    yield one
    handle.remove()
    client.detach()


def optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


def steps() -> int:
    session = current()
    return session.step if session else -1


def test_the_first_optimizer_alive_makes_the_steps(job: Peer, follower: auto.OptimizerFollower) -> None:
    script = Script(job.rank, job)
    first, second = optimizer(), optimizer()
    for _ in range(3):
        first.step()
        second.step()
    assert script.finish().step == steps() == 3
    assert os.environ[auto.ATTACHED_ENV] == str(os.getpid())
    del first
    gc.collect()
    second.step()  # a later stage of the script goes on with another optimizer
    assert steps() == 4


def test_modules_and_scalers_of_the_process_move_too(job: Peer, follower: auto.OptimizerFollower) -> None:
    gc.collect()
    model, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()

    def agent() -> list[int]:
        rank = job.rank(stop=1)
        rank.hear("arrived")
        rank.say("commit", order=1)
        assert rank.hear("yielded")["resident"] == []
        tensors = [*model.parameters(), model.weight.grad, *teacher.parameters()]
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None]
        rank.clear()
        rank.say("resume", order=2)
        rank.hear("resumed")
        return sizes

    script = Script(agent, job)
    descent.step()
    assert script.finish() == [0] * 5


def test_an_explicit_attach_ends_it(job: Peer, follower: auto.OptimizerFollower) -> None:
    script = Script(job.rank, job)
    descent = optimizer()
    descent.step()
    client.attach()
    for _ in range(2):
        descent.step()
        client.boundary()
    script.finish()
    assert steps() == 3


def test_a_process_started_by_the_rank_is_none(
    job: Peer, follower: auto.OptimizerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(auto.ATTACHED_ENV, "1")
    optimizer().step()
    assert steps() == -1


def test_steps_inside_the_backward_pass_are_no_boundaries(job: Peer, follower: auto.OptimizerFollower) -> None:
    parameter = nn.Parameter(torch.ones(4))
    descent = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda _: descent.step())
    parameter.sum().backward()
    assert torch.equal(parameter.detach(), torch.full((4,), 0.9))
    assert steps() == -1


def test_an_old_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hooks = dict(sys.modules[auto.OPTIMIZER_MODULE]._global_optimizer_post_hooks)
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu121")
    auto.install()
    assert hooks == sys.modules[auto.OPTIMIZER_MODULE]._global_optimizer_post_hooks
    assert "PyTorch 2.3.1+cu121 is older than 2.4" in caplog.text


def test_detaching_takes_the_hook_away() -> None:
    hooks = sys.modules[auto.OPTIMIZER_MODULE]._global_optimizer_post_hooks
    before = dict(hooks)
    auto.install()
    assert len(hooks) == len(before) + 1
    client.detach()
    assert hooks == before
