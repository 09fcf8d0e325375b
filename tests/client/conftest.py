"""Fixtures of the client's tests: a job's environment, and a session that is closed at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from client_peer import Peer, slurm_environment

from cadenza.sidecar import client


class TorchModule(pytest.Module):
    """A file of tests that needs torch."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.importorskip("torch", reason="needs the extra `client`")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Skip the files of this folder without torch, in place of failing at their imports."""
    return TorchModule.from_parent(parent, path=module_path)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """An agent to which nothing has attached yet."""
    agent = Peer(tmp_path / "agent.sock")
    yield agent
    agent.die()


@pytest.fixture
def job(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """This process as a job's only rank."""
    client.detach()  # what a test of a keeper alone has left
    for key, value in slurm_environment(peer.path).items():
        monkeypatch.setenv(key, value)
    for key in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(key, raising=False)
    yield peer
    client.detach()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """One thread for torch: on two cores, threads that wait for each other would make these tests slow."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
