"""Slurm without Cadenza in a simulation: order, backfill, reservations, and what a run of it never does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import summarize
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.slurm_baseline import EASY, SLURM, Backfill, simulate_slurm, time_limit_s


def starts(jobs: list[TraceJob], nodes: str, rules: Backfill = SLURM) -> dict[int, float | None]:
    result = simulate_slurm(jobs, read_cluster(nodes), Setup(), rules)
    return {job.id: job.start_s for job in result.jobs}


def test_a_limit_is_the_traces_or_follows_from_the_run_time() -> None:
    assert time_limit_s(TraceJob(1, 0.0, 1, 100.0)) == 500.0
    assert time_limit_s(TraceJob(1, 0.0, 1, 100.0, time_limit_s=120.0)) == 120.0


@pytest.mark.parametrize("rules", [SLURM, EASY])
def test_a_short_job_passes_a_wide_one_that_it_does_not_delay_and_a_long_one_waits(rules: Backfill) -> None:
    jobs = [
        TraceJob(1, 0.0, 4, 1000.0, time_limit_s=1000.0),
        TraceJob(2, 10.0, 8, 100.0, time_limit_s=100.0),
        TraceJob(3, 20.0, 4, 2000.0, time_limit_s=2000.0),
        TraceJob(4, 30.0, 4, 900.0, time_limit_s=900.0),
    ]
    assert starts(jobs, "1x8:24:500", rules) == {1: 0.0, 2: 1000.0, 3: 1100.0, 4: 30.0}


def test_slurm_reserves_for_several_jobs_and_easy_for_the_first_alone() -> None:
    jobs = [
        TraceJob(1, 0.0, 8, 1000.0, time_limit_s=1000.0),
        TraceJob(2, 0.0, 7, 2000.0, time_limit_s=2000.0),
        TraceJob(3, 1.0, 8, 100.0, time_limit_s=100.0),  # on the first node at 1000 s
        TraceJob(4, 2.0, 8, 100.0, time_limit_s=100.0),  # after it, or on the second node at 2000 s
        TraceJob(5, 3.0, 1, 1090.0, time_limit_s=1090.0),  # beside job 2 until 1110 s
    ]
    assert starts(jobs, "2x8:24:500", EASY)[5] == 30.0
    assert starts(jobs, "2x8:24:500")[5] == 30.0
    late = [*jobs[:4], TraceJob(5, 3.0, 1, 3000.0, time_limit_s=3000.0)]
    assert starts(late, "2x8:24:500", EASY)[5] == 30.0, "job 3 alone has a reservation, on the other node"
    wide = [*late, TraceJob(6, 2.5, 16, 10.0, time_limit_s=10.0)]
    assert starts(wide, "2x8:24:500", EASY)[5] == 30.0
    assert (starts(wide, "2x8:24:500")[5] or 0.0) > 2000.0, "job 6 has one on both"


def test_a_job_beyond_the_window_has_no_reservation() -> None:
    day_s = 86_400.0
    jobs = [
        TraceJob(1, 0.0, 4, 2 * day_s, time_limit_s=2 * day_s),
        TraceJob(2, 1.0, 8, 100.0, time_limit_s=100.0),
        TraceJob(3, 2.0, 4, 9 * day_s, time_limit_s=9 * day_s),
    ]
    assert starts(jobs, "1x8:24:500")[3] == 30.0
    assert starts(jobs, "1x8:24:500", EASY)[3] == 2 * day_s + 100.0


def test_memory_and_whole_nodes_bound_a_start() -> None:
    full = [TraceJob(number, 0.0, 2, 100.0, memory_gb_per_gpu=200.0) for number in (1, 2)]
    assert starts(full, "1x8:24:500") == {1: 0.0, 2: 100.0}
    split = [TraceJob(1, 0.0, 4, 100.0), TraceJob(2, 0.0, 12, 10.0), TraceJob(3, 0.0, 5, 100.0)]
    assert starts(split, "2x8:24:500") == {1: 0.0, 2: 100.0, 3: 0.0}, "six GPUs on each of two nodes"


def test_the_size_of_a_job_counts_as_age() -> None:
    jobs = [TraceJob(1, 0.0, 8, 100.0), TraceJob(2, 1.0, 1, 100.0), TraceJob(3, 2.0, 8, 100.0)]
    assert starts(jobs, "1x8:24:500")[2] == 100.0
    assert starts(jobs, "1x8:24:500", Backfill(size_s=3600.0))[2] == 200.0


def test_idle_gpus_count_while_a_job_waits_that_fits() -> None:
    jobs = [
        TraceJob(1, 0.0, 4, 1000.0, time_limit_s=1000.0),
        TraceJob(2, 0.0, 8, 100.0, time_limit_s=100.0),
        TraceJob(3, 0.0, 4, 2000.0, time_limit_s=2000.0),
        TraceJob(4, 500.0, 8, 1.0),
    ]
    found = summarize(simulate_slurm(jobs, read_cluster("1x8:24:500"), Setup()))
    assert found.idle_waiting_gpus == 4.0, "job 3 would fit, and would delay job 2"
    assert found.mean_bounded_slowdown == pytest.approx((1 + 1100 / 100 + 3100 / 2000 + 2601 / 60) / 4)
    assert found.wait_2_to_7_gpus_h == pytest.approx((0 + 1100) / 2 / 3600)
    assert found.wait_1_gpu_h is None


JOBS = st.lists(
    st.builds(
        lambda submit, gpus, work: (float(submit), gpus, float(work)),
        st.integers(0, 2000),
        st.sampled_from([1, 1, 2, 4, 8, 16]),
        st.integers(1, 3000),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None)
@given(JOBS, st.sampled_from([SLURM, EASY]))
def test_every_job_runs_once_and_no_node_has_more_than_it_holds(
    rows: list[tuple[float, int, float]], rules: Backfill
) -> None:
    jobs = [TraceJob(number, *row) for number, row in enumerate(rows)]
    result: Result = simulate_slurm(jobs, read_cluster("2x8:24:500"), Setup(), rules)
    assert not result.unfinished
    for job, given_job in zip(result.jobs, sorted(jobs, key=lambda job: (job.submit_s, job.id)), strict=True):
        assert job.start_s is not None
        assert job.start_s >= job.submit_s
        assert job.finish_s == job.start_s + given_job.work_s
    for sample, later in pairwise(result.samples):
        assert 0 <= sample.gpus_held <= 16
        assert sample.time_s < later.time_s
    for at_s in {job.start_s for job in result.jobs}:
        used = sum(job.gpus for job in result.jobs if (job.start_s or 0.0) <= at_s < (job.finish_s or 0.0))
        assert used <= 16
