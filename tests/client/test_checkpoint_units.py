"""Units of the script's steps: a number is the script's own, and nothing is ordered before its meaning is known."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.sidecar import client, wire
from cadenza.sidecar.client.checkpoints import CheckpointError, Restored, ResumableSampler, checkpoint
from cadenza.sidecar.client.checkpoints.step_units import (
    BOUNDARY,
    NAMED_BACKWARDS,
    NAMED_TOO_EARLY,
    NAMED_TWICE,
    NO_UNIT,
    NOT_NAMED_AGAIN,
    OWN,
    Units,
)
from cadenza.sidecar.client.data import ElasticDataLoader
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.loader_workers import LIVING
from cadenza.sidecar.client.session.savers import Place


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process outside Slurm, and without a session at the end."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield
    client.detach()


class Job:
    """A training whose script numbers its saves in a way of its own."""

    def __init__(self, place: Path, **things: Any) -> None:
        client.detach()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.session = client.attach(self.model, self.optimizer)
        self.keeper = checkpoint(place, model=self.model, optimizer=self.optimizer, **things)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.train()
            client.boundary()

    @property
    def told(self) -> tuple[bool, bool, int | None]:
        """Whether checkpoints are ordered, whether only at the script's saves, and the step of one."""
        registration = self.keeper._registration
        return registration.ready, not registration.away, self.keeper.step


