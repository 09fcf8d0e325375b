"""A save within a save is made after it, and a call that one rank does not make ends with the rank's name."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import fork, wait
from torch import distributed, nn

from cadenza.sidecar import client
from cadenza.sidecar.client.checkpoints import CheckpointError, checkpoint, files, periodic


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process outside Slurm, and without a session at the end."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield
    client.detach()


def steps_of(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("step-*"))


def in_the_middle(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Act once, when the next file is written."""
    original, left = files.write_new, [act]

    def write_new(path: Path, fill: Any) -> Any:
        if left and path.name == "shared.pt":
            left.pop()()
        return original(path, fill)

    monkeypatch.setattr(files, "write_new", write_new)


@pytest.mark.parametrize("background", [False, True])
def test_a_signal_handler_saves_after_the_save_that_it_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    model = nn.Linear(4, 4)
    keeper = checkpoint(tmp_path, model=model, background=background)
    before = signal.signal(signal.SIGUSR1, lambda *_: keeper.save(2))
    in_the_middle(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        keeper.save(1)
        keeper.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    keeper.wait()
    assert steps_of(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_handler_that_saves_and_ends_the_script_ends_it_after_both_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = checkpoint(tmp_path, model=nn.Linear(4, 4))

    def last(*_: object) -> None:
        keeper.save(2)
        raise SystemExit

    before = signal.signal(signal.SIGUSR1, last)
    in_the_middle(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        with pytest.raises(SystemExit):
            keeper.save(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps_of(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(("inner", "names"), [(2, ["step-00000001", "step-00000002"]), (1, ["step-00000001"])])
def test_a_save_of_another_thread_is_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: int, names: list[str]
) -> None:
    keeper = checkpoint(tmp_path, model=nn.Linear(4, 4))

    def other() -> None:
        thread = threading.Thread(target=keeper.save, args=(inner,))
        thread.start()
        thread.join()

    in_the_middle(monkeypatch, other)
    keeper.save(1)
    assert steps_of(tmp_path) == names


# --- ranks --------------------------------------------------------------------------------------------------


def rank(number: int, folder: Path, forgets: str) -> None:
    """Do what all ranks do, but for one call on rank 1; both end with an error that names rank 1."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/{forgets}", rank=number, world_size=2)
    told = ""
    try:
        if number == 1 and forgets == "client.checkpoint()":
            distributed.barrier()
        with checkpoint(folder / f"kept-{forgets}", model=nn.Linear(2, 2), patience_s=1) as keeper:
            keeper.save(1)
            if not (number == 1 and forgets == "restore()"):
                keeper.restore()
            if not (number == 1 and forgets == "save()"):
                keeper.save(2)
    except CheckpointError as error:
        told = str(error)
    if number == 0 and forgets == "client.checkpoint()":
        distributed.barrier()
    (folder / f"told-{forgets}-{number}").write_text(told)
    distributed.barrier()


FORGOTTEN = ("client.checkpoint()", "restore()", "save()")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what the ranks of all cases were told: they wait at the same time."""
    folder = tmp_path_factory.mktemp("told")
    assert wait(*(fork(rank, number, folder, forgets) for forgets in FORGOTTEN for number in range(2))) == [0] * 6
    return folder


@pytest.mark.parametrize("forgets", FORGOTTEN)
def test_a_rank_that_does_not_make_a_call_is_named(told: Path, forgets: str) -> None:
    first, second = ((told / f"told-{forgets}-{number}").read_text() for number in range(2))
    called = "rank 1 called save() where another rank called restore()"
    missing = f"rank 1 has not called {forgets} within 1 s: it is a collective call, which all ranks must make"
    if forgets == "restore()":
        assert called in first or "rank 0 called restore() where another rank called save()" in first
    else:
        assert first.startswith(missing)
        assert first.endswith("give client.checkpoint() a longer patience_s")
    assert second == ("" if forgets == "save()" else first)


def periodic_rank(number: int, folder: Path) -> None:
    """Train with periodic saves on clocks that differ by rank; only rank 0's is ever due."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    client.attach(model, optimizer)
    periodic.monotonic_ns = iter(range(0, 10**15, 10**9 if number == 0 else 1)).__next__
    periodic.MAX_STEPS = 2
    with checkpoint(folder / "kept", model=model, optimizer=optimizer) as keeper:
        keeper.every(minutes=0.02)
        for step in range(1, 17):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            distributed.all_reduce(next(model.parameters()).grad)
            optimizer.step()
            keeper.at(step)
            client.boundary()
    distributed.barrier()


def test_periodic_saves_are_taken_at_one_boundary_by_all_ranks(tmp_path: Path) -> None:
    assert wait(*(fork(periodic_rank, number, tmp_path) for number in range(2))) == [0, 0]
    found = [json.loads((path / "complete.json").read_text()) for path in (tmp_path / "kept").glob("step-*")]
    assert found
    assert all(one["world_size"] == 2 and one["step"] == one["boundaries"] for one in found)
