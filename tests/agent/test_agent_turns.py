"""Yield and resume between scripted jobs under a real agent that is on its own (local rotation)."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rig import Agent, Child, until

from cadenza.sidecar import orders


def facts(agent: Agent, **fields: object) -> Agent:
    """Give the agent what the service told an earlier one: short slices."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = {"type": "Facts", "v": orders.VERSION, "jobs": [], "slice_s": 0.15, "share_between_users": True}
    agent.state.mkdir(exist_ok=True)
    saved = {"v": 1, "boot": boot, "facts": {**known, "enforce": True, "min_run_s": 0.05, **fields}}
    (agent.state / "leases.json").write_text(json.dumps(saved))
    return agent.up()


@pytest.fixture
def quick(new_agent: Callable[..., Agent]) -> Agent:
    """Return an agent that rotates every 0.15 s."""
    return facts(new_agent())


def never_together(children: list[Child]) -> None:
    """Assert that no two of these ever used their GPU at once.

    What they say is read one after the other: the end of a stretch may come later than the start of the next.
    """

    def apart() -> bool:
        stretches = sorted(stretch for child in children for stretch in child.stretches())
        return all(start >= end for (_, end), (start, _) in itertools.pairwise(stretches))

    until(apart, f"stretches apart, not {[child.stretches() for child in children]}")


def test_two_jobs_take_turns_and_never_meet(quick: Agent) -> None:
    jobs = [quick.rank(job, "--gpus", "[0]", "--copy-s", "0.01") for job in (1, 2)]
    for job in jobs:
        job.wait_for("run", 3)
    never_together(jobs)
    assert {lease["state"] for lease in quick.leases().values()} <= {"held", "stopping", "yielded"}
    assert "yielded JOBID=1" in quick.log()


@pytest.mark.slow
def test_the_other_goes_on_at_once_when_a_job_ends(quick: Agent) -> None:
    first = quick.rank(1, "--gpus", "[0]", "--steps", "5")
    first.wait_for("run")
    second = quick.rank(2, "--gpus", "[0]", "--steps", "100000")
    first.wait_for("done")
    second.wait_for("run")
    assert set(quick.leases()) == {2}


@pytest.mark.slow
def test_ranks_in_step_stop_after_the_same_step(quick: Agent, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(4096))
    flags = ("--gpus", "[0,1]", "--world", "3", "--shared", str(shared), "--iteration-s", "0.004", "--skew", "0.5")
    ranks = [quick.rank(1, *flags, "--rank", str(rank)) for rank in range(3)]
    for rank in ranks:
        rank.wait_for("run")
    other = quick.rank(2, "--gpus", "[1]")
    for rank in ranks:
        rank.wait_for("stopped", 3)
    for number in range(3):
        assert len({rank.said("stopped")[number]["step"] for rank in ranks}) == 1
    other.wait_for("run", 3)
    for rank in ranks:
        never_together([rank, other])


@pytest.mark.slow
def test_ranks_that_are_not_in_step_stop_together_too(quick: Agent) -> None:
    ranks = [
        quick.rank(1, "--gpus", "[0]", "--world", "2", "--rank", str(rank), "--first-step", str(first))
        for rank, first in ((0, 30), (1, 0))
    ]
    for rank in ranks:
        rank.wait_for("run")
    quick.rank(2, "--gpus", "[0]").wait_for("run")
    assert ranks[0].wait_for("stopped")["step"] == ranks[1].wait_for("stopped")["step"]


def test_a_job_that_did_not_opt_in_displaces_at_once(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), slice_s=1000.0, enforce=False)
    managed = agent.rank(1, "--gpus", "[0,1]")
    managed.wait_for("run")
    root = agent.talk()
    root.until_granted(root.start(2, [1], managed=False))
    managed.wait_for("out")
    assert agent.leases()[2]["state"] == "held"
    assert agent.leases()[1]["state"] == "yielded"
    root.send("end", job=2)
    managed.wait_for("run", 2)


@pytest.mark.slow
def test_without_enforcement_nobody_is_displaced(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), enforce=False)
    first = agent.rank(1, "--gpus", "[0]")
    first.wait_for("run")
    second = agent.rank(2, "--gpus", "[0]")
    assert second.wait_for("attached")["state"] == "yielded"
    with pytest.raises(AssertionError):
        until(lambda: first.said("out"), "a yield", 0.4)
    first.kill()
    second.wait_for("run", 1)


