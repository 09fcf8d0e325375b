"""The law, the search and the estimate: what they say of data whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.profiler.model.batch_means import Window, estimate, settled, start_up
from cadenza.profiler.model.bisection import next_point
from cadenza.profiler.model.memory import Data
from cadenza.profiler.model.roofline import Law, fit, predict, worst_error

GRID = [float(cpus) for cpus in range(1, 25)]
laws = st.builds(Law, st.floats(0.001, 10), st.floats(0.001, 100))


def searched(grid, time_s):
    """Measure what the search asks for, without noise."""
    times = {}
    while (cpus := next_point(grid, times)) is not None:
        assert cpus not in times
        times[cpus] = time_s(cpus)
    return times


@given(laws)
def test_a_job_that_follows_the_law_is_known_everywhere_from_few_points(law):
    times = searched(GRID, law.time_s)
    assert len(times) <= 6
    found = fit(times)
    for cpus in GRID:
        assert predict(found, times, cpus) == pytest.approx(law.time_s(cpus), rel=0.05)


def test_figure_2a_of_synergy_takes_a_fifth_of_the_grid():
    for gpu_s in (350, 430, 580, 920, 1280, 1700, 1840):
        assert len(searched(GRID, Law(gpu_s, 4000).time_s)) <= len(GRID) / 5


@given(st.lists(st.floats(0.01, 0.3), min_size=24, max_size=24))
def test_any_job_is_measured_at_most_once_a_point_and_known_to_the_threshold(drops):
    falling = dict(zip(GRID, np.exp(-np.cumsum(drops)), strict=True))
    times = searched(GRID, falling.__getitem__)
    assert {GRID[0], GRID[-1]} <= times.keys()
    assert len(times) <= len(GRID)


def test_what_contradicts_the_law_is_measured_more_closely():
    amdahl = searched(GRID, lambda cpus: 1 + 20 / cpus)
    assert len(amdahl) > len(searched(GRID, Law(1, 20).time_s))
    found = fit(amdahl)
    assert worst_error(found, amdahl) > 0.05
    for cpus in GRID:
        assert predict(found, amdahl, cpus) == pytest.approx(1 + 20 / cpus, rel=0.12)


def test_an_interrupted_search_goes_on_where_it_was():
    times = searched(GRID, Law(1, 9).time_s)
    for kept in range(len(times)):
        head = dict(list(times.items())[:kept])
        assert next_point(GRID, head) == list(times)[kept]


@given(laws, st.floats(1, 24))
def test_measured_points_come_back_as_they_are(law, cpus):
    times = {cpus: law.time_s(cpus) * 1.03, 0.5: law.time_s(0.5), 30.0: law.time_s(30)}
    assert predict(fit(times), times, cpus) == pytest.approx(times[cpus])


def windows(values, steps=5):
    return [Window(value * steps, steps) for value in values]


def test_the_interval_covers_the_mean_as_often_as_it_says():
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        found = estimate(windows(random.normal(1.0, 0.1, 30)))
        hits += abs(found.mean_s - 1) <= found.half_s
    assert hits > 0.9 * 400


def test_a_start_up_is_cut_off_and_a_steady_run_is_kept():
    random = np.random.default_rng(2)
    steady = random.normal(1.0, 0.02, 30)
    slow_start = np.concatenate([np.full(5, 3.0), steady])
    assert start_up(windows(slow_start)) >= 5
    assert estimate(windows(slow_start)).mean_s == pytest.approx(1.0, rel=0.02)


def test_waves_longer_than_a_window_widen_the_interval():
    waves = np.repeat(np.tile([0.8, 1.2], 10), 2)
    apart = np.tile([0.8, 1.2], 20)
    assert estimate(windows(waves)).half_s > 1.2 * estimate(windows(apart)).half_s


def test_noise_takes_longer_than_calm_to_settle():
    random = np.random.default_rng(3)
    calm, noisy = random.normal(1, 0.005, 200), random.normal(1, 0.2, 200)
    assert settled(windows(calm[:16]), 0.02)
    assert not settled(windows(calm[:7]), 0.02)
    assert not settled(windows(noisy[:20]), 0.02)


DATA = Data(dataset_gb=100, step_mb=100, base_gb=4, storage_mb_s=500, memory_mb_s=10_000)


def test_a_cache_that_never_evicts_hits_as_often_as_it_is_large():
    assert DATA.fetch_s(4) == pytest.approx(0.2)
    assert DATA.fetch_s(54) == pytest.approx(0.1 + 0.005)
    assert DATA.fetch_s(104) == DATA.fetch_s(500) == pytest.approx(0.01)
    assert DATA.time_s(0.15, 4) == pytest.approx(0.2)
    assert DATA.time_s(0.15, 54) == 0.15


@given(st.floats(0.001, 10), st.floats(4, 200), st.floats(4, 200))
def test_more_memory_never_slows_a_job_nor_needs_more_storage(compute_s, one, two):
    low, high = sorted((one, two))
    assert DATA.time_s(compute_s, high) <= DATA.time_s(compute_s, low) + 1e-12
    assert 0 <= DATA.bandwidth_mb_s(compute_s, high) <= DATA.bandwidth_mb_s(compute_s, low) + 1e-9 <= 500 + 1e-6
