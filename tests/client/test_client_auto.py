"""Boundaries without a change of code, and the cases in which automatic attach is off."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from client_peer import Peer, Script
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cadenza.sidecar import client
from cadenza.sidecar.client.bootstrap import auto, no_turns, run_script
from cadenza.sidecar.client.bootstrap.process import current
from cadenza.sidecar.client.session import compiled_steps


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[auto.OptimizerFollower]:
    """OptimizerFollower of all optimizers of this process, as under ``cadenza run``."""
    monkeypatch.setenv(auto.ATTACHED_ENV, "")
    one = auto.OptimizerFollower(no_turns.Watch())
    handle = register_optimizer_step_post_hook(compiled_steps.step_hook(one.stepped))
    yield one
    handle.remove()
    one.watch.end()
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


def test_an_optimizer_that_steps_alone_takes_over(job: Peer, follower: auto.OptimizerFollower) -> None:
    script = Script(job.rank, job)
    head, whole = optimizer(), optimizer()
    for _ in range(3):  # a GAN with five steps of the other to one
        head.step()
        for _ in range(5):
            whole.step()
    script.finish()
    assert steps() == 3
    for _ in range(100):
        whole.step()
    assert steps() == 3 + 5 + 100 - 4 * 5, "after four times as many steps alone as ever before"
    head.step()
    assert steps() == 88


def test_new_optimizers_do_not_walk_the_process(
    job: Peer, follower: auto.OptimizerFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(job.rank, job)
    optimizer().step()
    script.finish()
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("all objects were walked"))
    for _ in range(20):
        optimizer().step()
    assert steps() == 21


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
    script = Script(job.rank, job)
    other = optimizer()
    other.step()  # one that steps outside of it makes the boundaries
    parameter.sum().backward()
    other.step()
    script.finish()
    assert steps() == 2


def own_rule(times: int = 3) -> None:
    parameter = nn.Parameter(torch.ones(4))
    for _ in range(times):
        parameter.sum().backward()
        parameter.data.sub_(parameter.grad)


def test_a_training_that_is_not_followed_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = torch.autograd._engine_run_backward
    monkeypatch.setattr(no_turns, "PATIENCE_NS", 0)
    watch = no_turns.Watch()
    own_rule()
    watch.end()
    assert torch.autograd._engine_run_backward is original
    assert caplog.text.count("takes no turns under `cadenza run`, because it computes gradients and no optimizer") == 1


SCRIPTS = {
    "own rule": ("""
        parameter = torch.nn.Parameter(torch.ones(4))
        torch.autograd.grad(parameter.sum(), parameter)
    """, "because it computes gradients and no optimizer of torch.optim steps"),
    "inside": ("""
        parameter = torch.nn.Parameter(torch.ones(4))
        descent = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _: descent.step())
        parameter.sum().backward()
    """, "because its optimizer steps inside the backward pass"),
    "none": ("torch.ones(4).sum()", ""),
    "followed": ("""
        parameter = torch.nn.Parameter(torch.ones(4))
        descent = torch.optim.SGD([parameter], lr=0.1)
        parameter.sum().backward()
        descent.step()
    """, ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_short_script_says_at_its_end_why_it_took_no_turns(name: str, tmp_path: Path) -> None:
    script, reason = SCRIPTS[name]
    (tmp_path / "train.py").write_text("import torch\n" + textwrap.dedent(script))
    command = [sys.executable, run_script.__file__, "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("takes no turns") == (1 if reason else 0)
    assert reason in done.stderr


COMPILED = """
import sys, torch
from torch._dynamo.utils import counters, get_compilation_metrics

class Plain(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {"lr": 0.01})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]: one.add_(one.grad, alpha=-0.01)

torch.manual_seed(0)
for kind in ("sgd", "plain", "whole"):
    torch._dynamo.reset(); counters.clear()
    model = torch.nn.Linear(8, 8)
    descent = Plain(model.parameters()) if kind == "plain" else torch.optim.SGD(model.parameters(), lr=0.01)
    def train():
        descent.zero_grad(); model(torch.ones(2, 8)).sum().backward(); descent.step()
    step = torch.compile(descent.step if kind != "whole" else train, backend=sys.argv[1], fullgraph=kind == "plain")
    for _ in range(3):
        if kind != "whole": descent.zero_grad(); model(torch.ones(2, 8)).sum().backward()
        step()
    print(kind, dict(counters["frames"]), dict(counters["stats"]), model.bias.tolist())
print([one.co_name for one in get_compilation_metrics()])
process = sys.modules.get("cadenza.sidecar.client.bootstrap.process")
sys.stderr.write(f"steps {process.current().step if process else 0}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_step_is_the_same_program_and_still_a_boundary(backend: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMPILED)
    plain = [sys.executable, "train.py", backend]
    under = [sys.executable, run_script.__file__, "--", *plain]
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    jobs = [
        subprocess.Popen(one, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in (plain, under)
    ]
    (expected, _), (printed, errors) = [one.communicate() for one in jobs]
    assert expected
    assert printed == expected
    assert errors.splitlines()[-1] == "steps 9"


COMPILED_LOOP = """
import logging, os, sys, tempfile, torch
from torch._dynamo.utils import counters
kind, cadenza = sys.argv[1:]
logging.disable(logging.CRITICAL)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
descent = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if cadenza == "with":
    from cadenza.sidecar import client
    from cadenza.sidecar.client.session import save_points
    save_points.REST = 2  # samples of whether gradients are pending
    session = client.attach(model, descent)
    keeper = client.checkpoint(tempfile.mkdtemp(), model=model, optimizer=descent)
def train(batch):
    loss = model(batch).square().sum()
    if kind == "inside": descent.zero_grad(); loss.backward(); descent.step()
    if cadenza == "with": session.boundary(len(batch))
    return loss
step = torch.compile(train, backend="eager", fullgraph=kind == "whole")
for number in range(12):
    loss = step(torch.ones(2, 8))
    if kind == "whole": descent.zero_grad(); loss.backward(); descent.step()
    if cadenza == "with": keeper.at(number); session.memory_step = 0
print(dict(counters["frames"]), dict(counters["graph_break"]), dict(counters["stats"]), model.bias.tolist())
if cadenza == "with": sys.stderr.write(f"steps {session.step} {session.samples}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inside", "whole"])
def test_a_boundary_inside_a_compiled_step_follows_it_and_adds_nothing_to_the_program(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(COMPILED_LOOP)
    jobs = [
        subprocess.Popen(
            [sys.executable, "train.py", kind, way],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way in ("without", "with")
    ]
    (expected, _), (printed, errors) = [one.communicate() for one in jobs]
    assert expected
    assert printed == expected, errors
    assert errors.splitlines()[-1] == "steps 12 24"


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
