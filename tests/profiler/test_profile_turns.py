"""Points measured in turns: each search is asked anew with what all visits say, and drift cancels out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json, structs
from test_limits import every

from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.measure.interleave import measured, next_visit
from cadenza.profiler.measure.point import Point
from cadenza.profiler.model.batch_means import Window, estimate
from cadenza.profiler.model.bisection import next_point
from cadenza.profiler.model.roofline import Law

GRID = [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
LAW = Law(0.14, 0.28)


def point(turn, cpus, seconds, steps=10):
    return Point(cpus, seconds, 0.001, steps, 1.0, 0.1, turn=turn)


def visited(search, turns, speed):
    """Measure a job of the law on a machine that is ``speed(visit)`` times slower at each visit."""
    visits = []
    while (visit := next_visit(GRID, visits, search, turns)) is not None:
        visits.append(point(visit.turn, visit.cpus, LAW.time_s(visit.cpus) * speed(len(visits))))
    return visits


@given(st.integers(1, 6))
def test_each_turn_visits_every_point_once(turns):
    visits = visited(every, turns, lambda _: 1.0)
    assert [(each.turn, each.cpus) for each in visits] == [(turn, cpus) for turn in range(turns) for cpus in GRID[::-1]]


def test_one_turn_is_the_search_itself():
    known = {}
    while (cpus := next_point(GRID, known)) is not None:
        known[cpus] = LAW.time_s(cpus)
    assert {each.cpus: each.iteration_s for each in visited(next_point, 1, lambda _: 1.0)} == known


@given(st.lists(st.floats(0.6, 1.7), min_size=1, max_size=30), st.integers(1, 6))
def test_an_interrupted_profile_goes_on_where_it_was(speeds, turns):
    visits = visited(next_point, turns, lambda at: speeds[at % len(speeds)])
    for length, visit in enumerate(visits):
        following = next_visit(GRID, visits[:length], next_point, turns)
        assert following == (visit.turn, visit.cpus)
    assert {each.turn for each in visits} == set(range(turns))


def test_what_only_a_disturbance_asked_for_is_not_part_of_the_profile():
    visits = visited(next_point, 8, lambda at: 1.2 if at == 2 else 1.0)  # the knee looked like none
    asked = {each.cpus for each in visits if each.turn == 0}
    kept = {each.cpus for each in measured(visits, 0.02)}
    assert kept < asked
    assert kept == {each.cpus for each in visits if each.turn == 7}


def test_a_machine_that_gets_slower_is_the_same_for_all_points_on_average():
    visits = visited(every, 8, lambda at: 1 + at / 100)  # 55 % slower in the end
    times = {each.cpus: each.iteration_s / LAW.time_s(each.cpus) for each in measured(visits, 0.02)}
    assert max(times.values()) / min(times.values()) < 1.05
    one = {each.cpus: each.iteration_s / LAW.time_s(each.cpus) for each in visited(every, 1, lambda at: 1 + at / 12)}
    assert max(one.values()) / min(one.values()) > 1.4


def test_visits_count_by_their_steps_and_their_spread_is_the_interval():
    [one] = measured([point(0, 2.0, 0.1, 30), point(1, 2.0, 0.2, 10)], 0.02)
    assert one.iteration_s == pytest.approx(0.125)
    assert one.steps == 40
    assert one.spent_s == 2.0
    assert not one.settled
    assert one.half_s > 0.05


def test_alike_visits_are_settled_though_none_was_alone():
    visits = [structs.replace(point(turn, 2.0, 0.1), settled=False) for turn in range(3)]
    assert measured(visits, 0.02)[0].settled


def test_two_windows_have_an_interval_that_the_file_can_keep():
    found = estimate([Window(1.0, 10), Window(3.0, 10)])
    assert found.steps == 20
    assert found.half_s > 0
    state = State([], "here", points=[structs.replace(point(0, 2.0, 0.1), half_s=found.half_s)])
    assert json.decode(json.encode(state), type=State) == state
