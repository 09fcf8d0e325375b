"""Ranks that come back to an agent which has given their job's GPUs away: they stop together, not one by one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from agent_rig import Agent, Child, until
from test_agent_turns import facts

pytestmark = pytest.mark.slow


def forgotten(agent: Agent, ranks: Sequence[Child], back: int) -> Child:
    """Have the agent forget a job that runs, and give GPU 0 to a newcomer before the first ranks are back."""
    for rank in ranks:
        rank.wait_for("run")
        rank.process.send_signal(signal.SIGSTOP)
    agent.down(signal.SIGKILL)
    saved = json.loads((agent.state / "leases.json").read_text())
    (agent.state / "leases.json").write_text(json.dumps({**saved, "leases": []}))
    agent.up()
    newcomer = agent.rank(2, "--gpus", "[0]")
    newcomer.wait_for("run")
    for rank in ranks[:back]:
        rank.process.send_signal(signal.SIGCONT)
    return newcomer


@pytest.fixture
def in_step(new_agent: Callable[..., Agent], tmp_path: Path) -> tuple[Agent, list[Child]]:
    """Return an agent that takes no turns, and two ranks of job 1 that wait for each other in each step."""
    agent = facts(new_agent(), slice_s=1000.0)
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(4096))
    flags = ("--gpus", "[0,1]", "--world", "2", "--shared", str(shared), "--iteration-s", "0.02", "--skew", "1")
    return agent, [agent.rank(1, *flags, "--rank", str(rank)) for rank in range(2)]


def test_they_stop_after_the_same_step_and_come_back_together(in_step: tuple[Agent, list[Child]]) -> None:
    agent, ranks = in_step
    newcomer = forgotten(agent, ranks, 2)
    assert ranks[0].wait_for("stopped")["step"] == ranks[1].wait_for("stopped")["step"]
    assert [rank.wait_for("attached", 2)["state"] for rank in ranks] == ["held", "held"], "nobody sits out alone"
    until(lambda: agent.leases()[1]["state"] == "yielded", "job 1 to be out")
    assert "its GPUs went to job 2; all its ranks stop at one boundary" in agent.log()
    assert newcomer.running
    newcomer.kill()
    for rank in ranks:
        rank.wait_for("run", 2)
    assert agent.leases()[1]["state"] == "held"


def test_nobody_else_gets_their_gpus_before_they_are_out(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), slice_s=1000.0)
    ranks = [agent.rank(1, "--gpus", "[0,1]", "--world", "2", "--rank", str(rank)) for rank in range(2)]
    newcomer = forgotten(agent, ranks, 1)  # without the other rank the first cannot be stopped
    ranks[0].wait_for("attached", 2)
    third = agent.rank(3, "--gpus", "[1]")
    assert third.wait_for("attached")["state"] == "yielded", "GPU 1 is in no lease, and in use"
    assert not third.said("run")
    newcomer.kill()
    until(lambda: agent.leases()[1]["state"] == "held", "the lease back once its GPUs are free")
    assert not third.said("run")
    assert not ranks[0].said("out")


def test_a_rank_alone_sits_out_by_itself(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), slice_s=1000.0)
    rank = agent.rank(1, "--gpus", "[0]")
    newcomer = forgotten(agent, [rank], 1)
    assert rank.wait_for("attached", 2)["state"] == "yielded"
    rank.wait_for("out")
    newcomer.kill()
    rank.wait_for("run", 2)
