"""Gavel: the linear program's shares, and the types it chooses for a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import job, key
from strategies import GPU_TYPES, NOW, queues

from cadenza.policies.core.model import Progress
from cadenza.policies.core.profile import Profile
from cadenza.policies.ordering import gavel as module
from cadenza.policies.ordering.gavel import gavel
from cadenza.policies.ordering.las import las
from cadenza.policies.ordering.max_min_lp import normalized, time_shares
from cadenza.policies.ordering.ranking import Queue


def profile(**speeds: float) -> Profile:
    """A model with iterations of 1 s on a type of its own; ``speeds``: how much faster it is on others."""
    one = Profile("m", 1.0, (3.0,), (62.5,), ((1.0,),))
    siblings = {name: replace(one, iteration_s=1 / speed, gpu=name) for name, speed in speeds.items()}
    return replace(one, siblings=siblings)


def waits(number: int, model: Profile | None = None, gpus: int = 1, **facts):
    progress = Progress(at_s=NOW, total_s=1000.0, **facts)
    return job(number, state="PENDING", gpus=gpus, submit_s=NOW - 1000, profile=model, progress=progress)


def chosen(jobs, gpus) -> dict[int, str]:
    return {job_key.id: name for job_key, name in gavel(Queue(NOW, tuple(jobs), gpus)).gpu_type.items()}


def shares(speeds, gpus, counts, capacity) -> np.ndarray:
    return time_shares(*(np.array(values, dtype=float) for values in (speeds, gpus, counts, capacity)))


# --- the linear program --------------------------------------------------------------------------------


def test_one_type_is_an_equal_share_of_gpu_time():
    # Ten GPUs for 10 one-GPU and 5 two-GPU jobs: 2/3 of a GPU each.
    assert shares([[1.0], [3.0]], [1, 2], [10, 5], [10]) == pytest.approx(np.array([[2 / 3], [1 / 3]]))


def test_water_filling_gives_what_small_jobs_cannot_use_to_the_large_ones():
    # Two one-GPU jobs can have one GPU each; the two big ones share the other six of eight.
    found = shares([[1.0], [1.0], [1.0]], [1, 4, 8], [2, 1, 1], [8])
    assert found == pytest.approx(np.array([[1.0], [3 / 4], [3 / 8]]))


def test_who_gains_nothing_leaves_the_fast_type():
    found = shares([[1.0, 1.0], [10.0, 1.0]], [1, 1], [1, 1], [1, 1])
    assert found == pytest.approx(np.array([[0.0, 1.0], [1.0, 0.0]]))


def test_a_job_too_big_for_a_type_stays_off_it():
    found = shares([[4.0, 1.0], [4.0, 1.0], [1.0, 1.0]], [4, 1, 64], [1, 1, 1], [2, 8])
    assert found[0, 0] == 0.0
    assert found[0, 1] > 0.9
    assert found[2].tolist() == [0.0, 0.0]


SPEEDS = st.lists(st.sampled_from((0.25, 0.5, 1.0, 1.0, 2.0, 8.0)), min_size=2, max_size=2)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(SPEEDS, st.sampled_from((1, 2, 4)), st.integers(1, 50)), min_size=1, max_size=6),
    st.lists(st.integers(4, 64), min_size=2, max_size=2),
)
def test_shares_fit_and_nobody_is_worse_off_than_with_an_equal_split(classes, capacity):
    speeds, gpus, counts = (np.array(column, dtype=float) for column in zip(*classes, strict=True))
    room = np.array(capacity, dtype=float)
    found = time_shares(speeds, gpus, counts, room)
    assert (found >= 0).all()
    assert (found.sum(axis=1) <= 1 + 1e-6).all()
    assert ((gpus * counts) @ found <= room + 1e-6).all()
    reached = (normalized(speeds, gpus, room) * found).sum(axis=1)
    # Each job with its equal part of every type, as far as it has the time to use it, is a feasible plan.
    part = np.minimum(1 / gpus, room.sum() / counts.sum() / gpus)[:, None] * room / room.sum()
    scale = max((gpus * counts) @ part / room)
    assert reached.min() >= (normalized(speeds, gpus, room) * part / max(scale, 1.0)).sum(axis=1).min() - 1e-6


# --- the round -----------------------------------------------------------------------------------------


def test_the_fast_type_goes_to_the_job_that_gains():
    jobs = [waits(1, profile(a100=1.0)), waits(2, profile(a100=8.0)), waits(3)]
    assert chosen(jobs, {"a100": 1, "t4": 2}) == {1: "t4", 2: "a100", 3: "t4"}


def test_equal_jobs_take_turns_on_the_fast_type():
    model = profile(a100=4.0)
    gpus = {"a100": 1, "t4": 1}
    had_fast = waits(1, model, attained_s=300.0, gpu_type="a100")
    had_slow = waits(2, model, attained_s=300.0, gpu_type="t4")
    assert chosen([had_fast, had_slow], gpus) == {1: "t4", 2: "a100"}


def test_who_has_had_less_goes_first_and_the_rest_last():
    jobs = [waits(number, attained_s=100.0 * number, gpu_type="t4") for number in range(1, 6)]
    found = gavel(Queue(NOW, tuple(jobs), {"t4": 2}))
    assert [one.key.id for one in found.jobs] == [1, 2, 3, 4, 5]
    assert found.gpu_type == {key(1): "t4", key(2): "t4"}


def test_gpus_that_nobody_is_due_go_to_the_next_jobs_that_fit_on_their_fastest_type():
    jobs = [waits(1, gpus=4), waits(2, gpus=2), waits(3), waits(4)]
    speeds = [(1.0, 2.0), (1.0, 1.0), (1.0, 4.0), (9.0, 1.0)]
    left = [2, 3]
    assert module._use_up(jobs, [0, 1, 2, 3], speeds, left) == {1: 0, 2: 1, 3: 1}
    assert left == [0, 1]


@settings(max_examples=25)
@given(queues(gpu_types=GPU_TYPES))
def test_the_chosen_fit_and_come_first(found):
    ranking = gavel(found)
    held = dict.fromkeys(found.gpus, 0)
    for number, one in enumerate(ranking.jobs):
        assert (one.key in ranking.gpu_type) == (number < len(ranking.gpu_type))
        if one.key in ranking.gpu_type:
            held[ranking.gpu_type[one.key]] += one.gpus
    assert all(held[name] <= found.gpus[name] for name in held)
    left = {name: found.gpus[name] - held[name] for name in held}
    assert all(one.gpus > max(left.values()) for one in ranking.jobs[len(ranking.gpu_type) :])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=12), st.sampled_from((1, 2)))
def test_on_one_type_jobs_that_came_together_go_as_in_las(times, gpus):
    jobs = tuple(waits(number, gpus=gpus, attained_s=float(time)) for number, time in enumerate(times, start=1))
    found = Queue(NOW, jobs, {"": 2 * gpus})
    assert gavel(found).jobs == las(found).jobs


def test_on_one_type_time_counts_times_gpus():
    jobs = (waits(1, gpus=2, attained_s=100.0), waits(2, attained_s=150.0), waits(3, attained_s=250.0))
    assert [one.key.id for one in gavel(Queue(NOW, jobs, {"": 2})).jobs] == [2, 3, 1]  # job 1 no longer fits
    assert [one.key.id for one in gavel(Queue(NOW, jobs, {"": 3})).jobs] == [2, 1, 3]


@pytest.mark.slow
def test_over_many_rounds_the_time_received_approaches_the_shares():
    models = (profile(a100=1.0), profile(a100=2.0), profile(a100=10.0))
    jobs = {number: waits(number, models[number % 3], gpus=1 + number % 2) for number in range(1, 13)}
    gpus = {"a100": 4, "t4": 6}
    had = {number: dict.fromkeys(gpus, 0.0) for number in jobs}
    for elapsed in range(300, 300 * 201, 300):
        for one_key, name in gavel(Queue(NOW - 1000 + elapsed, tuple(jobs.values()), gpus)).gpu_type.items():
            had[one_key.id][name] += 300.0
        jobs = {number: replace(one, progress=_after(had[number])) for number, one in jobs.items()}
    classes, member = module._classify(list(jobs.values()), tuple(gpus))
    wanted = module._shares(classes, member, np.array([4.0, 6.0]))
    for number, kind in zip(jobs, member, strict=True):
        received = np.array(list(had[number].values())) / (300 * 200)
        assert received == pytest.approx(wanted[kind], abs=0.06)


def _after(had: dict[str, float]) -> Progress:
    return Progress(at_s=NOW, total_s=1e9, attained_s=sum(had.values()), gpu_type="t4", attained_on=dict(had))


def test_many_kinds_of_jobs_are_rounded_into_few_classes(monkeypatch):
    monkeypatch.setattr(module, "MAX_CLASSES", 4)
    jobs = [waits(number, profile(a100=1.0 + number / 1000)) for number in range(40)]
    classes, member = module._classify(jobs, ("a100", "t4"))
    assert len(classes) <= 4
    assert len(member) == 40
    assert len(chosen(jobs, {"a100": 3, "t4": 5})) == 8


def test_time_by_type_is_what_earlier_types_do_not_account_for():
    progress = Progress(at_s=NOW, attained_s=500.0, running=True, gpu_type="a100", attained_on={"t4": 200.0})
    assert progress.attained_by_type("t4", NOW + 10) == 200.0
    assert progress.attained_by_type("a100", NOW + 10) == 310.0
    assert Progress(at_s=NOW, attained_s=500.0).attained_by_type("a100", NOW) == 500.0
    assert isinstance(hash(progress), int)
