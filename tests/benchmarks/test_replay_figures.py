"""Figures of a replay from texts as Slurm prints them."""

from __future__ import annotations

from replay_figures import figures, gpu_parts, loads, read_sacct, read_sdiag

SACCT = """\
1|COMPLETED|100|110|150|node1
2|REQUEUED|100|110|120|node1
2|COMPLETED|120|130|190|node[1-2]
3|TIMEOUT|105|130|200|node2
4|RUNNING|105|Unknown|Unknown|node3
9|COMPLETED|90|100|110|node1
"""
NAMES = {"1": "a", "2": "b", "3": "c", "4": "d"}
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


def event(at: float, what: str) -> dict[str, object]:
    return {"at": at, "what": what}


def test_a_requeued_job_counts_from_its_first_submission_to_its_last_end() -> None:
    found = read_sacct(SACCT, NAMES)
    assert (found["b"].submit_s, found["b"].start_s, found["b"].end_s, found["b"].restarts) == (100, 110, 190, 1)
    assert found["b"].nodes == "node[1-2]"
    assert [name for name, record in found.items() if record.completed] == ["a", "b"]


def test_figures_and_lost_jobs() -> None:
    events = {
        "a": [event(111, "up"), event(112, "runs"), event(120, "waits"), event(130, "runs"), event(150, "ended")],
        "b": [event(113, "runs"), event(118, "saved"), event(131, "up"), event(133, "runs"), event(190, "ended")],
    }
    found = figures(["a", "b", "c", "d", "e"], read_sacct(SACCT, NAMES), events, 100.0)
    assert found.lost == ("c", "d", "e")
    assert (found.mean_jct_s, found.makespan_s, found.mean_first_s) == (70, 90, 12.5)
    assert (found.start_up_s, found.move_s) == (2.5, 15)
    assert (found.yields, found.restarts) == (1, 1)


def test_a_job_that_completed_without_its_iterations_is_lost() -> None:
    found = figures(["a"], read_sacct(SACCT, NAMES), {"a": [event(1, "runs"), event(2, "stopped")]}, 0.0)
    assert found.lost == ("a",)


def test_an_accounts_part_is_of_the_gpu_time_in_the_window_before_a_requeue_too() -> None:
    records = read_sacct(SACCT, NAMES)
    jobs = [("a", "large", 1), ("b", "small", 2), ("e", "small", 8)]
    assert gpu_parts(records, jobs, (100.0, 150.0)) == {"large": 0.4, "small": 0.6}  # 40 and 2 x (10 + 20) GPU s


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
