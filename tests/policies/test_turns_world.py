"""Turns over time: no GPU twice, no starvation past the bound, no idle GPU past the bound, fair shares."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns_world import COPY_S, MIN_RUN_S, SLICE_S, TICK_S, World, gpus, key

from cadenza.policies.sharing.turns.fair_queue import MAX_FAIR_WAITS_BEHIND, Contender

ITERATIONS = (None, 0.5, 1.0, 3.0)
TURN_S = SLICE_S + MIN_RUN_S + 3.0 + COPY_S + 2 * TICK_S

gangs = st.sets(st.integers(0, 3), min_size=1).map(lambda indices: gpus(*indices))


@st.composite
def arrivals(draw: st.DrawFn, *, weights: tuple[float, ...] = (1.0,), drift: float = 0.0, preferred: bool = False):
    rows = draw(
        st.lists(
            st.tuples(
                st.floats(0, 60),
                gangs,
                st.sampled_from(weights),
                st.sampled_from(ITERATIONS),
                st.floats(1, 120),
                st.floats(0, drift),
                st.booleans() if preferred else st.just(value=False),
            ),
            min_size=2,
            max_size=7,
        )
    )
    return [
        (
            at,
            Contender(
                key=key(n),
                gpus=gang,
                weight=weight,
                iteration_s=iteration,
                ready=True,
                vtime_s=vtime,
                preferred=first,
            ),
            work,
        )
        for n, (at, gang, weight, iteration, work, vtime, first) in enumerate(rows)
    ]


@settings(max_examples=20, deadline=None)
@given(arrivals(drift=500.0))
def test_no_job_waits_past_the_stated_bound(rows):
    """Random gangs, arrivals, lengths and virtual times that mean nothing to each other."""
    world = World(rows).run(260)
    for job, wait in world.all_waits():
        assert wait.seconds <= 3 * wait.met * TURN_S, f"job {job.key} waited {wait.seconds} s"


@settings(max_examples=20, deadline=None)
@given(arrivals(drift=500.0, preferred=True), st.booleans())
def test_behind_preferred_jobs_none_waits_past_the_stated_bound(rows, successors):
    world = World([(at, job, 1 + work % 25) for at, job, work in rows], successors=successors).run(600)
    for job, wait in world.all_waits():
        assert wait.seconds <= 2 * MAX_FAIR_WAITS_BEHIND * wait.met * TURN_S, f"job {job.key} waited {wait.seconds} s"


def test_of_two_jobs_the_one_behind_has_a_ninth():
    rows = [(0.0, Contender(key=key(n), gpus=gpus(0), ready=True, preferred=n == 0), 1e9) for n in range(2)]
    world = World(rows).run(2000)
    assert 1 / 12 < world.held[key(1)] / world.held[key(0)] < 1 / 7


@settings(max_examples=25, deadline=None)
@given(arrivals(weights=(1.0, 2.0, 4.0), preferred=True))
def test_no_free_gpu_idles_past_the_stated_bound(rows):
    world = World(rows).run(200)
    assert all(wait.free_s <= TURN_S for _, wait in world.all_waits())


@settings(max_examples=20, deadline=None)
@given(arrivals(weights=(1.0, 2.0)), st.booleans())
def test_every_job_ends_when_arrivals_end(rows, displace):
    """Also with free GPUs only: then the jobs run one after the other."""
    total = sum(work for _, _, work in rows)
    world = World(rows, displace=displace)
    while (world.live or world.arrivals) and world.now < 60 + 3 * total + 100:
        world.step()
    assert not world.live


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_jobs_on_the_same_gpus_wait_for_the_others_turns_only(count):
    rows = [(0.0, Contender(key=key(n), gpus=gpus(0, 1), ready=True), 1e9) for n in range(count)]
    world = World(rows).run(400)
    # The last tick of waiting is the one in which the job is found to be next.
    assert max(wait.seconds for _, wait in world.all_waits()) <= (count - 1) * (SLICE_S + COPY_S + 2 * TICK_S)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from((1.0, 2.0, 3.0)), min_size=2, max_size=4))
def test_weights_are_respected_within_a_slice(weights):
    rows = [
        (0.0, Contender(key=key(n), gpus=gpus(0), weight=weight, ready=True, iteration_s=1.0), 1e9)
        for n, weight in enumerate(weights)
    ]
    world = World(rows).run(400)
    spread = SLICE_S + COPY_S + 3 * TICK_S + 1.0
    for one, two in itertools.combinations(range(len(weights)), 2):
        shares = world.held[key(one)] / weights[one], world.held[key(two)] / weights[two]
        assert abs(shares[0] - shares[1]) <= spread


@settings(max_examples=12, deadline=None)
@given(arrivals(drift=500.0))
def test_no_job_starves_behind_streams_of_newcomers(rows):
    """Every job that ends is followed at once by a new one, which starts with the least virtual time."""
    world = World([(at, job, 1 + work % 25) for at, job, work in rows], successors=True).run(400)
    for job, wait in world.all_waits():
        assert wait.seconds <= 3 * wait.met * TURN_S, f"job {job.key} waited {wait.seconds} s"


def test_a_gang_gets_its_turn_among_short_single_gpu_jobs_without_end():
    """The slices of the single-GPU jobs never end together: the gang must not wait for a lucky moment."""
    gang = (1.0, Contender(key=key(0), gpus=gpus(0, 1, 2, 3), ready=True), 1e9)
    singles = [(n * 1.7, Contender(key=key(n + 1), gpus=gpus(n % 4), ready=True), 6.0 + n % 5) for n in range(12)]
    world = World([gang, *singles], successors=True).run(800)
    waits = [wait for job, wait in world.all_waits() if job.key == key(0)]
    assert max(wait.seconds for wait in waits) <= 3 * 4 * TURN_S  # among 4 jobs on each GPU
    assert world.held[key(0)] >= 800 / 13 / 2


def test_a_job_from_an_idle_corner_cannot_keep_a_long_runner_away():
    """Jobs 0 and 1 never met; job 2 meets both, and starts with the least virtual time of the two."""
    rows = [
        (0.0, Contender(key=key(0), gpus=gpus(0), ready=True), 1e9),
        (500.0, Contender(key=key(1), gpus=gpus(1), ready=True), 1e9),
        (510.0, Contender(key=key(2), gpus=gpus(0, 1), ready=True), 1e9),
    ]
    world = World(rows).run(900)
    longest = max(wait.seconds for _, wait in world.all_waits())
    assert longest <= 3 * 3 * TURN_S
    assert min(world.held[key(n)] for n in (1, 2)) >= 390 / 2 - 4 * SLICE_S


def test_switching_costs_little_when_slices_are_the_rhythm():
    rows = [(0.0, Contender(key=key(n), gpus=gpus(0), ready=True, iteration_s=1.0), 1e9) for n in range(4)]
    world = World(rows).run(500)
    assert world.yields <= 500 / SLICE_S
