"""Moved jobs find what they were moved with, or say that they do not; and their output says when they leave."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Rank, Script

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.errors import LostCheckpointError
from cadenza.sidecar.client.session import arrival
from cadenza.sidecar.client.session.arrival import Arrival
from cadenza.sidecar.client.session.identity import Identity


class Moved(Arrival):
    """The arrival of a job's restart, with what it tells the agent."""

    def __init__(self, *paths: object, step: int = 30, restart: int = 1, first: int = 1, away_s: float = 46.2) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        super().__init__(lambda kind, **fields: bool(self.sent.append((kind, fields))) or True, lambda: None)
        self.begin(Identity(12, restart, 0, 1, None, "n1", 1, ()))
        receipt = {"restart": first, "step": step, "paths": [str(path) for path in paths], "away_s": away_s}
        self.hear(receipt if paths else {})

    def hear(self, receipt: dict[str, Any]) -> None:
        assert self.heed({"type": "receipt", "receipt": receipt})

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent]


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "_settled", set())


def test_the_checkpoint_of_the_receipt_is_found_and_the_output_says_where_the_job_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "step-00000030"
    moved = Moved(kept)
    moved.check(tmp_path, kept, 30)
    moved.restored(kept, 30)
    moved.at_boundary()
    assert moved.sent == [("restored", {"path": str(kept), "step": 30})]
    assert capfd.readouterr().err == "cadenza: continues at step 30 after 46 s\n"


@pytest.mark.parametrize(
    ("found", "step"),
    [(None, None), ("step-00000028", 28), ("../other/step-00000030", 30), ("../other/step-00000099", 99)],
    ids=["nothing", "an older one", "another folder", "a later one of another folder"],
)
def test_a_restore_that_finds_less_or_something_else_raises_with_both_names(
    tmp_path: Path, found: str | None, step: int | None
) -> None:
    kept, folder = tmp_path / "kept" / "step-00000030", tmp_path / "kept"
    path = None if found is None else folder / found
    with pytest.raises(LostCheckpointError) as error:
        Moved(kept).check(folder, path, step)
    assert f"job 12 was requeued with the checkpoint of step 30 in {kept}" in str(error.value)
    assert str(folder if path is None else path.resolve()) in str(error.value)


@pytest.mark.parametrize("found", ["step-00000030", "step-00000030.2", "step-00000031"])
def test_a_later_one_of_the_same_place_is_as_good(tmp_path: Path, found: str) -> None:
    Moved(tmp_path / "step-00000030").check(tmp_path, tmp_path / found, int(found[5:13]))


def test_a_later_start_must_find_at_least_as_much(tmp_path: Path) -> None:
    later = Moved(tmp_path / "a" / "last.pt", restart=3)
    later.check(tmp_path / "b", tmp_path / "b" / "last.pt", 31)
    with pytest.raises(LostCheckpointError):
        later.check(tmp_path / "b", tmp_path / "b" / "last.pt", 29)
    with pytest.raises(LostCheckpointError):
        later.check(tmp_path / "a", None, None)


def test_a_folder_by_another_name_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    Moved(tmp_path / "disk" / "step-00000030").check(tmp_path / "link", tmp_path / "link" / "step-00000030", 30)


def test_of_two_savers_both_must_find_theirs_and_one_that_came_later_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "step-00000030", tmp_path / "b" / "step-00000007"
    moved = Moved(first, second)
    moved.check(tmp_path / "a", first, 30)
    moved.restored(first, 30)
    moved.check(tmp_path / "c", None, None)
    with pytest.raises(LostCheckpointError, match="step-00000007"):
        moved.check(tmp_path / "b", None, None)
    moved.check(tmp_path / "b", second, 7)


def test_a_stage_that_is_over_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """A script with a keeper for each stage restores the first one's, and trains only after the second one's."""
    kept, first = tmp_path / "tuned" / "step-00000007", tmp_path / "trained" / "step-00000030"
    kept.mkdir(parents=True)
    moved = Moved(kept, step=7)
    moved.check(first.parent, first, 30)
    moved.restored(first, 30)
    with pytest.raises(LostCheckpointError, match="step-00000030"):
        moved.at_boundary()
    with pytest.raises(LostCheckpointError):
        moved.check(kept.parent, None, None)
    moved.check(kept.parent, kept, 7)
    moved.restored(kept, 7)
    moved.at_boundary()
    assert moved.kinds == ["restored"]


