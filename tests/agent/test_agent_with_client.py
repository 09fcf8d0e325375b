"""The real client in real jobs under the real agent (without tensors: moving those is the client's own test)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rig import Agent, until
from registered_job import registered
from test_agent_turns import facts

pytestmark = pytest.mark.slow

JOB = """
import sys, time
from cadenza.sidecar import client
out = open(sys.argv[1], "a", buffering=1)
session = client.attach()
while True:
    time.sleep(0.005)
    began = time.monotonic()
    session.boundary(8)
    print(began, time.monotonic(), session.step, file=out)
"""


def boundaries(path: Path) -> list[tuple[float, float, int]]:
    """Return when each boundary began and ended, and its step."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines if line.count(" ") == 2]
    return [(float(began), float(ended), int(step)) for began, ended, step in rows]


def waits(path: Path) -> int:
    """Return how often a job sat out at a boundary."""
    return sum(ended - began > 0.08 for began, ended, _ in boundaries(path))


def test_jobs_take_turns_through_an_agents_death(new_agent: Callable[..., Agent], tmp_path: Path) -> None:
    agent = facts(new_agent())
    outs = [tmp_path / f"job{job}" for job in (1, 2)]
    jobs = []
    for job, out in enumerate(outs, 1):
        environment = {**os.environ, "CADENZA_SOCKET": str(agent.socket), "SLURM_JOB_ID": str(job)}
        command = registered(agent.socket, job, [0, 1], sys.executable, "-c", JOB, str(out))
        jobs.append(subprocess.Popen(command, env=environment))
    try:
        for out in outs:
            until(lambda out=out: waits(out) >= 1, "a turn of the other")
        agent.down(signal.SIGKILL)
        before = [waits(out) for out in outs]
        agent.up()
        for out, earlier in zip(outs, before, strict=True):
            until(lambda out=out, earlier=earlier: waits(out) >= earlier + 2, "turns after the agent's death")
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert agent.leases()[1]["gpus"] == [0, 1]
    training = sorted((first[1], second[0]) for out in outs for first, second in itertools.pairwise(boundaries(out)))
    for (_, end), (start, _) in itertools.pairwise(training):
        assert start >= end - 1e-3, "two jobs trained at once"
    for out in outs:
        steps = [step for _, _, step in boundaries(out)]
        assert steps == list(range(1, len(steps) + 1))
