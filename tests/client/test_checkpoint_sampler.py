"""The sampler yields every sample once per epoch, in the same global order, with any ranks and interruptions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from cadenza.sidecar import client
from cadenza.sidecar.client.checkpoints import MismatchError, ResumableSampler, checkpoint
from cadenza.sidecar.client.errors import UsageError


def step_of(samplers: list[ResumableSampler], iterators: list[Iterator[int]], batch: int) -> list[int]:
    """Take one step on all ranks; return its samples in global order."""
    parts = [[next(iterator) for _ in range(batch)] for iterator in iterators]
    for sampler in samplers:
        sampler.advance(batch)
    return [sample for turn in zip(*parts, strict=True) for sample in turn]


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**64), shuffle=st.booleans())
def test_any_sequence_of_world_sizes_sees_the_same_order(data: st.DataObject, seed: int, shuffle: bool) -> None:
    """Distribute a global batch of 12 over 1, 2, 3, 4, 6 or 12 ranks that change between steps."""
    epochs, steps = 2, 4
    whole = ResumableSampler(12 * steps, seed=seed, shuffle=shuffle, ranks=(0, 1))
    expected = []
    for epoch in range(epochs):
        whole.set_epoch(epoch)
        expected += list(whole)
    assert sorted(expected) == sorted(list(range(12 * steps)) * epochs)
    state: dict[str, Any] | None = None
    seen: list[int] = []
    while len(seen) < len(expected):
        size = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
        samplers = [
            ResumableSampler(12 * steps, seed=seed, shuffle=shuffle, ranks=(rank, size)) for rank in range(size)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        if not len(samplers[0]):  # restored at the end of an epoch, which gives nothing more
            assert [list(sampler) for sampler in samplers] == [[]] * size
        iterators = [iter(sampler) for sampler in samplers]
        left = (len(samplers[0]) or 12 * steps // size) * size // 12
        for _ in range(data.draw(st.integers(1, left))):
            seen += step_of(samplers, iterators, 12 // size)
        state = samplers[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
    assert seen == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 7, 10, 11])
def test_ranks_get_equally_many(length: int, drop_last: bool) -> None:
    parts = [list(ResumableSampler(length, drop_last=drop_last, ranks=(rank, 4))) for rank in range(4)]
    assert len({len(part) for part in parts}) == 1
    seen = [sample for part in parts for sample in part]
    if drop_last:
        assert len(seen) == len(set(seen)) == length - length % 4
    else:
        assert set(seen) == set(range(length))
        assert len(seen) == -(-length // 4) * 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_a_loader_that_reads_ahead_is_counted_by_what_was_handed_out(workers: int, drops: bool) -> None:
    data = TensorDataset(torch.arange(22))

    def batches(sampler: ResumableSampler) -> Iterator[list[int]]:
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers, drop_last=drops)
        for (batch,) in sampler.batches(loader):
            yield batch.tolist()

    straight = ResumableSampler(data, seed=2)
    expected = [*batches(straight), *batches(straight)]
    assert straight.epoch == 2
    assert len(expected) == 2 * (5 if drops else 6)
    sampler, seen = ResumableSampler(data, seed=2), []
    while sampler.epoch < 2:
        state = sampler.state_dict()
        sampler = ResumableSampler(data, seed=99)
        sampler.load_state_dict(state)
        for count, batch in enumerate(batches(sampler)):
            seen.append(batch)
            if count == 1:
                break
    assert seen == expected


def test_the_order_of_any_sampler_is_taken_and_is_one_of_seed_and_epoch() -> None:
    for make in (lambda: RandomSampler(range(20)), lambda: WeightedRandomSampler(torch.ones(20).tolist(), 20)):
        before = torch.get_rng_state()
        one, two, other = (ResumableSampler(make(), seed=seed) for seed in (1, 1, 2))
        assert list(one) == list(two) != list(other)
        one.set_epoch(1)
        assert list(one) != list(two)
        assert torch.equal(torch.get_rng_state(), before)


def test_set_epoch_keeps_the_position_in_the_epoch_at_hand() -> None:
    sampler = ResumableSampler(8, shuffle=False)
    sampler.advance(3)
    sampler.set_epoch(0)
    assert list(sampler) == [3, 4, 5, 6, 7]
    sampler.set_epoch(1)
    assert list(sampler) == list(range(8))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", range(9))
def test_the_end_of_an_epoch_is_the_old_epochs_and_its_own_work_is_done_once(
    at: int, workers: int, drop_last: bool
) -> None:
    """The state after each batch restores a run that does the same, the work at the end of each epoch too."""
    data = TensorDataset(torch.arange(10))

    def train(sampler: ResumableSampler, left: int) -> Iterator[tuple[str, Any]]:
        loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=workers, drop_last=drop_last)
        for epoch in range(sampler.epoch, 3):
            for (batch,) in sampler.batches(loader):
                yield "batch", batch.tolist()
                left -= 1
                if not left:
                    yield "saved", sampler.state_dict()
            yield "end of epoch", epoch
            assert (sampler.epoch, sampler.position, sampler.at_epoch_end) == (epoch + 1, 0, False)

    whole = [one for one in train(ResumableSampler(data, seed=1), at + 1) if one[0] != "saved"]
    first = []
    for kind, value in train(ResumableSampler(data, seed=1), at + 1):
        if kind == "saved":
            break
        first.append((kind, value))
    again = ResumableSampler(data, seed=9)
    again.load_state_dict(json.loads(json.dumps(value)))
    assert [*first, *train(again, -1)] == whole


def test_the_end_is_known_only_of_an_epoch_that_has_other_batches() -> None:
    sampler = ResumableSampler(8)
    loader = DataLoader(range(8), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    ends = [
        (sampler.epoch, sampler.position, sampler.at_epoch_end, sampler.handed_out) for _ in sampler.batches(loader)
    ]
    assert ends == [(0, 4, False, 1), (0, 8, True, 2)]
    single = ResumableSampler(8)
    for _ in single.batches(DataLoader(range(8), batch_size=8, sampler=single)):  # type: ignore[arg-type]
        assert (single.position, single.at_epoch_end) == (8, False)


def test_what_a_script_draws_or_seeds_at_the_beginning_of_an_epoch_is_not_done_again_in_its_middle(
    tmp_path: Any,
) -> None:
    data = TensorDataset(torch.arange(12))

    def train(keeper: Any, sampler: ResumableSampler, stop: int) -> list[float]:
        drawn: list[float] = []
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        for epoch in range(sampler.epoch, 2):
            torch.manual_seed(epoch)
            for _ in sampler.batches(loader):
                drawn.append(torch.rand(1).item())
                if len(drawn) == stop:
                    keeper.save(stop)
                    return drawn
        return drawn

    sampler = ResumableSampler(data)
    whole = train(None, sampler, -1)
    sampler = ResumableSampler(data)
    first = train(checkpoint(tmp_path, sampler=sampler), sampler, 5)
    sampler = ResumableSampler(data)
    keeper = checkpoint(tmp_path, sampler=sampler)
    keeper.restore()
    assert first + train(keeper, sampler, -1) == whole


def test_a_sampler_of_which_the_training_takes_nothing_is_refused(tmp_path: Any) -> None:
    """As where it was given to the keeper, and not to the loader."""
    sampler = ResumableSampler(12)
    session = client.attach()
    keeper = checkpoint(tmp_path, sampler=sampler)
    ready = []
    for step in range(3):
        keeper.at(step)
        session.boundary()
        keeper._learn()
        ready.append(keeper._registration.ready)
        sampler.used |= step == 1
    client.detach()
    assert ready == [False, False, True]


@pytest.mark.parametrize("kept", [True, False])
def test_a_sampler_made_anew_for_an_epoch_is_refused(tmp_path: Any, kept: bool) -> None:
    samplers = [ResumableSampler(4), ResumableSampler(4)]
    session = client.attach()
    keeper = checkpoint(tmp_path, sampler=samplers[0], own={"later": samplers[1]} if kept else None)
    ready = []
    for step, sampler in enumerate(samplers):
        sampler.advance(1)
        keeper.at(step)
        session.boundary()
        keeper._tell()
        ready.append(keeper._registration.ready)
    client.detach()
    assert ready == [True, kept]


def test_the_length_is_that_of_the_epoch_throughout_it() -> None:
    """So that ``i + 1 == len(loader)`` is the last batch, as with any other sampler."""
    sampler = ResumableSampler(10)
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    for _ in range(2):
        assert [len(loader) for _ in sampler.batches(loader)] == [5] * 5
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    assert [len(loader) for _ in sampler.batches(loader)] == [3] * 3, "the batches of this start"
    assert len(loader) == 5


@pytest.mark.parametrize("sets_epoch", [True, False])
@pytest.mark.parametrize("reads_epoch", [True, False])
def test_a_loop_that_leaves_its_epochs_early_is_not_ordered(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, sets_epoch: bool, reads_epoch: bool
) -> None:
    """A limit of batches is counted anew in each start; where steps are counted it does not matter."""
    sampler = ResumableSampler(12)
    loader = DataLoader(range(12), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    keeper = checkpoint(tmp_path, sampler=sampler)
    epochs = range(sampler.epoch if reads_epoch else 0, 2)
    ready = []
    for epoch in epochs:
        if sets_epoch:
            sampler.set_epoch(epoch)
        for number, _ in enumerate(sampler.batches(loader)):
            if number == 2:
                break
            keeper.at(4 * epoch + number)
            keeper._learn()
            ready.append(keeper._registration.ready)
    assert ready == [True, True, not reads_epoch, not reads_epoch]
    assert "before its end" not in caplog.text
    if reads_epoch and sets_epoch:  # the first limit after a restore in the middle cannot be known before
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": 4})
        sampler.left_early = False
        next(sampler.batches(loader))
        sampler.set_epoch(1)
        assert "has left epoch 0" in caplog.text


def test_a_loop_that_asks_for_just_so_many_batches_goes_on_with_the_next_epoch() -> None:
    sampler = ResumableSampler(4, shuffle=False)
    loader = DataLoader(range(4), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    seen = []
    for _ in range(2):
        batches = sampler.batches(loader)
        seen += [next(batches).tolist(), next(batches).tolist()]
        assert sampler.position == 4
    assert (seen, sampler.epoch) == ([[0, 1], [2, 3]] * 2, 1)


@pytest.mark.parametrize("again", [2, 4])
def test_an_epoch_that_is_over_is_over_on_any_number_of_ranks(again: int) -> None:
    sampler = ResumableSampler(10, drop_last=True, ranks=(0, 4))
    sampler.advance(2)  # two are left, which four ranks drop
    other = ResumableSampler(10, drop_last=True, ranks=(0, again))
    other.load_state_dict(sampler.state_dict())
    assert list(other) == []
    assert len(list(other)) == 10 // again


def test_who_counts_by_hand_is_told_once_how_the_end_of_an_epoch_is_left(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ResumableSampler(4)
    sampler.advance(4)
    assert sampler.state_dict() == sampler.state_dict()
    assert [record.getMessage() for record in caplog.records if "set_epoch(1)" in record.getMessage()] != []
    assert len(caplog.records) == 1
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.position) == (1, 0)


def test_a_position_without_a_count_is_not_saved(tmp_path: Any) -> None:
    sampler = ResumableSampler(8)
    next(iter(sampler))
    with pytest.raises(UsageError, match=r"use batches\(\) or advance\(\)"):
        checkpoint(tmp_path, sampler=sampler).save(1)
    sampler.advance(1)
    checkpoint(tmp_path, sampler=sampler).save(1)


def test_another_dataset_is_refused(tmp_path: Any) -> None:
    checkpoint(tmp_path, sampler=ResumableSampler(8)).save(1)
    with pytest.raises(MismatchError, match="sampler: the checkpoint has 8 samples, this job has 9"):
        checkpoint(tmp_path, sampler=ResumableSampler(9)).restore()


def test_a_loader_without_a_batch_size_is_refused() -> None:
    sampler = ResumableSampler(8)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    with pytest.raises(UsageError, match="call advance"):
        next(sampler.batches(loader))


class Cursor:
    """A sampler of another kind."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def test_another_kind_of_sampler_needs_plain_state(tmp_path: Any) -> None:
    cursor = Cursor({"at": 5})
    checkpoint(tmp_path, sampler=cursor).save(1)
    cursor.state = None
    checkpoint(tmp_path, sampler=cursor).restore()
    assert cursor.state == {"at": 5}
    for state in ({"at": {5}}, {"at": (5,)}):
        with pytest.raises(UsageError, match=r"sampler: its state_dict\(\)"):
            checkpoint(tmp_path, sampler=Cursor(state)).save(2)