def test_a_rank_that_trains_without_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    moved = Moved(tmp_path / "step-00000030")
    moved.at_boundary()
    moved.at_boundary()
    assert moved.kinds == ["unrestored"]
    assert f"without having restored the checkpoint of step 30 in {tmp_path}" in moved.sent[0][1]["reason"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "it is not moved again" in caplog.text
    assert "continues" not in capfd.readouterr().err


def test_a_script_that_loads_something_else_may_and_is_not_moved_again(tmp_path: Path) -> None:
    moved = Moved(tmp_path / "step-00000030")
    moved.restored(tmp_path / "elsewhere" / "best.pt", 3)
    moved.check(tmp_path, None, None)
    moved.at_boundary()
    assert moved.kinds == ["unrestored"]
    assert "best.pt" in moved.sent[0][1]["reason"]


def test_a_script_with_a_load_of_its_own_says_so(tmp_path: Path) -> None:
    moved = Moved(tmp_path / "latest.pt")
    moved.restored(tmp_path / "latest.pt", 2)  # its own unit, epochs
    moved.at_boundary()
    assert moved.kinds == ["restored"]


def test_what_comes_after_the_first_boundary_counts_at_the_next_sample(tmp_path: Path) -> None:
    moved = Moved()
    moved._known, moved._done = False, False
    moved.at_boundary()
    assert moved.sent == []
    moved.hear({"restart": 1, "step": 30, "paths": [str(tmp_path / "x")], "away_s": 1.0})
    moved.at_boundary()
    assert moved.kinds == ["unrestored"]


def test_a_job_that_was_started_again_without_a_receipt_and_finds_nothing_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Moved().check(tmp_path, None, None)
    assert f"no checkpoint in {tmp_path}" in caplog.text
    caplog.clear()
    Moved(restart=0).check(tmp_path, None, None)
    assert caplog.text == ""


def test_the_wait_for_the_agents_word_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Moved()
    moved._known = False
    receipt = {"restart": 1, "step": 30, "paths": [str(tmp_path / "x")], "away_s": 1.0}
    threading.Timer(0.05, lambda: moved.hear(receipt)).start()
    assert str(moved.receipt()) == f"the checkpoint of step 30 in {tmp_path / 'x'}"
    silent = Moved()
    silent._known = False
    monkeypatch.setattr(arrival, "WORD_S", 0.05)
    assert silent.receipt() is None


# --- with an agent ---------------------------------------------------------------------------------------------


def train(keeper: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        keeper.at(step + 1)
        client.boundary()


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return client.checkpoint(tmp_path / "kept", model=model, optimizer=optimizer), model, optimizer


def leave(peer: Peer, then: str) -> Any:
    """Order a checkpoint for job 14 at step 8; the job goes on after it."""

    def script() -> dict[str, Any]:
        rank: Rank = peer.rank(8, wire.PURPOSE_CHECKPOINT)
        rank.hear("arrived")
        rank.say("commit", order=1, goal="gives its GPUs up for job 14")
        said = rank.hear("checkpointed")
        rank.clear()
        rank.say("cancel", order=1, reason=then)
        return said

    return Script(script, peer).finish


def test_a_job_says_for_whom_it_leaves_before_the_agent_hears_of_its_checkpoint(
    job: Peer, parts: tuple[Any, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    finish = leave(job, "job 14 does not need its GPUs now")
    client.attach(*parts[1:])
    train(*parts, steps=12)
    step = finish()["step"]
    first, second = (line for line in capfd.readouterr().err.splitlines() if line.startswith("cadenza: "))
    assert first.startswith(f"cadenza: gives its GPUs up for job 14; checkpoint of step {step} saved in 0.")
    assert first.endswith(" s; comes back by itself (`cadenza why 4711`)")
    assert second == "cadenza: goes on: job 14 does not need its GPUs now"


def test_a_moved_job_that_forgets_to_restore_is_reported_at_its_first_boundary(
    job: Peer, parts: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    job.receipt = {"restart": 1, "step": 8, "paths": [str(tmp_path / "kept" / "step-00000008")], "away_s": 0.0}
    finish = Script(lambda: job.rank().hear("unrestored"), job).finish
    session = client.attach(*parts[1:])
    train(*parts, steps=1)
    assert "step-00000008" in finish()["reason"]
    # The next boundaries are as quick as ever.
    assert session.memory_step > session.step


def test_a_keeper_that_finds_nothing_where_the_job_was_moved_raises_before_it_trains(
    job: Peer, parts: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    job.receipt = {"restart": 1, "step": 8, "paths": ["/run-1/kept/step-00000008"], "away_s": 0.0}
    script = Script(job.rank, job)
    client.attach(*parts[1:])
    with pytest.raises(LostCheckpointError, match="/run-1/kept/step-00000008"):
        parts[0].restore()
    script.finish()
