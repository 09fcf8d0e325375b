"""The calibration's lists, and its figures from runs as Slurm's accounting gives them."""

from __future__ import annotations

import pytest
from calibration import (
    JOBS,
    LISTS,
    OVERLOADS,
    SIZE,
    Listed,
    Run,
    agreement,
    class_of,
    draw,
    draw_overload,
    least_queued,
    plan_of,
    predict,
    read_nodes,
    rules_of,
)


def test_a_list_is_the_same_for_its_seed_and_offers_more_than_the_cluster_has() -> None:
    lists = [draw(seed) for seed in LISTS]
    assert lists == [draw(seed) for seed in LISTS]
    assert all(len(jobs) == JOBS for jobs in lists)
    assert len({tuple(jobs) for jobs in lists}) == len(LISTS)
    for jobs in lists:
        assert all(60 * job.limit_min >= job.sleep_s + 10 for job in jobs)
        assert sum(job.gpus * job.sleep_s for job in jobs) > jobs[-1].submit_s * SIZE.nodes * SIZE.gpus
        assert [job.submit_s for job in jobs] == sorted(job.submit_s for job in jobs)


def test_a_wide_job_asks_for_whole_nodes() -> None:
    command = plan_of([Listed(0.0, 16, 5, 1), Listed(1.0, 2, 5, 1)], "x")[0]["command"]
    assert {"--nodes=2", "--gres=gpu:8", "--cpus-per-task=24", "--time=1"} <= set(command)


def test_the_overhead_is_the_time_besides_the_sleep_and_until_the_next_job_of_the_queue() -> None:
    jobs = [Listed(0.0, 8, 10, 1), Listed(1.0, 8, 10, 1), Listed(2.0, 16, 10, 1)]
    run = Run((0.0, 1.0, 2.0), (0.0, 11.5, 24.0), (11.0, 22.5, 35.0), ("node1", "node1", "node[1-2]"))
    assert run.overhead_s(jobs) == pytest.approx(1.0 + (0.5 + 1.5) / 2)
    assert run.wait_s == pytest.approx((0 + 10.5 + 22) / 3)


def test_nodes_and_rules_are_read_as_slurm_writes_them() -> None:
    assert read_nodes("node[1-3,7]") == {1, 2, 3, 7}
    assert read_nodes("node12") == {12}
    rules = rules_of("bf_interval=2,bf_resolution=1,sched_interval=5,requeue_delay=0")
    assert (rules.interval_s, rules.full_interval_s, rules.batch_delay_s, rules.max_jobs) == (2.0, 5.0, 3.0, 500)


def test_a_prediction_of_a_prediction_agrees_with_itself() -> None:
    jobs = draw(1)[:40]
    starts = predict(jobs, rules_of("bf_interval=2"), 0.5, seed=1)
    assert agreement(starts, starts) == 1.0
    assert agreement(starts, [start + 6 for start in starts]) == 0.0
    assert all(start >= job.submit_s for start, job in zip(starts, jobs, strict=True))


def test_an_overload_offers_more_than_the_cluster_has_and_its_lists_differ_by_their_limits_alone() -> None:
    equal, double = (draw_overload(limits) for limits in OVERLOADS)
    assert [(job.submit_s, job.gpus, job.sleep_s) for job in equal] == [
        (job.submit_s, job.gpus, job.sleep_s) for job in double
    ]
    assert {job.limit_min for job in equal} == {15}
    assert all(60 * job.limit_min >= job.sleep_s + 10 for job in equal)
    assert all(2 * job.sleep_s <= 60 * job.limit_min < 2 * job.sleep_s + 70 for job in double)
    assert sum(job.gpus * job.sleep_s for job in equal) > 1.3 * equal[-1].submit_s * SIZE.nodes * SIZE.gpus
    assert {class_of(Listed(0.0, *job)) for job in ((1, 14, 1), (7, 15, 1), (8, 60, 1), (16, 600, 1))} == {
        "1 GPU, short", "2 to 7, medium", "8, long", "16 and 32, long",
    }  # fmt: skip


def test_the_shortest_queue_is_looked_for_while_jobs_arrive() -> None:
    run = Run((0.0, 0.0, 0.0, 9.0), (0.0, 4.0, 8.0, 20.0), (4.0, 8.0, 20.0, 30.0), ("node1",) * 4)
    assert least_queued(run, backlog=2) == 0
    assert least_queued(Run(run.submit_s, (0.0, 4.0, 12.0, 20.0), run.end_s, run.nodes), backlog=2) == 1


def test_a_window_of_backfill_is_in_minutes() -> None:
    assert rules_of("bf_window=15").window_s == 900
    assert rules_of("bf_interval=1").window_s == 86_400
