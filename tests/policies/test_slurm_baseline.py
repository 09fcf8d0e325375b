"""Slurm without Cadenza in a simulation: order, backfill, reservations, and what a run of it never does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import summarize
from cadenza.policies.simulator.ideal_las import ideal_las
from cadenza.policies.simulator.job import SimJob
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.scheduler import QueuedJob
from cadenza.policies.simulator.slurm_baseline import first_come, simulate_slurm
from cadenza.policies.simulator.world import World, time_limit_s
from cadenza.policies.slurm.backfill import SLURM, Backfill, Future, Pass, bits_of


def starts(jobs: list[TraceJob], nodes: str, rules: Backfill = SLURM) -> dict[int, float | None]:
    result = simulate_slurm(jobs, read_cluster(nodes), Setup(), rules)
    return {job.id: job.start_s for job in result.jobs}


def test_a_limit_is_the_traces_or_follows_from_the_run_time() -> None:
    assert time_limit_s(TraceJob(1, 0.0, 1, 100.0)) == 500.0
    assert time_limit_s(TraceJob(1, 0.0, 1, 100.0, time_limit_s=120.0)) == 120.0


def test_a_short_job_passes_a_wide_one_that_it_does_not_delay_and_a_long_one_waits() -> None:
    jobs = [
        TraceJob(1, 0.0, 4, 1000.0, time_limit_s=1000.0),
        TraceJob(2, 10.0, 8, 100.0, time_limit_s=100.0),
        TraceJob(3, 20.0, 4, 2000.0, time_limit_s=2000.0),
        TraceJob(4, 30.0, 4, 900.0, time_limit_s=900.0),
    ]
    assert starts(jobs, "1x8:24:500") == {1: 0.0, 2: 1000.0, 3: 1100.0, 4: 30.0}


def test_progress_counts_the_jobs_that_have_ended() -> None:
    seen: list[tuple[float, int]] = []
    jobs = [TraceJob(1, 0.0, 8, 100.0), TraceJob(2, 0.0, 8, 100.0)]
    simulate_slurm(jobs, read_cluster("1x8:24:500"), Setup(), progress=lambda *now: seen.append(now))
    assert [ended for _, ended in seen] == sorted(ended for _, ended in seen)
    assert (seen[0][1], seen[-1][1]) == (0, 2)


def test_slurm_reserves_for_several_jobs() -> None:
    jobs = [
        TraceJob(1, 0.0, 8, 1000.0, time_limit_s=1000.0),
        TraceJob(2, 0.0, 7, 2000.0, time_limit_s=2000.0),
        TraceJob(3, 1.0, 8, 100.0, time_limit_s=100.0),  # on the first node at 1000 s
        TraceJob(4, 2.0, 16, 100.0, time_limit_s=100.0),  # on both at 2000 s
        TraceJob(5, 3.0, 1, 1090.0, time_limit_s=1090.0),  # beside job 2 until 1120 s
    ]
    assert starts(jobs, "2x8:24:500")[5] == 30.0
    late = [*jobs[:4], TraceJob(5, 3.0, 1, 3000.0, time_limit_s=3000.0)]
    assert starts(late, "2x8:24:500")[5] == 2100.0, "job 4 has a reservation on both nodes"


GPUS = (1, 8, 16, 24, 40)
RUNNING = (
    (1, 243, (3,)), (8, 256, (8,)), (32, 36, (9, 13, 14, 15)), (2, 79, (3,)), (4, 441, (2,)), (8, 327, (4,)),
    (16, 218, (10, 11)), (16, 290, (5, 6)), (2, 203, (16,)), (4, 37, (2,)), (16, 50, (7, 12)), (2, 33, (3,)),
    (2, 42, (1,)), (4, 58, (16,)), (1, 54, (3,)), (2, 56, (3,)), (1, 178, (16,)), (1, 58, (16,)),
)  # fmt: skip
"""Jobs that ran at one pass of a real slurmctld of 16 nodes: GPUs, seconds until the limit, nodes."""
PLANNED = (
    (8, 1, 42, (1,)), (32, 1, 50, (12, 13, 14, 15)), (4, 1, 37, (2,)), (4, 1, 79, (3,)), (4, 2, 50, (7,)),
    (4, 1, 79, (9,)), (2, 6, 58, (16,)), (4, 4, 97, (2,)), (1, 1, 102, (1,)), (8, 5, 110, (12,)), (8, 1, 110, (13,)),
    (1, 3, 110, (14,)), (1, 5, 110, (15,)), (4, 2, 139, (3,)), (32, 1, 170, (1, 7, 9, 13)), (1, 1, 218, (10,)),
    (2, 1, 218, (11,)), (4, 2, 230, (1,)), (1, 2, 230, (7,)), (2, 1, 230, (9,)), (1, 1, 230, (13,)),
    (2, 1, 256, (8,)), (4, 1, 259, (3,)), (1, 1, 278, (10,)), (2, 1, 278, (11,)), (8, 1, 290, (5,)),
    (1, 2, 290, (6,)), (4, 1, 290, (9,)), (8, 2, 290, (13,)), (1, 7, 290, (14,)), (1, 1, 316, (8,)),
    (8, 1, 319, (3,)), (1, 2, 327, (4,)), (1, 1, 337, (2,)), (2, 1, 338, (10,)), (4, 1, 338, (11,)),
    (1, 1, 350, (1,)), (1, 2, 350, (5,)), (1, 3, 350, (7,)), (8, 1, 350, (9,)),
)  # fmt: skip
"""Its first pending jobs: GPUs, limit in minutes, and the start in seconds and the nodes that the pass planned."""


def queued(world: World, job: TraceJob) -> QueuedJob:
    """Return a job as a world's slurmctld has it."""
    one = SimJob(job, world._request(job), [])
    return world._queued(job, world._each(one), one.num_nodes, one.cpus, one)


