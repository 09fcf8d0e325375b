"""A requested checkpoint waits for a boundary that has all of the training so far, and needs every saver."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Rank, Script
from test_checkpoint_requested import requested_by, send_on
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.checkpoints import ResumableSampler, round_trip
from cadenza.sidecar.client.data import ElasticDataLoader
from cadenza.sidecar.client.loader_workers import IDLE
from cadenza.sidecar.client.session import checkpoint_request, compiled_steps
from cadenza.sidecar.client.session.checkpoint_request import Saved
from cadenza.sidecar.client.session.job_session import Session
from cadenza.sidecar.client.session.savers import Place


@pytest.fixture
def no_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of other tests may still live in this process."""
    monkeypatch.setattr("cadenza.sidecar.client.session.save_points._any_optimizer", lambda: False)


class Kept:
    """A saver; ``at`` has the training steps at which it saved."""

    def __init__(self, session: Session, path: Path | str, **options: Any) -> None:
        self.session, self.path, self.at = session, path, list[int]()
        self.registration = session.add_saver(self.save, **options)

    def save(self) -> object:
        self.at.append(self.session.trained)
        return self.path


class Net:
    """A model and its optimizer, with the parts of a training step."""

    def __init__(self, size: int = 3) -> None:
        self.model = nn.Linear(size, size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self) -> None:
        self.model(torch.ones(2, self.model.in_features)).square().sum().backward()

    def step(self, *, to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)


def saved_at(
    job: Peer, folder: Path, first: int, train: Callable[[Session], None], state: Callable[[], tuple[object, ...]]
) -> tuple[int, int]:
    """Request a checkpoint at a boundary; return the one where it was taken, and why the last one was passed."""
    said: dict[str, Any] = {}

    def script() -> None:
        rank = job.rank(first, wire.PURPOSE_CHECKPOINT)
        said.update(wire.decode(rank.connection.recv(wire.MAX_PACKET)))
        if said["type"] == "detach":
            return
        rank.say("commit", order=1)
        rank.hear("checkpointed")
        rank.clear()
        send_on(rank)

    finish = Script(script, job).finish
    session = client.attach(None, None, *state())
    Kept(session, folder)
    train(session)
    passed = session.words[wire.PAGE_PASSED]
    client.detach()
    finish()
    return said.get("step", 0), passed


# --- where it is taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize(("first", "taken"), [(2, 4), (5, 8), (6, 8), (7, 8)])
def test_gradients_of_an_accumulation_are_never_left_behind(
    job: Peer, tmp_path: Path, first: int, taken: int, to_none: bool
) -> None:
    net = Net()

    def train(session: Session) -> None:
        for micro in range(1, 13):
            net.backward()
            if micro % 4 == 0:
                net.step(to_none=to_none)
            session.boundary()

    assert saved_at(job, tmp_path, first, train, lambda: (net.model, net.optimizer)) == (taken, 0)


def test_a_loss_that_grows_over_micro_batches_is_not_left_behind(job: Peer, tmp_path: Path) -> None:
    """There are no gradients in between: only the optimizer's step tells."""
    net = Net()

    def train(session: Session) -> None:
        loss = torch.zeros(())
        for micro in range(1, 9):
            loss = loss + net.model(torch.ones(1, 3)).sum()
            if micro % 4 == 0:
                loss.backward()
                net.step()
                loss = torch.zeros(())
            session.boundary()

    assert saved_at(job, tmp_path, 2, train, lambda: (net.model, net.optimizer)) == (4, 0)


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
def test_gradients_that_a_loop_clears_later_are_used_up_when_its_optimizer_has_stepped(
    job: Peer, tmp_path: Path, named: bool
) -> None:
    net = Net()

    def train(session: Session) -> None:
        for _ in range(4):
            net.optimizer.zero_grad()
            net.backward()
            net.optimizer.step()
            session.boundary()

    assert saved_at(job, tmp_path, 2, train, lambda: (net.model, net.optimizer) if named else ()) == (3, 0)


def test_a_backward_pass_after_the_step_is_pending(job: Peer, tmp_path: Path) -> None:
    net = Net()

    def train(session: Session) -> None:
        for _ in range(6):
            net.step()
            net.backward()
            session.boundary()

    assert saved_at(job, tmp_path, 2, train, lambda: (net.model, net.optimizer)) == (0, wire.PASSED_GRADIENTS)


