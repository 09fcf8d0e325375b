"""A replay's list: one factor for all times, and what is left out or dropped is made up by other jobs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from philly_sample import DAY_S, GPUS, PhillyJob
from replay_predict import Costs, ideal_gain, plain_forecast
from replay_sample import ReplaySample, Window, in_trace_time, replay_sample, write_replay_trace

from cadenza.policies.inputs.published import synergy_profiles

SHORT_S, USUAL_S, LONG_S = 100.0, 3600.0, 90_000.0
WIDTHS = (1, 2, 4, 8, 12, 16)
TRACE = [
    PhillyJob(
        number, number * 20.0, WIDTHS[number % len(WIDTHS)], (USUAL_S, SHORT_S, USUAL_S, LONG_S)[number % 4], "vc"
    )
    for number in range(1, 4000)
]
WINDOW = Window(0, 12.0, 1.0, 48.0)


@pytest.fixture(scope="module")
def sample() -> ReplaySample:
    return replay_sample(TRACE, WINDOW, 1, synergy_profiles())


def test_one_factor_divides_all_times_and_others_make_up_the_load(sample: ReplaySample) -> None:
    assert {job.run_s for job in sample.kept} == {USUAL_S}
    assert {job.run_s for job in sample.before} == {SHORT_S, USUAL_S, LONG_S}
    assert sum(job.gpus * job.run_s for job in sample.kept) == pytest.approx(GPUS * 12 * 3600, rel=0.01)
    assert sample.minutes == 15.0
    for job, kept in zip(sample.jobs, sample.kept, strict=True):
        assert job.submit_s == kept.submit_s / 48
        assert (job.work_s, job.limit_min) == (75.0, 4)


def test_a_job_of_several_nodes_has_even_parts_of_them(sample: ReplaySample) -> None:
    assert {(kept.gpus, job.gpus, job.nodes) for job, kept in zip(sample.jobs, sample.kept, strict=True)} == {
        (width, width, -(-width // 8)) for width in {kept.gpus for kept in sample.kept}
    }
    assert any(job.nodes == 2 for job in sample.jobs)


def test_the_statement_counts_what_is_not_replayed(sample: ReplaySample) -> None:
    long, short = (sum(job.run_s == run_s for job in sample.before) for run_s in (LONG_S, SHORT_S))
    assert f"{long} run longer than 24 h" in sample.stated()
    assert f"{short} would run for less than 5 s" in sample.stated()
    assert "after: median 3600 s, mean 3600 s" in sample.stated()


def test_a_larger_factor_and_too_few_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="48"):
        replay_sample(TRACE, Window(0, 12.0, 1.0, 50.0), 1, synergy_profiles())
    with pytest.raises(ValueError, match="offer a load of"):
        replay_sample(TRACE[:50], WINDOW, 1, synergy_profiles())


def test_the_simulator_takes_the_list_in_the_traces_time(sample: ReplaySample, tmp_path: Path) -> None:
    write_replay_trace(tmp_path / "trace.csv", sample)
    with (tmp_path / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(sample.jobs)
    assert {(float(row["duration_s"]), float(row["time_limit_s"])) for row in rows} == {(3600.0, 4 * 60 * 48.0)}
    assert max(float(row["submit_s"]) for row in rows) < DAY_S / 2
    assert [job.run_s for job in in_trace_time(sample)] == [3600.0] * len(rows)


def test_plain_slurm_is_predicted_in_the_replays_time(sample: ReplaySample) -> None:
    forecast = plain_forecast(sample, Costs(1.5, 4.0, 1.0))
    assert forecast.mean_jct_s == pytest.approx(forecast.mean_first_s + 75.0)
    assert forecast.p99_jct_s >= forecast.p50_jct_s >= 76.5
    assert ideal_gain(sample) > 0.5
