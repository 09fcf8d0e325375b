"""A move is complete or undone before the exception of a signal handler leaves it, wherever the signal arrives."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Script
from interrupts import Instructions, Interrupted, raising_handlers

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.errors import RestoreError
from cadenza.sidecar.client.offload.engine import Offload, Transfer
from cadenza.sidecar.client.offload.held_signals import HeldSignals
from cadenza.sidecar.client.offload.storages import Segment
from cadenza.sidecar.client.session import job_session

COUNTS = [12, pytest.param(200, marks=pytest.mark.slow)]
SIGNALS = [signal.SIGUSR1, signal.SIGINT]
INTERRUPTS = (Interrupted, KeyboardInterrupt)


@pytest.fixture
def handlers() -> Iterator[None]:
    with raising_handlers():
        yield


def content() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(size, generator=generator) for size in (1, 700, 90_001, 300_000, 17)]


def complete(tensors: list[torch.Tensor]) -> bool:
    sizes = all(tensor.untyped_storage().nbytes() == 4 * tensor.numel() for tensor in tensors)
    return sizes and all(torch.equal(now, then) for now, then in zip(tensors, content(), strict=True))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_an_interrupted_move_loses_nothing(
    handlers: None, tmp_path: Path, count: int, spilled: bool, back: bool
) -> None:
    tensors = content()
    segments = [Segment("", tensor.untyped_storage(), 4 * tensor.numel()) for tensor in tensors]
    saver = torch.serialization._save  # type: ignore[attr-defined]
    draw = random.Random(f"{spilled} {back}")  # noqa: S311

    def moved(at: int, number: int, *, moves: bool) -> tuple[int, bool]:
        """Move out and back with a signal in one of the two; return its instructions, and if an exception left it."""
        offload = Offload()
        offload.spill_to = str(tmp_path) if spilled else ""
        if back:
            offload.offload(segments)
        raised, move = False, offload.restore if back else lambda: offload.offload(segments)
        instructions = Instructions(at, number, moves=moves)
        try:
            with instructions:
                move()
        except INTERRUPTS:
            raised = True
        empty = [tensor.untyped_storage().nbytes() == 0 for tensor in tensors]
        assert all(empty) if offload.away else complete(tensors)
        assert (torch.serialization._save is not saver) == offload.away  # type: ignore[attr-defined]
        if offload.away:
            offload.restore()
        assert complete(tensors)
        return instructions.count, raised

    whole = [moved(-1, signal.SIGUSR1, moves=moves)[0] for moves in (False, True)]
    for moves in [False, True] * (count // 2):
        assert moved(draw.randrange(1, whole[moves]), draw.choice(SIGNALS), moves=moves)[1]


def test_each_handler_that_waited_runs_although_the_first_raises(handlers: None) -> None:
    def both() -> None:
        with HeldSignals(), HeldSignals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        both()
    assert isinstance(caught.value.__context__, Interrupted)


def obliging(job: Peer, told: list[dict[str, Any]]) -> None:
    """Answer a rank as an agent does that wants it to yield and then to resume, until it detaches."""
    rank = job.rank()
    while (message := wire.decode(rank.connection.recv(wire.MAX_PACKET)))["type"] != "detach":
        told.append(message)
        if message["type"] == "arrived":
            rank.say("commit", order=message["order"])
        elif message["type"] == "yielded":
            rank.page[wire.PAGE_STOP] = 0
            with contextlib.suppress(BrokenPipeError):  # the rank followed an earlier one, and has detached
                rank.say("resume", order=message["order"])


def order(session: job_session.Session, number: int) -> None:
    session.words[wire.PAGE_PURPOSE], session.words[wire.PAGE_ORDER] = wire.PURPOSE_YIELD, number
    session.words[wire.PAGE_STOP] = 1


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("needs_gpu", [False, True])
def test_no_boundary_is_left_for_training_without_the_state(
    handlers: None, job: Peer, monkeypatch: pytest.MonkeyPatch, count: int, needs_gpu: bool
) -> None:
    """State of a GPU stays away after an interrupt, and the next boundary waits for it, whatever the page says."""
    monkeypatch.setattr(Offload, "needs_gpu", property(lambda offload: needs_gpu and offload.away))
    tensors, told = content(), list[dict[str, Any]]()
    finish = Script(lambda: obliging(job, told), job).finish
    session = client.attach(tensors=tensors)
    draw = random.Random(needs_gpu)  # noqa: S311
    whole = []
    for moves in (False, True):
        order(session, 1 + moves)
        with Instructions(moves=moves) as instructions:
            session.boundary()
        whole.append(instructions.count)
    for number in range(3, count + 3):
        order(session, number)
        moves = number % 2 == 0
        try:
            with Instructions(draw.randrange(1, whole[moves]), draw.choice(SIGNALS), moves=moves):
                session.boundary()
        except INTERRUPTS:
            assert complete(tensors) == (not (needs_gpu and session.out))
        if session.out:
            session.words[wire.PAGE_STOP] = 0  # as the agent's next order to resume does
        session.boundary()
        assert not session.out
        assert complete(tensors)
    client.detach()
    finish()
    assert told[-1]["type"] == "resumed"


@pytest.mark.parametrize(
    ("way", "kinds"), [("offload", ["arrived", "yielded"]), ("restore", ["arrived", "yielded", "resumed"])]
)
def test_a_signal_in_a_move_waits_until_the_agent_has_heard_of_it(
    handlers: None, job: Peer, monkeypatch: pytest.MonkeyPatch, way: str, kinds: list[str]
) -> None:
    tensors, told, resumed = content(), list[dict[str, Any]](), []
    original = getattr(Transfer, way)

    def interrupted(transfer: Transfer) -> None:
        signal.raise_signal(signal.SIGUSR1)
        original(transfer)

    monkeypatch.setattr(Offload, "needs_gpu", property(lambda offload: offload.away))
    finish = Script(lambda: obliging(job, told), job).finish
    session = client.attach(tensors=tensors)
    session.call(on_resume=lambda: resumed.append(1))
    order(session, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, way, interrupted)
        with pytest.raises(Interrupted):
            session.boundary()
    assert session.out == (way == "offload")
    session.boundary()
    assert resumed == [1]
    client.detach()
    finish()
    assert [message["type"] for message in told][: len(kinds)] == kinds
    assert len(told) == len(kinds) + 2 * (way == "offload")  # "yielded" again, and "resumed"


def test_a_gpu_without_room_lets_the_job_wait_on(job: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent hears it after some tries, and sends ``resume`` again when there may be room."""
    monkeypatch.setattr(job_session, "RESTORE_RETRIES", 2)
    monkeypatch.setattr(job_session, "RESTORE_RETRY_S", 0.001)
    tensors, told, failures = content(), list[dict[str, Any]](), iter(range(8))
    original = Transfer._refill

    def refill(transfer: Transfer, plan: Any) -> None:
        if next(failures, None) is not None:
            original(transfer, plan[:1])
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        original(transfer, plan)

    monkeypatch.setattr(Transfer, "_refill", refill)
    finish = Script(lambda: obliging(job, told), job).finish
    session = client.attach(tensors=tensors)
    order(session, 1)
    session.boundary()
    assert complete(tensors)
    client.detach()
    finish()
    assert [message["type"] for message in told] == ["arrived", *["yielded"] * 3, "resumed"]
    assert told[2]["no_room"].startswith("no room for 1 MiB of state: CUDA out of memory")


def test_an_error_that_is_no_lack_of_room_leaves_the_boundary_of_one_of_several_ranks(
    job: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have their state back, and wait for this one."""
    monkeypatch.setattr(job_session, "RESTORE_RETRY_S", 0.001)
    monkeypatch.setattr(job_session, "FAILURES_BORNE", 2)
    tensors, told = content(), list[dict[str, Any]]()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setattr(Offload, "needs_gpu", property(lambda offload: offload.away))
    finish = Script(lambda: obliging(job, told), job).finish
    session = client.attach(tensors=tensors)
    order(session, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "_refill", lambda *_: torch.ones(2).reshape(3))
        with pytest.raises(RestoreError, match="cannot come back: shape"):
            session.boundary()
    assert session.out
    client.attach()  # waits, as a boundary does
    assert complete(tensors)
    client.detach()
    finish()
    failures = [message["failed"] for message in told if message.get("failed")]
    assert len(failures) == 2, "in between all ranks could save a checkpoint"
    assert failures[0].startswith("1 MiB of state cannot come back: shape")