def test_gradients_that_a_generator_leaves_in_a_discriminator_are_no_hindrance(job: Peer, tmp_path: Path) -> None:
    one, other = Net(), Net()

    def train(session: Session) -> None:
        for _ in range(4):
            one.optimizer.zero_grad()
            one.backward()
            one.optimizer.step()
            other.optimizer.zero_grad()
            one.model(other.model(torch.ones(1, 3))).sum().backward()
            other.optimizer.step()
            session.boundary()

    assert saved_at(job, tmp_path, 2, train, lambda: (one.model, other.model, one.optimizer)) == (3, 0)


@pytest.mark.parametrize(("first", "each", "taken"), [(2, 1, 3), (2, 3, 3), (3, 3, 6)])
def test_each_of_two_optimizers_must_have_used_its_gradients(
    job: Peer, tmp_path: Path, first: int, each: int, taken: int
) -> None:
    """The second one steps at every ``each``-th boundary, and its gradients grow in between."""
    one, other = Net(), Net()

    def train(session: Session) -> None:
        for step in range(1, 8):
            one.backward()
            one.step()
            other.backward()
            if step % each == 0:
                other.step()
            session.boundary()

    assert saved_at(job, tmp_path, first, train, lambda: (one.optimizer, other.optimizer)) == (taken, 0)


@pytest.mark.usefixtures("no_optimizers")
@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_an_own_update_rule_must_be_cleared(job: Peer, tmp_path: Path, clears: bool) -> None:
    model = nn.Linear(3, 3)

    def train(session: Session, *, clears: bool) -> None:
        for _ in range(40):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
            if clears:
                model.zero_grad()
            session.boundary()

    taken = saved_at(job, tmp_path, 2, lambda session: train(session, clears=clears), lambda: (model,))
    assert taken == ((2, 0) if clears else (0, wire.PASSED_UNKNOWN_GRADIENTS))


@pytest.mark.parametrize(("first", "taken"), [(6, 8), (10, 15), (11, 15), (12, 15)])
def test_a_checkpoint_waits_for_the_end_of_an_evaluation(job: Peer, tmp_path: Path, first: int, taken: int) -> None:
    """Also at the step before one, if they come at equal distances."""
    net = Net()

    def train(session: Session) -> None:
        for step in range(1, 13):
            net.backward()
            net.step()
            session.boundary()
            for _ in range(3 if step % 4 == 0 else 0):
                session.boundary(training=False)

    # Step 4 ends at boundary 4, and its evaluation has 5 to 7; step 8 ends at 11, and its evaluation has 12 to 14.
    assert saved_at(job, tmp_path, first, train, lambda: (net.optimizer,)) == (taken, 0)


@pytest.mark.parametrize(("ends", "taken"), [({3}, 4), ({3, 4}, 4)], ids=["one", "each"])
def test_the_last_batch_of_an_epoch_is_passed_where_there_is_another_save_point(
    job: Peer, tmp_path: Path, ends: set[int], taken: int
) -> None:
    net = Net()

    def train(session: Session) -> None:
        [registration] = session._savers
        registration.may = lambda place: place.obstacle(at_epoch_end=session.step in ends)
        for _ in range(5):
            net.backward()
            net.step()
            session.boundary()

    assert saved_at(job, tmp_path, 2, train, lambda: (net.optimizer,)) == (taken, 0)


def test_a_rank_that_decides_about_a_save_point_has_arrived_there_for_the_agent(job: Peer, tmp_path: Path) -> None:
    net, states = Net(), list[tuple[int, int]]()

    def train(session: Session) -> None:
        def may(place: Place) -> int:
            states.append((session.step, session.words[wire.PAGE_STATE]))
            return place.obstacle(at_epoch_end=session.step == 2)

        [registration] = session._savers
        registration.may = may
        for _ in range(4):
            net.backward()
            net.step()
            session.boundary()
            assert session.words[wire.PAGE_STATE] == wire.STATE_RUNNING, "a boundary that is passed is left"

    assert saved_at(job, tmp_path, 2, train, lambda: (net.optimizer,)) == (3, 0)
    assert states == [(2, wire.STATE_ARRIVED), (3, wire.STATE_ARRIVED)], "it would count as having slipped past it"


