"""Figures of a replay from texts as Slurm prints them."""

from __future__ import annotations

import pytest
from replay_figures import Decided, costs, figures, held_s, intervals, loads, read_sacct, read_sdiag

SACCT = """\
1|a|COMPLETED|100|110|150|node1
2|b|REQUEUED|100|110|120|node1
2|b|COMPLETED|120|130|190|node[1-2]
3|c|TIMEOUT|105|130|200|node2
4|d|RUNNING|105|Unknown|Unknown|node3
"""
SDIAG = """\
Main schedule statistics (microseconds):
\tLast cycle:   37
\tMax cycle:    4000
\tMean cycle:   200
Backfilling stats
\tMax cycle:    9000
\tMean cycle:   700
Remote Procedure Call statistics by message type
\tREQUEST_JOB_INFO                        ( 2003) count:12     ave_time:250    total_time:3000
\tREQUEST_SUBMIT_BATCH_JOB                ( 4003) count:4      ave_time:1000   total_time:4000
Remote Procedure Call statistics by user
\troot            (       0) count:99     ave_time:1    total_time:99
"""


def event(at: float, what: str, gpus: tuple[int, ...] = (0,), node: str = "node1") -> dict[str, object]:
    return {"at": at, "what": what, "node": node, "gpus": list(gpus)}


def test_a_requeued_job_counts_from_its_first_submission_to_its_last_end() -> None:
    found = read_sacct(SACCT)
    assert (found["b"].submit_s, found["b"].start_s, found["b"].end_s, found["b"].restarts) == (100, 110, 190, 1)
    assert found["b"].nodes == "node[1-2]"
    assert [name for name, record in found.items() if record.completed] == ["a", "b"]


def test_a_gpu_held_twice_counts_once_and_a_killed_incarnation_not() -> None:
    jobs = [
        [event(0, "runs"), event(10, "waits"), event(20, "runs"), event(30, "ended")],
        [event(5, "runs"), event(25, "ended")],
        [event(0, "runs", (1,)), event(40, "runs", (1,)), event(50, "ended", (1,))],
    ]
    stretches = [one for events in jobs for one in intervals(events)]
    assert held_s(stretches, 0, 100) == 30 + 10
    assert held_s(stretches, 8, 22) == 14


def test_figures_and_lost_jobs() -> None:
    events = {
        "a": [event(110, "runs"), event(120, "waits"), event(130, "runs"), event(150, "ended")],
        "b": [event(130, "runs", (1,)), event(190, "ended", (1,))],
    }
    found = figures(["a", "b", "c", "d", "e"], read_sacct(SACCT), events, 2, (100.0, 150.0))
    assert found.lost == ("c", "d", "e")
    assert (found.mean_jct_s, found.makespan_s, found.mean_wait_s) == (70, 90, 10)
    assert found.holding == pytest.approx((30 + 60) / 180)
    assert found.holding_window == pytest.approx((30 + 20) / 100)
    assert (found.yields, found.restarts) == (1, 1)


def test_a_job_that_completed_without_its_iterations_is_lost() -> None:
    found = figures(["a"], read_sacct(SACCT), {"a": [event(1, "runs"), event(2, "stopped")]}, 1, (0.0, 9.0))
    assert found.lost == ("a",)


def test_costs_are_of_what_the_service_decided_and_of_what_the_jobs_noted() -> None:
    jobs = {"a": 1, "b": 2, "c": 3}
    events = {
        "a": [event(111.5, "up"), event(112, "runs"), event(149.2, "ended")],
        "b": [event(110, "up"), event(118, "saved"), event(119, "waits"), event(131, "up"), event(190, "ended")],
        "c": [event(131, "up"), event(200, "stopped")],
        "d": [],
    }
    noted = {name: [one | {"job": jobs[name]} for one in found] for name, found in events.items()}
    found = costs(read_sacct(SACCT), noted, {1: Decided(108.9, 111.0), 2: Decided(109.0, 109.5)})
    assert found.dispatches_s == (2, 1)
    assert found.startups_s == (0.5, 0.5)
    assert found.restarts_s == (13,)
    assert found.endings_s == (1, 0)


def test_a_checkpoint_ends_no_stretch_of_holding() -> None:
    moved = [event(1, "runs"), event(10, "saved"), event(30, "up"), event(31, "runs"), event(40, "ended")]
    assert [stretch for _, stretch in intervals(moved)] == [(31, 40)]
    kept = [event(1, "runs"), event(10, "saved"), event(40, "ended")]
    assert [stretch for _, stretch in intervals(kept)] == [(1, 40)]


def test_rpcs_are_those_by_type() -> None:
    found = read_sdiag(SDIAG)
    assert found.total == 16
    assert found.most(1) == [("REQUEST_JOB_INFO", 12, 0.25)]
    assert found.cycles == {"main_mean_us": 200, "main_max_us": 4000, "backfill_mean_us": 700, "backfill_max_us": 9000}


def test_loads_add_up_over_containers() -> None:
    before = [{"slurmctld": [1, 2.0, 10.0]}, {"slurmd": [2, 1.0, 5.0]}]
    after = [{"slurmctld": [1, 7.0, 12.0]}, {"slurmd": [2, 2.0, 6.0]}, {"slurmd": [2, 1.0, 6.0]}]
    found = loads(before, after, 10.0)
    assert (found["slurmctld"].cpus, found["slurmctld"].memory_mb) == (0.5, 12)
    assert (found["slurmd"].processes, found["slurmd"].cpus) == (4, 0.2)
