"""Loaders' pinning threads pause while a job is away, and continue, or end, afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from client_peer import PATIENCE_S, Peer, Rank, Script, Turns
from torch.utils.data._utils import pin_memory as pinning

from cadenza.sidecar import client

pause = threading.Event()


class Batch:
    """A batch of the user's own type, which pins itself when a loader's thread asks it to."""

    count = 0

    def pin_memory(self) -> Batch:
        Batch.count += 1
        return self


class Pinner(threading.Thread):
    """A loader's thread without its queues; torch starts its own only with a GPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.is_set():
            pinning.pin_memory([Batch(), {"label": Batch()}], "cuda")
            pause.wait(0.001)


@pytest.fixture
def pinner() -> Iterator[Pinner]:
    thread = Pinner()
    yield thread
    thread.ended.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def progress() -> int:
    """Return the number of batches pinned within a moment."""
    before = Batch.count
    pause.wait(0.02)
    return Batch.count - before


def test_no_batch_is_pinned_while_the_job_is_away(pinner: Pinner, job: Peer) -> None:
    seen: list[int] = []
    turns = Turns(job, [1], while_away=lambda cycle: seen.append(progress()))
    client.attach(torch.nn.Linear(2, 2))
    client.boundary()
    turns.finish()
    assert seen == [0]
    assert progress() > 0


def test_an_exception_in_the_wait_lets_the_thread_go_on(pinner: Pinner, job: Peer) -> None:
    """Otherwise an interpreter that ends would wait for a thread that waits for it."""

    class LeavingError(Exception):
        pass

    def leave(*_: object) -> None:
        raise LeavingError

    def agent() -> Rank:
        rank = job.rank(stop=1)
        rank.hear("arrived")
        rank.say("commit", order=1)
        rank.hear("yielded")
        os.kill(os.getpid(), signal.SIGUSR2)
        return rank

    def resumed(rank: Rank) -> None:
        rank.hear("yielded")
        rank.say("resume", order=1)
        rank.hear("resumed")

    before = signal.signal(signal.SIGUSR2, leave)
    script = Script(agent, job)
    client.attach(torch.nn.Linear(2, 2))
    with pytest.raises(LeavingError):
        client.boundary()
    signal.signal(signal.SIGUSR2, before)
    rank = script.finish()
    assert progress() > 0
    script = Script(lambda: resumed(rank), job)
    client.boundary()
    script.finish()


def test_detach_puts_torchs_own_function_back(job: Peer) -> None:
    original = pinning.pin_memory
    script = Script(job.rank, job)
    client.attach(torch.nn.Linear(2, 2))
    script.finish()
    assert pinning.pin_memory is not original
    assert pinning.pin_memory.__wrapped__ is original
    client.detach()
    assert pinning.pin_memory is original