def test_before_the_script_has_named_a_step_nothing_is_ordered(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(30)
    assert job.told == (False, False, None)
    assert job.keeper._registration.unready == NO_UNIT


def test_a_script_that_numbers_epochs_is_asked_only_at_its_own_saves_after_a_restart_too(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(30)
    job.keeper.save(1)
    assert job.told == (True, True, None)
    again = Job(tmp_path)
    restored = again.keeper.restore()
    assert isinstance(restored, Restored)
    assert (restored, restored.step, restored.boundaries, restored.ordered) == (1, 1, 30, False)
    assert again.told == (True, True, None)
    again.steps(3)
    assert again.told == (True, True, None)


def after_the_boundary(job: Job, step: int) -> None:
    job.steps(1)
    job.keeper.save(step + 1)


def before_the_boundary(job: Job, step: int) -> None:
    job.train()
    job.keeper.save(step + 1)
    client.boundary()


def at_the_beginning(job: Job, step: int) -> None:
    job.keeper.save(step)
    job.steps(1)


@pytest.mark.parametrize("way", [after_the_boundary, before_the_boundary, at_the_beginning])
def test_a_script_whose_steps_are_boundaries_is_known_after_two_of_them(
    tmp_path: Path, way: Callable[[Job, int], None]
) -> None:
    job = Job(tmp_path)
    for step in range(4):
        way(job, step)
    job.steps(1)
    assert job.told == (True, False, 5)
    assert job.session.step == 5, "its own saves are no boundaries"
    again = Job(tmp_path)
    step = again.keeper.restore()
    assert step == (3 if way is at_the_beginning else 4)
    again.steps(2)
    assert again.told == (True, False, step + 2)


def test_a_name_after_the_boundary_is_found_out_with_accumulation_too(tmp_path: Path) -> None:
    """Between two steps of the optimizer nothing tells where a name stands."""
    job = Job(tmp_path)
    for micro in range(1, 13):
        job.model(torch.ones(2, 4)).sum().backward()
        if micro % 4 == 0:
            job.optimizer.step()
        client.boundary()
        job.keeper.at(micro)
    assert job.keeper._registration.unready == NAMED_TOO_EARLY


def named_by_the_step_just_done(job: Job, step: int) -> None:
    job.train()
    job.keeper.save(step)
    client.boundary()


def one_too_many(job: Job, step: int) -> None:
    job.steps(1)
    job.keeper.save(step + 2)


def two_boundaries_a_step(job: Job, step: int) -> None:
    job.steps(2)
    job.keeper.save(step + 1)


@pytest.mark.parametrize("way", [named_by_the_step_just_done, one_too_many, two_boundaries_a_step])
def test_a_script_that_counts_otherwise_is_asked_only_at_its_own_saves(
    tmp_path: Path, way: Callable[[Job, int], None]
) -> None:
    job = Job(tmp_path)
    for step in range(4):
        way(job, step)
    job.steps(1)
    assert job.told == (True, True, None)


def test_a_step_that_the_scaler_skipped_was_one(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    job = Job(tmp_path, scaler=scaler)
    for step in range(4):
        job.optimizer.zero_grad()
        loss = job.model(torch.ones(2, 4)).sum()
        (scaler.scale(loss) * (torch.inf if step == 2 else 1.0)).backward()
        scaler.step(job.optimizer)
        scaler.update()
        client.boundary()
        if step == 1:
            job.keeper.save(2)
    assert job.told == (True, False, 4)


def test_a_named_step_is_the_ordered_one_and_has_to_be_named_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train()
    job.keeper.at(70)
    client.boundary()
    assert job.told == (True, False, 70)
    job.keeper.save(70)
    again = Job(tmp_path)
    assert again.keeper.restore() == 70
    again.steps(1)
    assert again.told == (False, False, None)
    assert again.keeper._registration.unready == NOT_NAMED_AGAIN
    again.keeper.at(71)
    assert again.told == (True, False, 71)


def test_a_step_that_is_named_before_its_training_is_not_ordered(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in range(3):
        job.keeper.at(step)
        job.steps(1)
    assert job.told[0] is False
    assert job.keeper._registration.unready == NAMED_TOO_EARLY
    right = Job(tmp_path / "right")
    right.keeper.at(0)  # before the loop
    for step in range(3):
        right.train()
        right.keeper.at(step + 1)
        client.boundary()
    assert right.told == (True, False, 3)


def test_the_step_that_a_script_keeps_is_saved_as_a_number(tmp_path: Path) -> None:
    values: dict[str, Any] = {"began": 0}
    keeper = checkpoint(tmp_path, own=[values])
    keeper.save(4)
    values["began"] = keeper.restore()
    keeper.save(5)
    assert (keeper.restore(), values["began"], type(values["began"])) == (5, 4, int)


def epochs(job: Job, sampler: ResumableSampler, boundaries: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4, sampler=sampler)
    for _ in range(sampler.epoch, 2):
        for _ in sampler.batches(loader):
            job.steps(boundaries)


def test_one_batch_of_the_sampler_a_boundary_gives_the_unit(tmp_path: Path) -> None:
    sampler = ResumableSampler(12)
    job = Job(tmp_path, sampler=sampler)
    epochs(job, sampler, 1)
    assert job.told == (True, False, 6)
    saved = job.keeper._save_on_request()
    assert saved.step == 6
    sampler = ResumableSampler(12)
    again = Job(tmp_path, sampler=sampler)
    restored = again.keeper.restore()
    assert isinstance(restored, Restored)
    assert (restored, restored.epoch, restored.ordered, restored.boundaries) == (6, sampler.epoch, True, 6)
    assert restored.path == tmp_path / "step-00000006"
    again.steps(2)
    assert again.told == (True, False, 8)


def test_a_script_with_a_sampler_that_goes_on_from_the_step_as_its_epoch_is_not_ordered(tmp_path: Path) -> None:
    sampler = ResumableSampler(12)
    job = Job(tmp_path, sampler=sampler)
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4, sampler=sampler)
    for epoch in range(job.keeper.restore() or 0, 3):
        for _ in sampler.batches(loader):
            job.steps(1)
            assert job.told == (epoch > 0, epoch > 0, None)
        job.keeper.save(epoch + 1)
    assert job.told == (True, True, None)


def test_two_boundaries_a_batch_do_not(tmp_path: Path) -> None:
    sampler = ResumableSampler(12)
    job = Job(tmp_path, sampler=sampler)
    epochs(job, sampler, 2)
    with pytest.raises(CheckpointError, match="unit of steps is not known"):
        job.keeper._save_on_request()
    assert job.told == (False, False, None)


def test_a_step_may_be_numpys_and_not_a_fraction(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.keeper.at(np.int64(3))
    job.keeper.save(np.int32(3))  # type: ignore[arg-type]
    assert job.keeper.restore() == 3
    for call in (job.keeper.at, job.keeper.save):
        with pytest.raises(UsageError, match=r"step 0\.5 is not a whole number"):
            call(0.5)  # type: ignore[arg-type]


def test_restored_is_a_number() -> None:
    found = Restored(5, epoch=2, path=Path("/x"))
    assert (found + 1, list(range(found, 7)), repr(found), found or 3) == (6, [5, 6], "5", 5)
    assert bool(Restored(0)), "step 0 was restored, too"
    read = pickle.loads(pickle.dumps({"step": found}))["step"]  # noqa: S301
    assert (read, type(read)) == (5, int), "in a file of the script's own"


@pytest.mark.parametrize("name", ["epoch", "step in the epoch", "step", "step of an accumulation", "with a sampler"])
def test_names_tell_one_step_from_the_next(tmp_path: Path, name: str) -> None:
    sampler = ResumableSampler(100) if name == "with a sampler" else None
    job = Job(tmp_path, sampler=sampler)
    for step in range(12):
        numbers = {"epoch": step // 4, "step in the epoch": step % 4, "step of an accumulation": step // 2}
        if name == "step of an accumulation":
            job.model(torch.ones(2, 4)).sum().backward()
            if step % 2:
                job.optimizer.step()
        else:
            job.train()
        if sampler:
            sampler.advance(1)
        job.keeper.at(numbers.get(name, step // 4 if sampler else step))
        client.boundary()
    wrong = {"epoch": NAMED_TWICE, "step in the epoch": NAMED_BACKWARDS}
    assert job.keeper._registration.unready == wrong.get(name, "")


def test_a_name_is_of_one_step_alone(tmp_path: Path) -> None:
    """As of a script that names each tenth step, or each epoch, or has boundaries in its evaluation, too."""
    job = Job(tmp_path)
    named = []
    for step in range(1, 8):
        job.train()
        if step % 3 == 0:
            job.keeper.at(step)
        client.boundary(training=False)
        client.boundary()
        place = Place(training=True, in_step=False, own=None, evaluates_next=False, end_passed=False, stays=False,
                      gradients=lambda: 0)  # fmt: skip
        if job.keeper._registration.ready and job.keeper._may_save(place) == 0:
            named.append(job.keeper.step)
    assert named == [3, 6]
    assert job.keeper._may_save(place) == wire.PASSED_UNNAMED
    with pytest.raises(CheckpointError):
        job.keeper._save_on_request()


def test_a_boundary_that_was_not_seen_decides_nothing() -> None:
    trained = [4]
    units = Units(lambda: trained[0])
    trained[0] = 8
    units.saved(4)
    trained[0] = 10
    units.decide(changed=True)
    assert units.unit == ""
    units.saved(6)
    trained[0] = 11
    units.decide(changed=True)
    assert (units.unit, units.step) == (BOUNDARY, 7)
    units.saved(40)
    assert units.unit == OWN


def test_a_scaler_that_is_disabled_is_no_obstacle_to_the_look_after_a_save(tmp_path: Path) -> None:
    job = Job(tmp_path, scaler=torch.amp.GradScaler("cpu", enabled=False))
    job.steps(4)
    job.keeper.save(4)
    job.steps(2)
    assert job.told == (True, False, 6)


# --- periodic saves -----------------------------------------------------------------------------------------


def steps_of(place: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in place.glob("step-*"))


def test_periodic_saves_are_taken_at_save_points_with_the_scripts_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cadenza.sidecar.client.checkpoints.periodic.monotonic_ns", iter(range(0, 10**15, 10**9)).__next__
    )
    job = Job(tmp_path)
    job.keeper.every(minutes=1 / 60)
    for step in range(1, 41):
        job.optimizer.zero_grad()
        for _ in range(2):  # accumulates over two boundaries
            job.model(torch.ones(2, 4)).sum().backward()
            if job.session.trained % 2:
                job.optimizer.step()
                job.optimizer.zero_grad()
            job.keeper.at(100 + step)
            client.boundary()
    job.keeper.wait()
    found = steps_of(tmp_path)
    assert len(found) == 2
    assert all(100 < step <= 140 for step in found)
    restored = job.keeper.restore()
    assert isinstance(restored, Restored)
    assert (restored, restored.boundaries % 2) == (found[-1], 0)  # no gradients were pending
    job.keeper.close()


def test_without_a_known_unit_there_is_no_periodic_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cadenza.sidecar.client.checkpoints.periodic.monotonic_ns", iter(range(0, 10**15, 10**9)).__next__
    )
    job = Job(tmp_path)
    job.keeper.every(minutes=1 / 60)
    job.steps(20)
    assert steps_of(tmp_path) == []
    job.keeper.close()


@pytest.mark.parametrize("kind", ["kept", "new each epoch", "with a state of its own"])
def test_a_job_whose_loader_keeps_its_workers_is_refused_before_the_first_move(tmp_path: Path, kind: str) -> None:
    """Its workers' random numbers do not come back, and the loader draws once more after a restore."""
    make = ElasticDataLoader if kind == "with a state of its own" else DataLoader
    loader = make(TensorDataset(torch.zeros(4)), num_workers=1, persistent_workers=kind != "new each epoch")
    job = Job(tmp_path)
    job.train()
    job.keeper.at(1)
    client.boundary()
    reason = LIVING if kind == "kept" else ""
    assert job.keeper._registration.unready == reason
    del loader