def test_an_optimizer_of_a_later_stage_is_named_when_a_checkpoint_is_requested(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_trip, "_told", set())
    net, session = Net(), client.attach()
    keeper = client.checkpoint(tmp_path, model=net.model, optimizer=net.optimizer)
    net.optimizer = torch.optim.Adam(net.model.parameters())
    for step in range(1, 4):
        net.backward()
        net.step()
        keeper.at(step)
        session.step += 1  # a boundary, but for its look
        passed = session.save_points.passes(session.trained, 1, lambda: True, session._place)
    client.detach()
    assert passed == 0
    assert "the state of an optimizer that steps (Adam)" in caplog.text


@pytest.mark.parametrize("kind", ["DataLoader", "workers", "ElasticDataLoader", "accelerate", "one batch"])
def test_the_last_batch_of_a_plain_loader_is_no_save_point(tmp_path: Path, kind: str) -> None:
    """A script that numbers its steps and skips what is behind would not do the work of that epoch's end again."""
    net, data = Net(), TensorDataset(torch.ones(8, 3))
    session = client.attach(net.model, net.optimizer)
    keeper = client.checkpoint(tmp_path, model=net.model, optimizer=net.optimizer)
    make: Any = ElasticDataLoader if kind == "ElasticDataLoader" else DataLoader
    loader: Any = make(data, batch_size=8 if kind == "one batch" else 2, num_workers=kind == "workers")
    if kind == "accelerate":
        loader = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(loader)
    place = Place(training=True, in_step=False, own=None, evaluates_next=False, end_passed=True, stays=False,
                  gradients=lambda: 0)  # fmt: skip
    kept = iter(DataLoader(data, batch_size=8))
    next(kept)
    for _ in range(IDLE):  # one that the script keeps is in nobody's way
        assert keeper._loader_ends.here()
    found = []
    for step, _ in enumerate(loader):
        net.backward()
        net.step()
        keeper.at(step)
        session.boundary()
        found.append(keeper._may_save(place))
    client.detach()
    assert found == [0] * (len(loader) - 1) + [wire.PASSED_EPOCH_END]


@pytest.mark.parametrize("asks", [True, False], ids=["asks for batches", "has left its loop"])
def test_a_step_ends_when_the_next_batch_is_asked_for(job: Peer, tmp_path: Path, asks: bool) -> None:
    """What follows the boundary in the step is done by then; a loop that asks for none is saved at its boundary."""
    net, done, sampler = Net(), list[str](), ResumableSampler(40)
    loader = DataLoader(range(40), batch_size=4, sampler=sampler)  # type: ignore[arg-type]

    def train(session: Session) -> None:
        [registration] = session._savers
        registration.save = lambda: done.append("saved") or tmp_path
        registration.may = lambda place: place.obstacle(before_next_batch=sampler.in_batches)
        sampler.on_next = session.next_batch
        for step, _ in enumerate(sampler.batches(loader), 1):
            for _ in range(1 if asks or step < 3 else 3):
                net.backward()
                net.step()
                session.boundary()
                done.append(f"boundary {session.step}")
            session.boundary(training=False)
            assert session.words[wire.PAGE_STATE] == (wire.STATE_ARRIVED if step == 3 and asks else 0)
            done.append(f"evaluated {step}")
            if step == (4 if asks else 3):
                break

    # Boundaries 1, 3 and 5 are training; without asking, 5, 6 and 7.
    assert saved_at(job, tmp_path, 3, train, lambda: (net.optimizer,)) == (6, 0)
    place = done.index("saved")
    assert done[place - 1] == ("evaluated 3" if asks else "boundary 5")