def test_a_pass_plans_the_starts_and_the_nodes_that_a_slurmctld_planned() -> None:
    world = World([TraceJob(0, 0.0, 1, 1.0)], read_cluster("16x8:24:64"), Setup(place=False))
    slurm = world.queue
    for number, (gpus, end_s, nodes) in enumerate(RUNNING):
        job = queued(world, TraceJob(number, 0.0, gpus, 1.0, memory_gb_per_gpu=1.0, time_limit_s=float(end_s)))
        slurm.book(job, tuple((node - 1, amount) for node, amount in zip(nodes, job.each, strict=True)), 0.0)
    plan = Pass(0.0, slurm.all_nodes, SLURM)
    future = Future(0.0, slurm.free, slurm.running.values(), slurm.lanes)
    for number, (gpus, minutes, planned_s, nodes) in enumerate(PLANNED, len(RUNNING)):
        traced = TraceJob(number, 0.0, gpus, 1.0, memory_gb_per_gpu=1.0, time_limit_s=60.0 * minutes)
        start_s, spot = plan.earliest(queued(world, traced), future)
        assert (start_s, [at + 1 for at in spot]) == (planned_s, list(nodes)), f"pending job {number - len(RUNNING)}"
        plan.reserve(start_s, start_s + 60 * minutes, bits_of(spot))


def test_one_node_is_the_first_with_room_and_several_are_the_smallest_run_that_has_as_many() -> None:
    world = World([], read_cluster("9x8:24:500"), Setup(place=False))
    world.queue.free[3][0] = world.queue.free[6][0] = 2
    nodes = {gpus: world.queue._place(queued(world, TraceJob(1, 0.0, gpus, 1.0)), 0b111111111) for gpus in GPUS}
    assert nodes == {1: [0], 8: [0], 16: [4, 5], 24: [0, 1, 2], 40: [0, 1, 2, 4, 5]}
    assert not world.queue._place(queued(world, TraceJob(1, 0.0, 64, 1.0)), 0b111111111)


