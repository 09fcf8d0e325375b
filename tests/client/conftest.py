"""Fixtures of the client's tests: a job's environment, and a session that is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from client_peer import Peer, slurm_environment

from cadenza.sidecar import client


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """An agent to which nothing has attached yet."""
    agent = Peer(tmp_path / "agent.sock")
    yield agent
    agent.die()


@pytest.fixture
def job(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """This process as a job's only rank."""
    for key, value in slurm_environment(peer.path).items():
        monkeypatch.setenv(key, value)
    for key in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(key, raising=False)
    yield peer
    client.detach()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Two cores serve all: threads that wait for each other would make these tests slow."""
    torch.set_num_threads(1)