def test_a_request_that_is_withdrawn_before_the_next_batch_leaves_the_rank_running(job: Peer, tmp_path: Path) -> None:
    taken = Script(job.rank, job)
    session, net = client.attach(), Net()
    rank = taken.finish()
    kept = Kept(session, tmp_path, may=lambda place: place.obstacle(before_next_batch=True))
    rank.page[wire.PAGE_PURPOSE], rank.page[wire.PAGE_ORDER], rank.page[wire.PAGE_STOP] = wire.PURPOSE_CHECKPOINT, 1, 1
    for _ in range(2):
        net.backward()
        net.step()
        session.boundary()
    assert session.words[wire.PAGE_STATE] == wire.STATE_ARRIVED
    rank.clear()
    session.next_batch()
    assert session.words[wire.PAGE_STATE] == wire.STATE_RUNNING
    assert kept.at == []


def test_yields_stay_possible_at_every_boundary(job: Peer) -> None:
    def script() -> int:
        rank = job.rank(2)
        step = rank.hear("arrived")["step"]
        rank.clear()
        rank.say("cancel", order=1, reason="enough")
        return int(step)

    net = Net()
    finish = Script(script, job).finish
    session = client.attach(net.model, net.optimizer)
    net.backward()
    session.boundary()
    session.boundary(training=False)
    assert finish() == 2


def test_the_optimizers_are_followed_only_while_a_checkpoint_is_requested(job: Peer, tmp_path: Path) -> None:
    followers = compiled_steps._followers
    taken = Script(job.rank, job)
    net, session = Net(), client.attach()
    Kept(session, tmp_path)
    rank = taken.finish()
    session.boundary()
    session.words[wire.PAGE_STOP], rank.page[wire.PAGE_PURPOSE] = 1, wire.PURPOSE_CHECKPOINT
    rank.page[wire.PAGE_ORDER] = 1
    net.backward()
    session.boundary()
    assert len(followers) == 1
    rank.clear()  # the order is given back between two boundaries
    net.step()
    assert followers == []


# --- the script's own saves ---------------------------------------------------------------------------------


