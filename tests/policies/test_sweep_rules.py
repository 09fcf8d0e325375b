"""Trials that a sweep's rules stop, and those that they never stop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.sweep.learning_curve import Trial, judge, put_behind, scored
from cadenza.policies.sweep.stopping_rules import asha_rule, curve_rule, median_rule, predict

RULES = {"median": median_rule(3), "asha": asha_rule(2, 3.0, 3), "curve": curve_rule(100, None)}
EVERYBODY = {"all": lambda trials: {trial.number: "says the user's function" for trial in trials}}
VALUES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
STEPS = st.lists(st.integers(0, 60), max_size=8, unique=True).map(sorted)


@st.composite
def fields(draw):
    """Trials with curves of any shape and length."""
    lengths = draw(st.lists(STEPS, min_size=1, max_size=12))
    return [
        Trial(number, tuple((step, draw(VALUES)) for step in steps), draw(st.booleans()))
        for number, steps in enumerate(lengths)
    ]


def rising(number: int, end: float, steps: int, live: bool = True) -> Trial:
    """A curve that follows a power law to ``end``."""
    return Trial(number, tuple((step, end * (1 - step**-0.8)) for step in range(1, steps + 1)), live)


@pytest.mark.parametrize("rule", [*RULES.values(), *EVERYBODY.values()], ids=[*RULES, *EVERYBODY])
@given(fields(), st.integers(1, 30), st.sampled_from(["max", "min"]))
def test_no_rule_stops_the_best_nor_anybody_before_the_first_feedback(rule, trials, first, goal):
    known = scored(trials, goal)
    best = max(trial.top for trial in known)
    for number in judge(known, rule, first):
        trial = known[number]
        assert trial.live
        assert trial.points
        assert trial.step >= first
        assert trial.top < best


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(st.lists(st.floats(-100, 100), min_size=5, max_size=20), st.integers(3, 10), st.booleans())
def test_equal_curves_are_never_stopped(rule, values, count, rise):
    values = sorted(values) if rise else [values[0]] * len(values)
    curve = tuple(enumerate(values, 1))
    assert judge([Trial(number, curve) for number in range(count)], rule, 1) == {}


@given(st.integers(1, 50), st.floats(1.5, 5))
def test_rungs_rise_and_asha_keeps_the_share_that_it_says(first, reduction):
    trials = [rising(n, 1 + n, first) for n in range(30)]
    stopped = judge(trials, asha_rule(first, reduction, 4), first)
    assert sorted(stopped) == list(range(30 - int(30 / reduction))) or first == 1
    assert asha_rule(first, reduction, 31)(trials) == {}


def test_asha_waits_for_its_least_number_and_judges_again_as_more_arrive():
    rule = asha_rule(10, 3.0, 3)
    two = [rising(0, 1.0, 12), rising(1, 2.0, 12), Trial(2)]
    assert rule(two) == {}
    assert set(rule([*two[:2], rising(2, 3.0, 12)])) == {0, 1}


def test_the_median_rule_compares_at_the_same_step():
    ahead = [rising(n, 1.0, 50) for n in range(5)]
    assert median_rule(3)([*ahead, rising(5, 1.0, 5)]) == {}, "as good as they were at its step"
    assert set(median_rule(3)([*ahead, rising(5, 0.2, 5)])) == {5}
    assert median_rule(6)([*ahead, rising(5, 0.2, 5)]) == {}


@given(st.floats(0.1, 10), st.floats(0.1, 2.5), st.integers(6, 30))
def test_a_power_law_is_extended_to_what_it_reaches(end, exponent, points):
    trial = Trial(0, tuple((step, end - end * step**-exponent) for step in range(1, points + 1)))
    reached = end - end * 200**-exponent
    assert predict(trial, 200) == pytest.approx(reached, rel=0.12)


def test_the_curve_rule_spares_the_slow_that_will_overtake():
    early, slow = rising(0, 0.4, 40), Trial(1, tuple((step, 1 - step**-0.1) for step in range(1, 21)))
    flat = Trial(2, tuple((step, 0.1) for step in range(1, 21)))
    assert set(curve_rule(1000, None)([early, slow, flat])) == {2}
    assert set(curve_rule(1000, 0.9)([early, slow, flat])) >= {2}
    assert predict(Trial(3, ((1, 0.1),)), 100) is None


def test_diverged_trials_are_the_worst_whatever_the_goal():
    for goal in ("max", "min"):
        diverged, fine = scored([Trial(0, ((1, math.nan), (2, math.inf))), Trial(1, ((1, 1.0),))], goal)
        assert diverged.top == -math.inf < fine.top


@given(fields(), st.integers(0, 4))
def test_unseen_trials_and_the_best_are_in_front(trials, top):
    behind = put_behind(trials, top, first=5)
    live = [trial for trial in trials if trial.live and trial.points and trial.step >= 5]
    assert len(behind) == (max(0, len(live) - top) if top else 0)
    front = [trial.top for trial in live if trial.number not in behind]
    assert all(trials[number].top <= value for number in behind for value in front if not math.isnan(value)) or any(
        math.isnan(value) for trial in trials for _, value in trial.points
    )
    assert put_behind([replace(trial, live=False) for trial in trials], top, 5) == frozenset()