def test_submissions_wait_for_the_schedulers_next_look_and_an_end_is_seen_at_once() -> None:
    jobs = [TraceJob(1, 0.0, 4, 10.0), TraceJob(2, 1.0, 4, 100.0), TraceJob(3, 4.0, 4, 10.0), TraceJob(4, 70.0, 1, 1.0)]
    assert starts(jobs, "1x8:24:500") == {1: 0.0, 2: 3.0, 3: 10.0, 4: 70.0}


def test_a_job_beyond_the_window_has_no_reservation() -> None:
    day_s = 86_400.0
    jobs = [
        TraceJob(1, 0.0, 4, 2 * day_s, time_limit_s=2 * day_s),
        TraceJob(2, 1.0, 8, 100.0, time_limit_s=100.0),
        TraceJob(3, 2.0, 4, 9 * day_s, time_limit_s=9 * day_s),
    ]
    assert starts(jobs, "1x8:24:500")[3] == 30.0
    assert starts(jobs, "1x8:24:500", Backfill(window_s=3 * day_s))[3] == 2 * day_s + 100.0


def test_memory_and_whole_nodes_bound_a_start() -> None:
    full = [TraceJob(number, 0.0, 2, 100.0, memory_gb_per_gpu=200.0) for number in (1, 2)]
    assert starts(full, "1x8:24:500") == {1: 0.0, 2: 100.0}
    split = [TraceJob(1, 0.0, 4, 100.0), TraceJob(2, 0.0, 12, 10.0), TraceJob(3, 0.0, 5, 90.0)]
    assert starts(split, "2x8:24:500") == {1: 0.0, 2: 100.0, 3: 0.0}, "six GPUs on each of two nodes"


def test_easy_has_one_reservation() -> None:
    jobs = [
        TraceJob(1, 0.0, 8, 1000.0, time_limit_s=1000.0),
        TraceJob(2, 0.0, 7, 2000.0, time_limit_s=2000.0),
        TraceJob(3, 1.0, 8, 100.0, time_limit_s=100.0),
        TraceJob(4, 2.0, 16, 100.0, time_limit_s=100.0),
        TraceJob(5, 3.0, 1, 3000.0, time_limit_s=3000.0),  # in the way of job 4 only
    ]
    found = {job.id: job.start_s for job in first_come(jobs, read_cluster("2x8:24:500"), Setup()).jobs}
    assert (found[3], found[5]) == (1000.0, 30.0)
    assert starts(jobs, "2x8:24:500")[5] == 2100.0


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
@given(JOBS, st.sampled_from([SLURM, Backfill(precision_s=1.0, max_jobs=3)]))
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


def test_the_ideal_gives_gpus_to_the_least_attained_service() -> None:
    jobs = [
        TraceJob(1, 0.0, 8, 300.0),
        TraceJob(2, 60.0, 4, 60.0),
        TraceJob(3, 60.0, 2, 240.0),
        TraceJob(4, 0.0, 9, 9.0),
    ]
    # Jobs 2 and 3 come when job 1 has 480 GPU seconds. Job 3 has as many after 240 s, when it ends.
    assert ideal_las(jobs, 8) == [540.0, 60.0, 240.0]


@given(JOBS)
def test_the_ideal_loses_no_work_and_beats_no_run_time(rows: list[tuple[float, int, float]]) -> None:
    jobs = sorted((TraceJob(number, *row) for number, row in enumerate(rows)), key=lambda job: (job.submit_s, job.id))
    found = ideal_las(jobs, 16)
    assert all(jct_s >= job.work_s - 1e-3 for jct_s, job in zip(found, jobs, strict=True))
    last_s = max(job.submit_s + jct_s for jct_s, job in zip(found, jobs, strict=True))
    assert last_s >= sum(job.gpus * job.work_s for job in jobs) / 16
