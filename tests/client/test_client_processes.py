"""Whole jobs in separate processes: DDP with gloo, and scripts that attach without a change of their code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import client_ddp
import client_train
import pytest
import torch
from client_peer import PATIENCE_S, Peer, Turns, running, slurm_environment

from cadenza.sidecar.client.bootstrap import run_script

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RUN = [sys.executable, "-m", "cadenza.sidecar.client.bootstrap.run_script", "--"]
STOPS = [3, 4, 9, 13]


def losses(folder: Path) -> list[dict[str, list[float]]]:
    """Return the two ranks' results."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, list[float]]], dict[bool, Turns]]:
    """One job of two ranks that trains alone and shared, with both settings: losses, and the agent's records."""
    folder = tmp_path_factory.mktemp("ddp")
    peer = Peer(folder / "agent.sock")
    command = [sys.executable, str(HERE / "client_ddp.py"), str(folder)]
    more = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TEST_RENDEZVOUS": str(folder / "rendezvous")}
    turns: dict[bool, Turns] = {}
    with running(command, command, envs=[slurm_environment(peer.path, RANK=rank, **more) for rank in "01"]) as ranks:
        for view in (False, True):
            turns[view] = Turns(peer, STOPS, ranks=2)
            turns[view].finish()
        ended = [(rank.communicate(timeout=PATIENCE_S)[1], rank.returncode) for rank in ranks]
        assert [code for _, code in ended] == [0, 0], ended
    peer.die()
    return losses(folder), turns


def test_ddp_with_both_bucket_settings(ddp: tuple[list[dict[str, list[float]]], dict[bool, Turns]]) -> None:
    for view, turns in ddp[1].items():
        assert {message["step"] for message in turns.arrived} == set(STOPS)
        named = [any("gradient buckets" in name for name in message["resident"]) for message in turns.yielded]
        assert set(named) == {not view}
    for found in ddp[0]:
        assert found["False shared"] == found["False"]
        assert found["True shared"] == found["True"]
        assert len(found["True"]) == client_ddp.STEPS


def test_torchrun_ranks_attach_without_code(
    peer: Peer, ddp: tuple[list[dict[str, list[float]]], object], tmp_path: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(HERE / "client_ddp.py"), str(tmp_path), "--no-code"]
    command = [*RUN, sys.executable, *launcher, *script]
    with running(command, envs=[slurm_environment(peer.path)]) as jobs:
        turns = Turns(peer, STOPS, ranks=2)
        turns.finish()
        assert jobs[0].wait(PATIENCE_S) == 0
    assert {message["bytes"] for message in turns.yielded} == {turns.yielded[0]["bytes"]}
    for found, alone in zip(losses(tmp_path), ddp[0], strict=True):
        assert found["True"] == alone["True"]


@pytest.fixture(params=["of Cadenza's environment", "of another one"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A Python with torch; that of another environment has no Cadenza."""
    if request.param == "of Cadenza's environment":
        return sys.executable
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    other = str(tmp_path / "venv/bin/python")
    alone = subprocess.run([other, "-c", "import torch, cadenza.sidecar"], capture_output=True, text=True, check=False)
    assert "No module named 'cadenza'" in alone.stderr
    return other


def test_a_script_attaches_without_code(peer: Peer, python: str, tmp_path: Path) -> None:
    """It also runs the sitecustomize that was there before, and the losses are those of the script alone."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.write('the site has spoken ')\n")
    environment = slurm_environment(peer.path, PYTHONPATH=str(tmp_path))
    command = [*RUN, python, str(HERE / "client_train.py")]
    with running(command, envs=[environment]) as jobs:
        turns = Turns(peer, [1, 2, 11, 20])
        turns.finish()
        out, err = jobs[0].communicate(timeout=PATIENCE_S)
    assert (jobs[0].returncode, err) == (0, "the site has spoken " * 2)  # `cadenza run` itself is a Python too
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert json.loads(out) == client_train.train()
    torch.set_num_threads(threads)
    generator, critic, buffers = 8 * 8 + 8, 8 * 16 + 16 + 16 + 16 + 16 + 1, 4 * 32 + 8
    adam_steps = 2 * 4
    first = 4 * (4 * generator + 2 * critic) + buffers + adam_steps  # the critic has no momentum yet
    assert [message["bytes"] for message in turns.yielded] == [first, *3 * [first + 4 * critic]]
    assert not turns.yielded[0]["resident"]


def test_a_command_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script.main(["--", "/nonexistent/python"]) == 2
    assert run_script.main(["--"]) == 2
    assert run_script.main(["--help"]) == 0
    assert "No such file" in capsys.readouterr().err


def test_the_environment_is_extended_once() -> None:
    once = run_script.environment({"PYTHONPATH": "/a:/b", "HOME": "/h"})
    assert run_script.environment(once) == once == {"PYTHONPATH": f"{run_script.AUTOSTART}:/a:/b", "HOME": "/h"}