def test_a_script_with_a_unit_of_its_own_is_saved_at_its_own_saves(job: Peer, tmp_path: Path) -> None:
    """All keepers that count like that have just saved; the others save then."""
    finish = requested_by(job, 2, then=send_on)
    session = client.attach()
    other = Kept(session, tmp_path)
    epochs = [Kept(session, tmp_path / "never") for _ in range(2)]
    for kept in epochs:
        kept.registration.may = lambda place, of=kept.registration: place.own_save(of)
    assert session.words[wire.PAGE_SAVES] == wire.SAVES_AT_BOUNDARY
    for step in range(1, 9):
        session.boundary()
        if step % 3 == 0:
            for number, kept in enumerate(epochs):
                path = tmp_path / f"{number}-{step}"
                path.touch()
                session.own_save(kept.registration, partial(Saved, step // 3, 7, str(path)))
    said = finish()
    assert said["paths"] == [str(tmp_path), str(tmp_path / "0-3"), str(tmp_path / "1-3")]
    assert (said["step"], said["bytes"], said["error"]) == (5, 14, "")
    assert other.at == [3]
    assert epochs[0].at == epochs[1].at == []
    assert session.words[wire.PAGE_SAVE_EVERY] == 3


# --- all savers ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_optimizers")
@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "its saver returned no path: nothing says that a checkpoint is on the disk"),
        ("", "its saver returned no path: nothing says that a checkpoint is on the disk"),
        (Saved(3), "its saver returned no path: nothing says that a checkpoint is on the disk"),
        ("/nowhere/at all", "its saver returned /nowhere/at all, which does not exist"),
        (Saved(3, path="/nowhere"), "its saver returned /nowhere, which does not exist"),
        (OSError("disk full"), "disk full"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_every_saver_must_have_saved(job: Peer, tmp_path: Path, result: object, error: str, last: bool) -> None:
    def other() -> object:
        if isinstance(result, Exception):
            raise result
        return result

    finish = requested_by(job, 1, then=lambda rank: None)
    session = client.attach()
    for save in (lambda: tmp_path, other)[:: 1 if last else -1]:
        session.call(on_checkpoint=save)
    session.boundary()
    said = finish()
    assert (said["error"], said["paths"]) == (error, [])


@pytest.mark.usefixtures("no_optimizers")
def test_a_relative_path_is_made_absolute(job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    finish = requested_by(job, 1, then=send_on)
    session = client.attach()
    session.call(on_checkpoint=lambda: "here")
    session.boundary()
    assert finish()["paths"] == [str(tmp_path / "here")]


@pytest.mark.usefixtures("no_optimizers")
def test_a_rank_that_writes_nothing_waits_for_the_one_that_does(
    job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    looks = []

    def exists(path: Path) -> bool:
        looks.append(path)
        return len(looks) > 2 and os.path.lexists(path)

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr("cadenza.sidecar.client.session.job_session.PATHS_LOOK_S", 0.001)
    finish = requested_by(job, 1, then=send_on)
    session = client.attach()
    session.call(on_checkpoint=lambda: str(tmp_path))
    session.boundary()
    assert finish()["paths"] == [str(tmp_path)]
    assert len(looks) > 2


@pytest.mark.usefixtures("no_optimizers")
def test_a_checkpoint_is_complete_when_all_that_was_promised_is(job: Peer, tmp_path: Path) -> None:
    finish = requested_by(job, 1, then=send_on)
    session = client.attach()
    for _ in range(2):
        session.call(on_checkpoint=lambda: checkpoint_request.DEFERRED)
    session.call(on_checkpoint=lambda: tmp_path)
    session.boundary()
    for name in "ab":
        (tmp_path / name).touch()
        session.checkpointed(str(tmp_path / name))
    assert finish()["paths"] == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.usefixtures("no_optimizers")
def test_one_promise_that_is_broken_ends_it(job: Peer, tmp_path: Path) -> None:
    finish = requested_by(job, 1, then=lambda rank: None)
    session = client.attach()
    for _ in range(2):
        session.call(on_checkpoint=lambda: checkpoint_request.DEFERRED)
    session.boundary()
    session.checkpointed(error="no space")
    session.checkpointed(str(tmp_path))
    assert finish()["error"] == "no space"


def test_nothing_is_requested_while_one_saver_is_not_ready(job: Peer, tmp_path: Path) -> None:
    def script() -> str:
        rank: Rank = job.rank(1, wire.PURPOSE_CHECKPOINT)
        assert rank.page[wire.PAGE_SAVES] == 0
        assert rank.hear("unready")["reason"] == "its unit of steps is not known yet"
        refused = rank.hear("arrived")["refused"]
        rank.clear()
        rank.say("cancel", order=1, reason="refused")
        return str(refused)

    session = client.attach  # attached below, once the savers are there
    from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

    prepared = process.prepare()
    ready, other = Kept(prepared, tmp_path, away=True), Kept(prepared, tmp_path, away=True)
    assert prepared.words[wire.PAGE_SAVES] == wire.SAVES_AWAY
    other.registration.tell("its unit of steps is not known yet")
    finish = Script(script, job).finish
    attached = session()
    attached.boundary()
    assert finish() == "its unit of steps is not known yet"
    other.registration.withdraw()
    other.registration.withdraw()
    assert attached.words[wire.PAGE_SAVES] == wire.SAVES_AWAY
    ready.registration.withdraw()
    assert attached.words[wire.PAGE_SAVES] == 0


# --- while the state is away --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error"),
    [("each", ""), ("accumulation", "gradients are pending"), ("evaluation", "it is in an evaluation")],
)
def test_a_job_that_yielded_at_no_save_point_says_so(job: Peer, tmp_path: Path, place: str, error: str) -> None:
    net = Net()

    def script() -> str:
        rank = job.rank(7)
        rank.hear("arrived")
        rank.say("commit", order=1)
        rank.hear("yielded")
        rank.say("save", order=2)
        answer = rank.hear("checkpointed")
        rank.clear()
        rank.say("resume", order=3)
        rank.hear("resumed")
        return str(answer["error"])

    finish = Script(script, job).finish
    session = client.attach(net.model, net.optimizer)
    Kept(session, tmp_path, away=True)
    for step in range(1, 9):
        net.optimizer.zero_grad(set_to_none=False) if place != "accumulation" or step % 2 else None
        net.backward()
        if place != "accumulation" or step % 2 == 0:
            net.optimizer.step()
        session.boundary(training=place != "evaluation" or step != 7)
    said = finish()
    assert said.startswith(error)
    assert bool(said) == bool(error)
