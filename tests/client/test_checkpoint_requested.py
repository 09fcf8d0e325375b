"""Checkpoints that Cadenza requests: at the common boundary, complete before the answer; the rank then waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from client_peer import Peer, Rank, Script
from torch import nn

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.checkpoints import ResumableSampler, SaveError
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.host import memory_limits
from cadenza.sidecar.client.offload.storages import survey
from cadenza.sidecar.client.session import checkpoint_request


class Training:
    """A model that is trained and saved; a run has ``steps`` boundaries."""

    def __init__(self, folder: Path, *, background: bool = False) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu")
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.keeper = client.checkpoint(
            folder, model=self.model, optimizer=self.optimizer, scaler=self.scaler, own=self.average,
            background=background,
        )  # fmt: skip
        self.losses: list[str] = []
        self.step = 0
        self.keeper.at(0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(2, 4)).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            for name, value in self.model.named_parameters():
                self.average[name].lerp_(value.detach(), 0.1)
            self.losses.append(loss.item().hex())
            self.step += 1
            self.keeper.at(self.step)
            client.boundary()


@pytest.fixture
def training(job: Peer, tmp_path: Path) -> Iterator[Training]:
    del job
    found = Training(tmp_path / "kept")
    yield found
    found.keeper.close()


def requested_by(peer: Peer, at: int, *, then: Callable[[Rank], None]) -> Callable[[], Any]:
    """Request a checkpoint at a step, act once it is there, and return the rank's messages."""

    def script() -> dict[str, Any]:
        rank = peer.rank(at, wire.PURPOSE_CHECKPOINT)
        arrived = rank.hear("arrived")
        if arrived["refused"]:
            rank.clear()
            rank.say("cancel", order=1, reason="refused")
            return arrived
        rank.say("commit", order=1)
        said = rank.hear("checkpointed")
        rank.clear()
        then(rank)
        return said

    return Script(script, peer).finish


def send_on(rank: Rank) -> None:
    rank.say("cancel", order=1, reason="go on")


def restored(folder: Path, steps: int, at: int = 5) -> tuple[Training, list[str]]:
    """Return the restored training of a new process, after some steps."""
    client.detach()
    again = Training(folder)
    assert again.keeper.restore() == at
    again.step = at
    again.run(steps)
    return again, again.losses


def test_a_restored_job_goes_on_bit_for_bit(job: Peer, training: Training, tmp_path: Path) -> None:
    finish = requested_by(job, 5, then=send_on)  # after 5 steps nothing is known of the gradients yet
    client.attach(training.model, training.optimizer)
    training.run(9)
    said = finish()
    assert (said["step"], said.get("error"), said.get("refused")) == (6, "", None)
    [place] = map(Path, said["paths"])
    assert (place / "complete.json").exists()
    assert said["bytes"] == sum(file.stat().st_size for file in place.iterdir() if file.name != "complete.json")
    _, losses = restored(tmp_path / "kept", 3, at=6)
    assert losses == training.losses[6:]


def test_a_request_at_the_first_boundary_is_not_refused_for_what_that_boundary_tells(job: Peer, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ResumableSampler(20, seed=1)
    loader = torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=4, sampler=sampler)
    keeper = client.checkpoint(tmp_path / "kept", model=model, optimizer=optimizer, sampler=sampler)
    keeper.restore()
    finish = requested_by(job, 1, then=send_on)
    session = client.attach(model, optimizer)
    assert sampler.epoch == 0
    for batch in sampler.batches(loader):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        session.boundary(len(batch))
    said = finish()
    keeper.close()
    assert (said.get("refused"), said.get("error")) == (None, "")


def test_a_rank_without_a_keeper_says_that_it_cannot(job: Peer) -> None:
    finish = requested_by(job, 1, then=send_on)
    session = client.attach()
    assert session.words[wire.PAGE_SAVES] == 0
    session.boundary()
    assert finish()["refused"] == checkpoint_request.NO_CHECKPOINT