def test_a_refusal_leaves_the_job_running_and_is_named(quick: Agent) -> None:
    job = quick.rank(1, "--gpus", "[0]", "--refuse", "storage of layer3 is shared")
    job.wait_for("run")
    quick.rank(2, "--gpus", "[0]")
    assert job.wait_for("cancelled")["reason"] == "storage of layer3 is shared"
    assert quick.leases()[1]["state"] == "held", "on disk before it is said"
    assert job.running


def test_a_rank_that_does_not_come_is_given_up(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), yield_timeout_s=0.3)
    agent.rank(1, "--gpus", "[0]", "--deaf").wait_for("run")
    agent.rank(2, "--gpus", "[0]")
    until(lambda: "stop withdrawn JOBID=1 timeout: 1 of 1 had not arrived" in agent.log(), "a time-out")
    until(lambda: agent.leases()[1]["state"] == "held", "job 1 keeps its lease")


def test_a_stop_does_not_wait_for_a_step_that_only_the_process_s_last_training_would_have_reached(quick: Agent) -> None:
    quick.rank(1, "--gpus", "[0]", "--first-step", "1000000", "--anew").wait_for("run")
    quick.rank(2, "--gpus", "[0]").wait_for("run")
    assert "stop withdrawn JOBID=1 refused: its process attached anew" in quick.log()


def test_state_that_does_not_fit_into_the_host_is_not_moved(quick: Agent) -> None:
    job = quick.rank(1, "--gpus", "[0]", "--bytes", str(1 << 50))
    job.wait_for("run")
    quick.rank(2, "--gpus", "[0]")
    assert "host memory: its state takes" in job.wait_for("cancelled")["reason"]


@pytest.mark.slow
def test_a_failed_copy_brings_the_other_ranks_back(quick: Agent) -> None:
    ranks = [
        quick.rank(1, "--gpus", "[0]", "--world", "2", "--rank", str(rank), *flags)
        for rank, flags in ((0, ["--fail-copy", "--copy-s", "0.05"]), (1, []))
    ]
    for rank in ranks:
        rank.wait_for("run")
    quick.rank(2, "--gpus", "[0]")
    ranks[1].wait_for("run", 2)
    until(lambda: quick.leases()[1]["state"] == "held", "job 1 keeps its lease")
    assert "yield failed JOBID=1 rank=0: no room" in quick.log()


def test_an_incomplete_job_is_not_stopped(quick: Agent) -> None:
    half = quick.rank(1, "--gpus", "[0]", "--world", "2")
    half.wait_for("run")
    second = quick.rank(2, "--gpus", "[0]")
    second.wait_for("attached")
    with pytest.raises(AssertionError):
        until(lambda: half.said("out"), "a yield", 0.4)


@pytest.mark.slow
def test_killed_agent_comes_back_with_its_leases(quick: Agent) -> None:
    jobs = [quick.rank(job, "--gpus", "[0]", "--copy-s", "0.01") for job in (1, 2)]
    for job in jobs:
        job.wait_for("run", 2)
    before = [len(job.said("run")) for job in jobs]
    quick.down(signal.SIGKILL)
    for job in jobs:
        job.wait_for("eof")
    quick.up()
    for job, runs in zip(jobs, before, strict=True):
        job.wait_for("attached", 2)
        job.wait_for("run", runs + 2)
    never_together(jobs)
    assert "recovered JOBID=1" in quick.log()
    assert "recovered JOBID=2" in quick.log()


@pytest.mark.slow
def test_a_holder_goes_on_while_the_agent_is_away_and_the_other_waits(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), slice_s=1000.0)
    holder = agent.rank(1, "--gpus", "[0]")
    holder.wait_for("run")
    other = agent.rank(2, "--gpus", "[0]")
    assert other.wait_for("attached")["state"] == "yielded"
    agent.down(signal.SIGKILL)
    other.wait_for("eof")
    agent.up()
    assert holder.wait_for("attached", 2)["state"] == "held"
    assert other.wait_for("attached", 2)["state"] == "yielded"
    assert len(other.said("run")) == 0
    assert holder.stretches()[0][1] == float("inf")


@pytest.mark.slow
def test_jobs_that_ended_while_the_agent_was_away_are_forgotten(new_agent: Callable[..., Agent]) -> None:
    agent = facts(new_agent(), slice_s=1000.0)
    holder = agent.rank(1, "--gpus", "[0]")
    holder.wait_for("run")
    other = agent.rank(2, "--gpus", "[0]")
    assert other.wait_for("attached")["state"] == "yielded"
    agent.down(signal.SIGKILL)
    holder.kill()
    agent.up()
    other.wait_for("run")
    assert set(agent.leases()) == {2}
