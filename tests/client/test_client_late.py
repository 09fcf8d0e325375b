"""The wait for the lease before a GPU is used: ``attach`` and ``cadenza run`` say so on the job's output."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from client_peer import PATIENCE_S, Peer, Script

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.bootstrap import auto, process
from cadenza.sidecar.client.session import lease_request


class Asked:
    """The agent's end of a process that asks."""

    def __init__(self, peer: Peer) -> None:
        self.connection, _ = peer._socket.accept()
        self.connection.settimeout(PATIENCE_S)
        self.message = wire.decode(self.connection.recv(wire.MAX_PACKET))

    def answer(self, *states: str, reason: str = "") -> dict[str, object]:
        for state in states:
            self.connection.send(wire.encode("lease", state=state, reason=reason))
        self.connection.close()
        return self.message


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Torch's initialization of CUDA, recorded; this process is a job that starts without its lease."""
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: done.append("initialized"), raising=False)
    monkeypatch.setenv(auto.LATE_ENV, "1")
    monkeypatch.setattr(process._process, "warned", False)
    auto._follow(sys.modules[auto.OPTIMIZER_MODULE])
    yield done
    auto.uninstall()


def test_cuda_starts_only_with_the_lease(job: Peer, cuda: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def agent() -> dict[str, object]:
        asked = Asked(job)
        assert cuda == []
        return asked.answer("wait", "wait", "granted", reason="waits for job 12")

    script = Script(agent, job)
    torch._C._cuda_init()
    torch._C._cuda_init()
    message = script.finish()
    assert cuda == ["initialized"] * 2
    assert (message["type"], message["job"]) == ("ask", 4711)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2, said
    assert "waits for GPU ? of this host: waits for job 12" in said[0]
    assert "scancel 4711" in said[0]
    assert "goes on" in said[1]


def test_a_lease_at_once_is_no_news(job: Peer, cuda: list[str], caplog: pytest.LogCaptureFixture) -> None:
    script = Script(lambda: Asked(job).answer("granted"), job)
    torch._C._cuda_init()
    script.finish()
    assert (cuda, caplog.records) == (["initialized"], [])


def test_a_lost_agent_is_waited_for(job: Peer, cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_request, "RETRY_S", 0.001)

    def agent() -> None:
        Asked(job).connection.close()
        Asked(job).answer("wait")
        assert cuda == []
        Asked(job).answer("granted")

    script = Script(agent, job)
    torch._C._cuda_init()
    script.finish()
    assert cuda == ["initialized"]


def test_a_process_that_the_agent_refuses_runs_as_without_it(
    job: Peer, cuda: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(lambda: job.refuse("not this one"), job)
    torch._C._cuda_init()
    script.finish()
    assert cuda == ["initialized"]
    assert "not this one" in caplog.text


def test_all_other_jobs_start_cuda_as_ever(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lambda: cuda.append("plain")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_init", plain)
    monkeypatch.delenv(auto.LATE_ENV)
    auto._follow(sys.modules[auto.OPTIMIZER_MODULE])
    assert torch._C._cuda_init is plain


def test_attach_says_who_has_the_gpus(
    job: Peer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_GPUS", "0-1")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    job.answer, job.reason = "yielded", "job 7 has them"

    def agent() -> None:
        rank = job.rank()
        rank.hear("yielded")
        rank.say("resume", order=0)
        rank.hear("resumed")

    script = Script(agent, job)
    client.attach()
    script.finish()
    assert "job 4711 waits for GPU 0,1 of n1: job 7 has them. It goes on by itself; `scancel 4711`" in caplog.text