def test_an_open_checkpoint_is_marked_in_the_page_and_a_closed_one_is_not(job: Peer, training: Training) -> None:
    taken = Script(job.rank, job)
    session = client.attach()
    rank = taken.finish()
    assert rank.page[wire.PAGE_SAVES] == wire.SAVES_AWAY
    training.keeper.close()
    assert session.words[wire.PAGE_SAVES] == 0


def test_a_failed_save_is_an_answer_and_training_goes_on(
    job: Peer, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SaveError("step 2 is not saved, earlier ones are untouched: shared.pt: No space left on device")

    monkeypatch.setattr("cadenza.sidecar.client.checkpoints.writing.Writer.write", full)
    finish = requested_by(job, 2, then=lambda rank: None)  # no answer: after an error the rank does not wait for one
    client.attach(training.model, training.optimizer)
    training.run(4)
    assert "No space left" in finish()["error"]


@pytest.mark.parametrize("end", [send_on, lambda rank: rank.connection.close()], ids=["sent on", "agent lost"])
def test_after_its_checkpoint_a_rank_stands_until_it_is_sent_on(
    job: Peer, training: Training, end: Callable[[Rank], None]
) -> None:
    seen: list[int] = []

    def then(rank: Rank) -> None:
        seen.append(rank.page[wire.PAGE_STATE])
        seen.append(rank.step)
        end(rank)

    finish = requested_by(job, 3, then=then)
    client.attach(training.model, training.optimizer)
    training.run(6)
    finish()
    assert seen == [wire.STATE_ARRIVED, 4]
    assert len(training.losses) == 6


def test_a_framework_may_save_after_the_boundary(job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.sidecar.client.session.save_points._any_optimizer", lambda: False)
    finish = requested_by(job, 1, then=send_on)
    session = client.attach()
    session.call(on_checkpoint=lambda: checkpoint_request.DEFERRED)
    session.boundary()
    session.checkpointed(str(tmp_path), step=40)
    said = finish()
    assert (said["step"], said["paths"], said["error"]) == (40, [str(tmp_path)], "")
    session.checkpointed("/shared/checkpoint-2")  # none was requested: nothing happens


# --- while the state is away --------------------------------------------------------------------------------


def attach(training: Training, **options: Any) -> Any:
    return client.attach(training.model, training.optimizer, training.scaler, tensors=training.average, **options)


def saved_away(peer: Peer, at: int) -> Callable[[], Any]:
    """Let the rank yield at a step, ask it for a checkpoint, resume it, and return its answer."""

    def script() -> dict[str, Any]:
        rank = peer.rank(at)
        rank.hear("arrived")
        rank.say("commit", order=1)
        assert rank.hear("yielded")["bytes"] > 0
        rank.say("save", order=2)
        answer = rank.hear("checkpointed")
        assert (rank.page[wire.PAGE_STATE], answer["order"]) == (wire.STATE_YIELDED, 2)
        rank.clear()
        rank.say("resume", order=3)
        rank.hear("resumed")
        return answer

    return Script(script, peer).finish


@pytest.fixture(params=["host memory", "disk"])
def spill(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Directory for the state when host memory is short, and whether it is."""
    if request.param == "disk":
        monkeypatch.setattr(memory_limits, "refusal", lambda *_: "host memory is short")
    return str(tmp_path)


def test_a_yielded_job_saves_its_host_copy_and_goes_on_bit_for_bit(
    job: Peer, training: Training, tmp_path: Path, spill: str
) -> None:
    finish = saved_away(job, 5)
    attach(training, spill=spill)
    training.run(9)
    said = finish()
    assert (said["step"], said["error"]) == (5, "")
    _, losses = restored(tmp_path / "kept", 4)
    assert losses == training.losses[5:]
    assert losses != training.losses[:4]


def test_a_save_away_copies_no_state_because_the_hosts_memory_may_be_short(job: Peer, tmp_path: Path) -> None:
    training = Training(tmp_path / "kept", background=True)
    finish = saved_away(job, 5)
    attach(training)
    training.run(9)
    assert finish()["error"] == ""
    assert training.keeper._staging._copies == {}
    training.keeper.close()
    _, losses = restored(tmp_path / "kept", 4)
    assert losses == training.losses[5:]


def test_a_job_that_was_never_asked_away_trains_the_same(job: Peer, training: Training, tmp_path: Path) -> None:
    finish = saved_away(job, 5)
    attach(training)
    training.run(9)
    finish()
    client.detach()
    alone = Training(tmp_path / "alone")
    alone.run(9)
    assert alone.losses == training.losses
    alone.keeper.close()


def test_without_a_training_step_there_is_no_checkpoint_to_save_away(job: Peer, training: Training) -> None:
    job.answer = "yielded"

    def script() -> dict[str, Any]:
        rank = job.rank()
        rank.hear("yielded")
        rank.say("save", order=1)
        answer = rank.hear("checkpointed")
        rank.say("resume", order=2)
        rank.hear("resumed")
        return answer

    finish = Script(script, job).finish
    attach(training)
    assert finish()["error"] == "it has not trained yet"


class Stopped(Exception):  # noqa: N818 - as a script's signal handler raises it
    """Ends the wait for the lease."""


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_script_that_saves_while_its_state_is_away_writes_the_host_copy(
    job: Peer, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    """A signal handler that raises ends the wait; state of a GPU stays away, because another job may have the GPU."""
    monkeypatch.setattr(Offload, "needs_gpu", property(lambda offload: offload.away))

    def script() -> None:
        rank = job.rank(3)
        rank.hear("arrived")
        rank.say("commit", order=1)
        rank.hear("yielded")
        rank.hear("yielded")  # a resume before it may be lost with the wait that was ended
        rank.say("resume", order=2)
        rank.hear("resumed")

    finish = Script(script, job).finish
    session = attach(training)

    def stopped(_: object) -> None:
        del session._await_resume
        raise Stopped

    session._await_resume = stopped
    with pytest.raises(Stopped):
        training.run(4)
    assert training.model.weight.untyped_storage().nbytes() == 0
    state = {"model": training.model, "optimizer": training.optimizer.state_dict(), "own": training.average}
    torch.save(state, tmp_path / "saved.pt", _use_new_zipfile_serialization=zipped)
    loaded = torch.load(tmp_path / "saved.pt", weights_only=False)
    training.keeper.save(3)
    session.words[wire.PAGE_STOP] = 0  # as the agent's next order to resume does
    session.boundary()  # waits again, and has its state back
    finish()
    torch.testing.assert_close(loaded["model"].state_dict(), training.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(loaded["own"], training.average, rtol=0, atol=0)
    moments = [state["exp_avg"] for state in training.optimizer.state.values()]
    torch.testing.assert_close([one["exp_avg"] for one in loaded["optimizer"]["state"].values()], moments)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    assert training.keeper.restore() == 3
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_distributed_checkpoint_is_written_from_the_host_copy_by_all_threads(tmp_path: Path, threads: int) -> None:
    state = {"small": torch.arange(1000.0), "square": torch.ones(3, 3), "large": torch.full((70_000,), 2.0)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    offload = Offload()
    offload.offload(survey([("state", state)]).segments)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads), no_dist=True)
    offload.restore()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


@pytest.mark.parametrize("back", [False, True], ids=["away", "back before it is written"])
def test_an_asynchronous_distributed_checkpoint_has_the_host_copy(tmp_path: Path, back: bool) -> None:
    module = nn.Linear(70, 1000)
    state = {"model": module.state_dict(), "own": [module.weight, torch.arange(5.0)]}
    expected = {"model": copy.deepcopy(module.state_dict()), "own": [module.weight.detach().clone(), torch.arange(5.0)]}
    offload = Offload()
    offload.offload(survey([("state", state)]).segments)
    future = dcp.async_save(state, checkpoint_id=tmp_path, no_dist=True)
    if back:
        offload.restore()
        nn.init.zeros_(module.weight)
    future.result()
    loaded = {"model": nn.Linear(70, 1000).state_dict(), "own": [torch.zeros(1000, 70), torch.zeros(5)]}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    if not back:
        offload.restore()
