"""The online belief: it closes in on the truth where it can know it, says how unsure it is, and notices new phases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.profiler.model.belief import begin, guess, observe
from cadenza.profiler.model.roofline import Law

TRUE = Law(0.1, 0.6)


def watched(belief, law, cpus, seed=0, noise=0.02):
    random = np.random.default_rng(seed)
    for each in cpus:
        belief = observe(belief, each, law.time_s(each) * float(np.exp(random.normal(0, noise))), noise)
    return belief


@given(st.floats(0.05, 0.2), st.floats(0.3, 1.2), st.integers(0, 5))
@settings(max_examples=20)
def test_both_sides_of_the_knee_together_tell_the_law(gpu_s, work_s, seed):
    law = Law(gpu_s, work_s)
    found = watched(begin(TRUE), law, [1.0, 40.0] * 8, seed)
    assert found.law.gpu_s == pytest.approx(gpu_s, rel=0.05)
    assert found.law.work_s == pytest.approx(work_s, rel=0.05)
    assert found.phase == 0


def test_what_was_never_seen_stays_unsure():
    found = watched(begin(TRUE), TRUE, [1.0, 2.0] * 5)
    assert found.unsure(1.0) < 0.05
    assert found.unsure(20.0) > 0.3
    expected, spread = found.time_s(2.0)
    assert expected == pytest.approx(0.3, rel=0.05)
    assert spread < 0.05


def test_a_first_guess_needs_no_profile():
    found = watched(guess(2.0, 0.3), TRUE, [1.0, 2.0, 8.0, 12.0] * 4)
    assert found.law.gpu_s == pytest.approx(0.1, rel=0.06)
    assert found.law.work_s == pytest.approx(0.6, rel=0.06)


def test_a_belief_that_starts_far_off_moves_its_grid():
    found = watched(guess(1.0, 6.0), TRUE, [1.0, 12.0] * 30)
    assert found.law.work_s == pytest.approx(0.6, rel=0.1)


@pytest.mark.parametrize("scale", [0.6, 1.5, 4.0])
def test_a_new_phase_is_flagged_and_learnt(scale):
    before = watched(begin(TRUE), TRUE, [1.0, 12.0] * 10)
    later = Law(TRUE.gpu_s * scale, TRUE.work_s * scale)
    after = watched(before, later, [1.0, 12.0] * 10, seed=1)
    assert (before.phase, after.phase) == (0, 1)
    assert after.time_s(1.0)[0] == pytest.approx(later.time_s(1.0), rel=0.06)


def test_noise_and_a_single_slow_step_are_no_phase():
    calm = watched(begin(TRUE), TRUE, [1.0, 4.0, 12.0] * 60, noise=0.03)
    assert calm.phase == 0
    assert observe(calm, 4.0, 10.0).phase == 0
