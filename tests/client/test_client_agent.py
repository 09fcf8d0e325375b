"""The client with the real agent: yield to a job that did not opt in, survive the agent, come back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_peer import PATIENCE_S, slurm_environment
from registered_job import registered

from cadenza.sidecar import wire

JOB = Path(__file__).with_name("client_job.py")
pause = threading.Event()


def until(condition: Callable[[], Any], what: str) -> None:
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"not in {PATIENCE_S} s: {what}")


class Agent:
    """A real agent process in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "agent.sock"
        keys = {"socket": self.socket, "state_dir": folder / "state", "host": "n1"}
        lines = [f'{key} = "{value}"' for key, value in keys.items()]
        (folder / "cadenza.toml").write_text("\n".join([f'agent.keys = "{folder}/keys"', "[expert]", *lines, ""]))
        self.up()

    def up(self) -> None:
        command = [sys.executable, "-m", "cadenza.sidecar.agent", "--config", str(self.folder / "cadenza.toml")]
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        until(self._listens, "an agent that listens")

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def down(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def say(self, kind: str, **fields: Any) -> socket.socket:
        """Register a job like the SPANK plugin; return the open connection."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(self.socket))
        connection.send(wire.encode(kind, **fields))
        return connection


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    running = Agent(tmp_path)
    yield running
    running.down(signal.SIGTERM)


@pytest.fixture
def ranks(agent: Agent, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of one job on GPU 0."""
    environment = slurm_environment(agent.socket, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    command = registered(agent.socket, 4711, [0], sys.executable, str(JOB), str(tmp_path / "end"))
    jobs = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    yield jobs
    for job in jobs:
        job.kill()
        job.communicate()


def start(agent: Agent) -> socket.socket:
    """Start job 9, which did not opt in, on the same GPU."""
    facts: dict[str, Any] = {"job": 9, "restart": 0, "uid": os.getuid(), "user": "u", "node": "n1", "lane": 0}
    return agent.say("start", **facts, gpus=[0], hosts=1, managed=False, step=0)


def granted(connection: socket.socket) -> bool:
    """Wait for the lease."""
    while True:
        message = wire.decode(connection.recv(wire.MAX_PACKET))
        assert message["type"] == "lease", message
        if message["state"] != "wait":
            return bool(message["state"] == "granted")


def test_ranks_give_way_survive_the_agent_and_come_back(
    agent: Agent, ranks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    until(lambda: agent.log().count("attached JOBID=") == 2, "two ranks attached")
    with start(agent) as plugin:
        assert granted(plugin)
        assert "yielded JOBID=" in agent.log()
        agent.down(signal.SIGKILL)
        agent.up()
        until(lambda: agent.log().count("attached JOBID=") == 4, "two ranks attached again")
        assert "resume JOBID=" not in agent.log()
    with agent.say("end", job=9, restart=0):
        until(lambda: "resume JOBID=" in agent.log(), "a resume")
    (tmp_path / "end").touch()
    for rank in ranks:
        out, _ = rank.communicate(timeout=PATIENCE_S)
        assert rank.returncode == 0
        assert int(out) > 0
