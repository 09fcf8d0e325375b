"""The service hears who else requeues a job: from the first attach, or when the rank finds out later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from agent_rig import Agent
from registered_job import registered
from test_agent_link import Service, service  # noqa: F401 - a fixture

from cadenza.sidecar import wire

JOB = """
import sys
from cadenza.sidecar.client.bootstrap import process
session = process.attach([])
sys.stdin.readline()
session.requeued_by("lightning")
sys.stdin.read()
"""


@pytest.fixture
def linked(new_agent: Callable[..., Agent], service: Service) -> Agent:  # noqa: F811
    """Return an agent of the service."""
    return new_agent(service=f"tcp://127.0.0.1:{service.port}").up()


def test_the_owner_is_in_the_lease_report(linked: Agent, service: Service) -> None:  # noqa: F811
    job = {"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "slurm"}
    command = registered(linked.socket, 7, [0], sys.executable, "-c", JOB)
    environment = {**os.environ, **job, wire.SOCKET_ENV: str(linked.socket)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True) as rank:
        assert service.lease(7, lambda lease: lease.ranks).requeue_owner == "submitit"
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert service.lease(7, lambda lease: lease.requeue_owner == "lightning").ready
        rank.stdin.close()
