"""The rank's side of the protocol when agents die, cancel, come late or refuse (scripted agent)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_peer import PATIENCE_S, Peer, Rank, slurm_environment

from cadenza.sidecar import wire

JOB = Path(__file__).with_name("client_job.py")
pause = threading.Event()


class Job:
    """A real process that runs client_job.py."""

    def __init__(self, peer: Peer, end: Path, *options: str) -> None:
        self.end = end
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), str(end), *options],
            env=slurm_environment(peer.path, SLURM_RESTART_COUNT="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[str, str]:
        self.end.touch()
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, err
        return out, err


@pytest.fixture
def start(peer: Peer, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs, and kill them at the end."""
    jobs: list[Job] = []

    def begin(*options: str) -> Job:
        jobs.append(Job(peer, tmp_path / "end", *options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def goes_on(rank: Rank, steps: int = 3) -> int:
    """Wait until the rank has made some more steps; return the step it had before."""
    before = rank.step
    for _ in range(int(PATIENCE_S / 0.005)):
        if rank.step >= before + steps:
            return before
        pause.wait(0.005)
    raise AssertionError(f"still at step {rank.step}")


def arrive(rank: Rank, order: int = 1) -> int:
    """Stop the rank a little later; return the step at which it stops."""
    rank.stop_at(rank.step + 3, order)
    message = rank.hear("arrived")
    assert message["order"] == order
    assert message["refused"] == ""
    assert rank.page[wire.PAGE_STATE] == wire.STATE_ARRIVED
    step: int = message["step"]
    return step


def yield_(rank: Rank, order: int = 1) -> int:
    """Take the lease; return the step at which the rank waits."""
    step = arrive(rank, order)
    rank.clear()
    rank.say("commit", order=order)
    assert rank.hear("yielded")["order"] == order
    assert rank.page[wire.PAGE_STATE] == wire.STATE_YIELDED
    return step


def test_identity_and_counters(peer: Peer, start: Callable[..., Job]) -> None:
    job = start()
    rank = peer.rank()
    wanted = {"job": 4711, "restart": 2, "rank": 0, "world_size": 1, "state": "running", "step": 0, "again": False}
    assert wanted.items() <= rank.hello.items()
    goes_on(rank, 10)
    out, err = job.finish()
    rank.hear("detach")
    assert rank.gone()
    words = rank.page.tolist()
    assert words[wire.PAGE_STEP] == int(out) == sum(words[wire.PAGE_FINE :][: wire.FINE_BUCKETS])
    assert words[wire.PAGE_SUM_NS] > int(out) * 3_000_000
    assert err == ""


def test_agent_lost_while_running(peer: Peer, start: Callable[..., Job]) -> None:
    start()
    rank = peer.rank()
    goes_on(rank)
    peer.die()
    peer = peer.come_back()
    again = peer.rank()
    assert again.hello["state"] == "running"
    assert again.hello["step"] >= 3
    assert again.hello["again"], "it does not stand still for the answer"
    goes_on(again)
    step = arrive(again)
    counted = sum(again.page.tolist()[wire.PAGE_FINE :][: wire.FINE_BUCKETS])
    assert counted == again.step == step  # the histogram moved to the new page with the steps
    peer.die()


def test_agent_lost_while_arrived(peer: Peer, start: Callable[..., Job]) -> None:
    start()
    step = arrive(peer.rank())
    peer.die()
    peer = peer.come_back()
    again = peer.rank()
    assert again.hello["state"] == "running"
    assert again.hello["step"] >= step
    goes_on(again)
    peer.die()


def test_agent_lost_while_yielded_twice(peer: Peer, start: Callable[..., Job]) -> None:
    job = start()
    step = yield_(peer.rank())
    for answer in ("yielded", "held"):
        peer.die()
        peer = peer.come_back(answer)
        rank = peer.rank()
        assert (rank.hello["state"], rank.hello["step"]) == ("yielded", step)
        pause.wait(0.05)
        assert rank.step == step  # never by itself
    rank.say("resume", order=9)
    rank.hear("resumed")
    goes_on(rank)
    job.finish()
    peer.die()


def test_agent_lost_in_mid_copy(peer: Peer, start: Callable[..., Job]) -> None:
    start()
    rank = peer.rank()
    step = arrive(rank)
    rank.say("commit", order=1)
    peer.die()
    peer = peer.come_back()
    again = peer.rank()
    if again.hello["state"] == "yielded":  # it depends on which the rank saw first
        assert again.hello["step"] == step
        again.say("resume", order=2)
        again.hear("resumed")
    goes_on(again)
    peer.die()


def test_stop_step_is_raised_then_withdrawn(peer: Peer, start: Callable[..., Job]) -> None:
    start()
    rank = peer.rank()
    step = arrive(rank, order=5)
    rank.say("commit", order=4)  # an older order's: void
    rank.stop_at(step + 2, order=5)
    assert rank.hear("arrived")["step"] == step + 2
    rank.say("cancel", order=5, reason="changed my mind")  # before the page says so
    goes_on(rank)
    rank.clear()
    rank.say("resume", order=5)  # a stray one must not end the next wait
    step = yield_(rank, order=6)
    pause.wait(0.05)
    assert rank.step == step
    rank.say("resume", order=7)
    rank.hear("resumed")
    goes_on(rank)


def test_time_away_is_in_no_iteration(peer: Peer, start: Callable[..., Job]) -> None:
    job = start()
    rank = peer.rank()
    yield_(rank)
    before = rank.page[wire.PAGE_SUM_NS]
    pause.wait(0.6)
    rank.say("resume", order=2)
    rank.hear("resumed")
    goes_on(rank, 2)
    rank.stop_at(1, order=3)
    rank.hear("arrived")
    assert rank.page[wire.PAGE_SUM_NS] - before < 600_000_000
    rank.clear()
    rank.say("cancel", order=3, reason="")
    job.finish()


@pytest.mark.parametrize("options", [(), ("--handler",)])
def test_sigterm_ends_a_job_that_is_away(peer: Peer, start: Callable[..., Job], options: tuple[str, ...]) -> None:
    job = start(*options)
    yield_(peer.rank())
    job.process.send_signal(signal.SIGTERM)
    out, _ = job.process.communicate(timeout=PATIENCE_S)
    assert (job.process.returncode, out) == ((7, "handled\n") if options else (-signal.SIGTERM, ""))


def test_without_the_lease_it_waits_before_its_first_step(peer: Peer, start: Callable[..., Job]) -> None:
    peer.answer = "yielded"
    start()
    rank = peer.rank()
    assert rank.hear("yielded")["order"] == 0
    pause.wait(0.05)
    assert rank.step == 0
    rank.say("resume", order=1)
    rank.hear("resumed")
    goes_on(rank)


def test_an_agent_that_comes_later_is_found(peer: Peer, start: Callable[..., Job]) -> None:
    peer.die()
    job = start()
    pause.wait(0.3)
    late = peer.come_back()
    rank = late.rank()
    goes_on(rank)
    yield_(rank)
    rank.say("resume", order=2)
    rank.hear("resumed")
    job.finish()
    late.die()


def test_a_refused_process_runs_as_without_an_agent(peer: Peer, start: Callable[..., Job]) -> None:
    job = start()
    peer.refuse("job 4711 belongs to uid 0")
    pause.wait(0.1)
    out, err = job.finish()
    assert int(out) > 3
    assert err.count("does not accept this process, which runs as without it: job 4711 belongs to uid 0") == 1
