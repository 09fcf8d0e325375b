"""The sample of a week: its load, its order and its compression, and that one seed gives one sample."""

from __future__ import annotations

from random import Random

import pytest
from replay_week import HOUR_S, WEEK_S, Row, Scale, cpu_profiles, read_rows, sample

from cadenza.policies.inputs.profiles import read_profiles, write_profiles
from cadenza.policies.inputs.published import synergy_profiles

PROFILES = synergy_profiles()
SCALE = Scale(nodes=4, minutes=30)


def week(jobs: int = 4000) -> tuple[Row, ...]:
    random = Random(7)  # noqa: S311
    return tuple(
        Row(random.uniform(0, WEEK_S), random.choice([1, 1, 1, 2, 4, 8, 16]), 10 ** random.uniform(1, 6))
        for _ in range(jobs)
    )


def test_offers_the_load_in_the_window_with_the_stated_compression() -> None:
    taken = sample(week(), 168, SCALE, PROFILES, "20/70/10", 1)
    work = [job.iterations * SCALE.iteration_s for job in taken.jobs]
    assert taken.load == pytest.approx(SCALE.load, rel=0.05)
    assert taken.arrivals_factor == 336
    assert all(0 <= job.submit_s < 1800 for job in taken.jobs)
    assert [job.submit_s for job in taken.jobs] == sorted(job.submit_s for job in taken.jobs)
    assert 90 <= taken.median_s <= 160
    assert max(work) <= SCALE.longest_s + SCALE.iteration_s
    assert taken.too_wide == sum(row.gpus > 8 for row in week())
    assert "336 times" in taken.stated()


def test_keeps_gpus_and_the_order_of_run_times() -> None:
    rows = tuple(Row(60.0 * place, 1 + place % 8, 10.0 * 3**place) for place in range(12))
    taken = sample(rows, 1, Scale(nodes=1, minutes=5, load=1.0), PROFILES, "20/70/10", 3)
    by_time = {round(row.submit_s / taken.arrivals_factor, 6): row for row in rows}
    found = [by_time[round(job.submit_s, 6)] for job in taken.jobs]
    assert [row.gpus for row in found] == [job.gpus for job in taken.jobs]
    iterations = [job.iterations for job in taken.jobs]
    assert iterations == sorted(iterations)


def test_one_seed_one_sample() -> None:
    first, again, other = (sample(week(), 168, SCALE, PROFILES, "20/70/10", seed).jobs for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_models_follow_the_split_and_limits_leave_room() -> None:
    taken = sample(week(), 168, SCALE, PROFILES, "50/50/0", 1)
    tasks = [PROFILES[job.model].task for job in taken.jobs]
    assert abs(tasks.count("image") - tasks.count("language")) <= 1
    assert all(job.limit_min * 60 > 2 * job.iterations * SCALE.iteration_s for job in taken.jobs)


def test_too_few_jobs_are_an_error() -> None:
    with pytest.raises(ValueError, match="more hours or less load"):
        sample(week(20), 168, SCALE, PROFILES, "20/70/10", 1)


def test_reads_the_hours_of_a_week() -> None:
    lines = ["job,submit_s,gpus,duration_s,vc", f"0,{WEEK_S - 1},1,9,a", f"1,{WEEK_S + 5},2,9,a", "2,9e9,1,9,a"]
    lines.append(f"3,{WEEK_S + 2 * HOUR_S},1,9,a")
    assert read_rows(lines, 1, 2) == (Row(5.0, 2, 9.0),)


def test_profiles_along_cpus_are_a_file_with_the_same_speeds() -> None:
    flat = cpu_profiles(PROFILES, 2.0)
    back = read_profiles(write_profiles(flat), "test")
    for model, profile in PROFILES.items():
        for cpus in profile.cpus_per_gpu:
            assert back[model].speed(cpus, 1.0) == profile.speed(cpus, 62.5)
