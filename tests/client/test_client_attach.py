"""attach(): cheap to import, harmless without an agent, one identity per rank, inert in children."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from client_peer import Peer, Script
from torch.utils.data import DataLoader, Dataset

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.session import identity
from cadenza.sidecar.client.session.step_page import StepCounters, private_page

PACKAGING = Path(__file__).parents[2] / "packaging"
IMPORT = """
import json, signal, sys, threading
def handlers(): return [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
before = handlers()
import cadenza.sidecar.client
print(json.dumps([before == handlers(), "torch" in sys.modules, "socket" in sys.modules, threading.active_count()]))
"""


def test_import_takes_no_torch_no_socket_and_no_handler() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [True, False, False, 1]


def test_outside_slurm_nothing_happens_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("cadenza.sidecar.client.bootstrap.process._process.warned", False)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            session = client.attach(torch.nn.Linear(2, 2))
            client.boundary()
            client.detach()
    assert not session.active
    assert session.step == 1
    assert caplog.messages == ["not in a Slurm job: attach() does nothing"]


def test_an_old_torch_runs_as_without_cadenza(
    job: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cadenza.sidecar.client.bootstrap.process._process.warned", False)
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu121")
    session = client.attach(torch.nn.Linear(2, 2))
    client.boundary()
    client.detach()
    assert not session.active
    assert caplog.messages == ["this process runs as without Cadenza: PyTorch 2.3.1+cu121 is older than 2.4"]


def test_without_an_agent_on_the_host_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr("cadenza.sidecar.client.bootstrap.process._process.warned", False)
    session = client.attach(socket="/nonexistent/agent.sock")
    session.boundary()
    client.detach()
    assert not session.active
    assert "no Cadenza agent on this host" in caplog.text


@pytest.mark.parametrize(
    ("runtime", "file"),
    [({}, "enroot/50-cadenza.fstab"), ({"APPTAINER_CONTAINER": "/a.sif"}, "apptainer/cadenza.conf")],
)
def test_a_container_without_the_socket_is_told_the_line_that_is_shipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runtime: dict[str, str], file: str
) -> None:
    monkeypatch.delenv("APPTAINER_CONTAINER", raising=False)
    monkeypatch.delenv("SINGULARITY_CONTAINER", raising=False)
    for name, value in {"SLURM_JOB_ID": "12", "CADENZA_LANE": "1", **runtime}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cadenza.sidecar.client.bootstrap.process._process.warned", False)
    session = client.attach(socket="/run/not-mounted/agent.sock")
    client.detach()
    assert not session.active
    _, shipped = (PACKAGING / file).read_text().splitlines()
    assert f"missing: `{shipped.replace('/run/cadenza', '/run/not-mounted')}` in " in caplog.text
    assert "the job on lane 1 takes no turns" in caplog.text


SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (SLURM, (0, 1, 1)),  # plain python in a batch script of four tasks
        ({**SLURM, "RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (3, 8, 4)),
        ({**SLURM, "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}, (5, 6, None)),
        (
            {
                **SLURM,
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "7",
                "SLURM_NODEID": "3",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            },
            (5, 7, 1),
        ),
        ({**SLURM, "RANK": "9", "WORLD_SIZE": "2"}, (0, 1, 1)),  # nonsense is not believed
    ],
)
def test_ranks(environ: dict[str, str], wanted: tuple[int, int, int | None]) -> None:
    who = identity.read(environ)
    assert who is not None
    assert (who.rank, who.world_size, who.local_world_size) == wanted


def test_outside_a_job_there_is_no_identity_and_gpus_are_slurms() -> None:
    assert identity.read({"RANK": "0", "WORLD_SIZE": "1"}) is None
    who = identity.read({**SLURM, "SLURM_JOB_GPUS": "0-1,3", "SLURMD_NODENAME": "n1-l1", "SLURM_JOB_NUM_NODES": "2"})
    assert who is not None
    assert (who.gpus, who.node, who.hosts, who.restart) == ((0, 1, 3), "n1-l1", 2, 0)
    assert identity.parse_indices("GPU-8f2c") == ()


def test_buckets_are_the_wires() -> None:
    times = [0, 1, 2, 3, 4, 7, 8, 1000, 10**6, 2**41 - 1, 2**41, 2**50]
    for spent in times:
        words = private_page()
        meter = StepCounters(words)
        meter.last_ns = monotonic_ns() - spent
        meter.boundary(3)
        measured = words[wire.PAGE_SUM_NS]
        assert words[wire.PAGE_FINE + wire.fine_bucket(measured)] == 1
        assert words[wire.PAGE_SAMPLES] == 3


class Items(Dataset[int]):
    """Items made in a forked worker that calls boundary() like careless code."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        for _ in range(5):
            client.boundary()
        return index


def test_loader_workers_have_no_part_in_the_session(job: Peer) -> None:
    script = Script(job.rank, job)
    session = client.attach()
    rank = script.finish()
    loader = iter(DataLoader(Items(), num_workers=2, multiprocessing_context="fork"))
    items = [int(next(loader)), int(next(loader))]
    session.boundary()
    assert items == [0, 1]
    assert rank.step == session.step == 1
    session.detach()
    rank.hear("detach")
    assert rank.gone()  # although the workers live and were born with the socket
    assert [int(item) for item in loader] == [2, 3, 4, 5, 6, 7]


def test_attaching_again_adds_state_and_detaching_away_is_refused(job: Peer) -> None:
    first, second = torch.ones(4), torch.ones(4)
    sizes: list[int] = []

    def agent() -> None:
        rank = job.rank(stop=1)
        assert rank.hear("arrived")["bytes"] == 32
        rank.say("commit", order=1)
        rank.hear("yielded")
        sizes.extend(tensor.untyped_storage().nbytes() for tensor in (first, second))
        with pytest.raises(UsageError):
            client.detach()
        rank.clear()
        rank.say("resume", order=2)
        rank.hear("resumed")

    script = Script(agent, job)
    session = client.attach(tensors=[first])
    assert client.attach(tensors={"second": second}) is session
    session.boundary()
    script.finish()
    assert sizes == [0, 0]
    assert torch.equal(first + second, torch.full((4,), 2.0))


def one_turn(peer: Peer, calls: list[str]) -> list[str]:
    """Order one yield; return the calls seen when the state was out, and the error if there was one."""
    rank = peer.rank(stop=1)
    rank.hear("arrived")
    rank.say("commit", order=1)
    answer = rank.hear("yielded")
    seen = [*calls, *([answer["error"]] if answer.get("error") else [])]
    rank.clear()
    if "error" not in answer:
        rank.say("resume", order=2)
        rank.hear("resumed")
    return seen


def test_functions_run_before_the_state_leaves_and_after_it_is_back(job: Peer) -> None:
    state, calls = torch.ones(4), []
    script = Script(lambda: one_turn(job, calls), job)
    session = client.attach(tensors=[state])
    session.call(
        on_yield=lambda: calls.append(f"yield, {state.untyped_storage().nbytes()} bytes here"),
        on_resume=lambda: calls.append(f"resume, {state.untyped_storage().nbytes()} bytes here"),
    )
    session.boundary()
    assert script.finish() == ["yield, 16 bytes here"]
    assert calls == ["yield, 16 bytes here", "resume, 16 bytes here"]


def test_a_job_that_cannot_let_go_does_not_yield(job: Peer) -> None:
    state = torch.ones(4)

    def fail() -> None:
        raise RuntimeError("a kernel is running")

    script = Script(lambda: one_turn(job, []), job)
    session = client.attach(tensors=[state])
    session.call(on_yield=fail, on_resume=lambda: None)
    session.boundary()
    assert script.finish() == ["on_yield failed: a kernel is running"]
    assert torch.equal(state, torch.ones(4))
