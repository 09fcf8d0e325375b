"""The generators draw what their papers say, and name the key that is wrong."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.published import gandiva_table1
from cadenza.policies.simulator.workloads.automl import (
    Curve,
    generate_curves,
    lenet_profile,
    place_target,
    search_jobs,
)
from cadenza.policies.simulator.workloads.catalogue import KINDS, parse_workload
from cadenza.policies.simulator.workloads.synergy import MEAN_JOB_H


def jobs_of(text: str, seed: int = 1) -> tuple:
    return parse_workload(text).generate(Random(seed))  # noqa: S311


# --- Synergy ---------------------------------------------------------------------------------------------


def test_synergy_draws_durations_first_and_an_unused_number_after_each_arrival() -> None:
    rng = Random(7)  # noqa: S311
    durations = [60 * 10 ** rng.uniform(*((3, 4) if rng.random() >= 0.8 else (1.5, 3))) for _ in range(20)]
    submit, expected = 0, []
    for _ in range(20):
        submit += ceil(-log(1.0 - rng.random()) / 6 * 3600)
        rng.randint(0, 9)
        expected.append(submit)
    jobs = jobs_of("synergy:load=6,jobs=20", 7)
    assert [job.submit_s for job in jobs] == expected
    for job, duration in zip(jobs, durations, strict=True):
        assert job.iterations == int(duration / job.profile.iteration_s)
        assert job.work_s == job.iterations * job.profile.iteration_s


def test_synergys_jobs_are_the_same_at_every_load() -> None:
    slow, fast = jobs_of("synergy:load=2,jobs=50"), jobs_of("synergy:load=8,jobs=50")
    assert [(job.model, job.work_s) for job in slow] == [(job.model, job.work_s) for job in fast]
    assert slow[-1].submit_s > 3 * fast[-1].submit_s


def test_synergys_shares_and_means() -> None:
    jobs = jobs_of("synergy:load=8,jobs=9000", 3)
    tasks = [job.profile.task for job in jobs]
    assert [tasks.count(task) / 9000 for task in ("image", "language", "speech")] == pytest.approx([0.2, 0.7, 0.1])
    assert pytest.approx(16.77, abs=0.005) == MEAN_JOB_H
    assert fmean(job.work_s for job in jobs) / 3600 == pytest.approx(MEAN_JOB_H, rel=0.05)
    assert 9000 / (jobs[-1].submit_s / 3600) == pytest.approx(8, rel=0.05)
    assert {job.gpus for job in jobs} == {1}
    models = {model: [job.model for job in jobs].count(model) for model in ("gnmt", "transformer", "lstm")}
    assert max(models.values()) - min(models.values()) <= 1


def test_synergys_first_job_is_of_the_first_class_and_the_next_of_the_furthest_behind() -> None:
    assert [job.profile.task for job in jobs_of("synergy:jobs=4")] == ["image", "language", "language", "speech"]
    assert [job.profile.task for job in jobs_of("synergy:jobs=3,split=50/0/50")] == ["image", "speech", "image"]


def test_synergys_mixed_gpus() -> None:
    jobs = jobs_of("synergy:gpus=synthetic,jobs=6000")
    shares = [sum(job.gpus == gpus for job in jobs) / 6000 for gpus in (1, 2, 4, 8)]
    assert shares == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.02)


# --- Gandiva ---------------------------------------------------------------------------------------------


def test_gandivas_mix() -> None:
    jobs = jobs_of("gandiva")
    table = [row.model for row in gandiva_table1()]
    assert len(jobs) == 1000
    assert all(before.submit_s <= after.submit_s for before, after in pairwise(jobs))
    assert 0 <= jobs[0].submit_s <= jobs[-1].submit_s <= 7200
    low, wide = [job for job in jobs if job.model in table[:2]], [job for job in jobs if job.model in table[6:]]
    assert len(low) / 1000 == pytest.approx(0.3, abs=0.05)
    assert {job.gpus for job in wide} == {2, 4}
    assert {job.gpus for job in jobs if job not in wide} == {1}
    assert all(1800 <= job.work_s <= 2700 for job in jobs)
    assert all(1 <= job.iteration_s / job.profile.iteration_s <= 30.1 for job in jobs)
    assert max(job.iteration_s for job in jobs) < 6
    assert all(job.startup_s == 5 * job.gpus for job in jobs)


def test_gandivas_models_run_faster_on_a_p100() -> None:
    profile = jobs_of("gandiva:p100=2,jobs=1")[0].profile
    assert (profile.gpu, profile.relative("P100"), profile.relative("P40")) == ("P40", 2.0, 1.0)
    assert profile.best_speed == 1.0


def test_options_that_cost_leave_the_jobs_alone() -> None:
    plain, slow = jobs_of("gandiva:jobs=40"), jobs_of("gandiva:jobs=40,startup=60,p100=2")
    assert [(job.submit_s, job.model, job.gpus, job.work_s) for job in plain] == [
        (job.submit_s, job.model, job.gpus, job.work_s) for job in slow
    ]


# --- AutoML ----------------------------------------------------------------------------------------------


def test_a_curve_reaches_a_value_after_an_epoch() -> None:
    curve = Curve(0, (0.3, 0.5))
    assert (curve.reaches(0.3), curve.reaches(0.4), curve.reaches(0.6)) == (1, 2, None)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.98, 1.0]))
def test_one_configuration_reaches_the_target_and_can_be_put_anywhere(seed: int, at: float) -> None:
    curves = place_target(generate_curves(Random(seed), configs=60), 0.84, at)  # noqa: S311
    assert sorted(curve.config for curve in curves) == list(range(60))
    good = [place for place, curve in enumerate(curves) if curve.reaches(0.84)]
    assert good == [min(round(at * 60), 59)]
    assert all(0 <= value <= 1 for curve in curves for value in curve.points)


def test_a_search_is_one_job_a_configuration() -> None:
    jobs = search_jobs((Curve(5, (0.2, 0.3)), Curve(3, (0.2,))), lenet_profile())
    assert [(job.id, job.work_s, job.iterations, job.tags["config"]) for job in jobs] == [
        (0, 72.0, 782, "5"),
        (1, 36.0, 391, "3"),
    ]
    assert len(jobs_of("automl")) == 374


def test_a_search_without_a_good_configuration_is_refused() -> None:
    with pytest.raises(InputError, match=r"none of 1 reaches 0\.84"):
        place_target((Curve(0, (0.2,)),), 0.84, 0.5)


# --- All -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_always_gives_the_same_jobs_with_every_id_once(name: str) -> None:
    jobs = jobs_of(name, 5)
    assert jobs == jobs_of(name, 5)
    assert [job.id for job in jobs] == list(range(len(jobs)))
    assert parse_workload(f"{name}:seed=9").seed == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no workload is called ''"),
        ("synergi", "no workload is called 'synergi'; did you mean 'synergy'?"),
        ("synergy:lode=3", "workload synergy: unknown key 'lode'; did you mean 'load'?"),
        ("synergy:load", "workload synergy: load: has no value; for example load=8"),
        ("synergy:load=", "workload synergy: load: has no value"),
        ("synergy:load=0", "workload synergy: load: must be more than 0"),
        ("synergy:load=2,load=3", "workload synergy: load: is there twice"),
        ("synergy:jobs=1e3", "workload synergy: jobs: '1e3' is not a whole number"),
        ("synergy:split=50/50", "workload synergy: the split has 2 shares, and the profiles have 3 tasks"),
        ("synergy:split=20/70/20", "workload synergy: split: split '20/70/20' adds up to 110"),
        ("synergy:gpus=dual", "workload synergy: gpus: 'dual' is none of single, synthetic"),
        ("gandiva:minutes=30", "workload gandiva: minutes: '30' is not LOW-HIGH"),
        ("gandiva:minutes=45-30", "workload gandiva: minutes: '45-30' ends below"),
        ("gandiva:wide=2", "workload gandiva: wide: '2' is not from 0 to 1"),
        ("gandiva:mix=50/50", "workload gandiva: mix: needs three shares"),
    ],
)
def test_a_wrong_key_is_named(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_workload(text)
    assert str(caught.value).startswith(said)
