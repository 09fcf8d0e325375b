"""GPU time and waiting time of jobs between rounds, starts on further lanes, and the summary of a period."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_rig import books, job, node

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.accounting import usage
from cadenza.slurm_plugin.service.accounting.sharing_report import Record, sharing_report
from cadenza.slurm_plugin.service.accounting.usage import (
    MAX_GAP_S,
    HourRow,
    Spent,
    by_hour,
    counts,
    given_up,
    idle_waiting_s,
    spent,
    started,
    watched,
)
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore

LANES = (node("n1"), node("n1-l1", 1))
HOSTS = (Host("n1", agent_alive=True),)


def at(time_s: float, *jobs: Job, **lane0: object) -> ClusterSnapshot:
    lanes = (replace(LANES[0], **lane0), LANES[1])
    return ClusterSnapshot(time_s, lanes, jobs, HOSTS)


def on(state: str, vtime_s: float, gpus: tuple[int, ...] = (0,), **changes: object) -> Lease:
    return Lease(state, tuple(Gpu("n1", index) for index in gpus), vtime_s, **changes)  # type: ignore[arg-type]


def one(before: ClusterSnapshot, after: ClusterSnapshot, memory: Memory | None = None) -> Spent:
    (row,) = spent(before, after, memory or Memory())
    return row


# --- Time and GPUs ---


def test_a_pending_job_queues_from_its_submission_on() -> None:
    waits = job(1, state="PENDING", nodes=(), submit_s=104.0, start_s=None)
    assert one(at(100.0), at(110.0, waits)).queue_s == 6.0
    assert one(at(110.0, waits), at(120.0, waits)).queue_s == 10.0


def test_what_would_not_start_on_free_gpus_does_not_queue() -> None:
    for reason in ("Dependency", "BeginTime", "JobHeldUser"):
        waits = job(1, state="PENDING", nodes=(), state_reason=reason)
        assert one(at(100.0, waits), at(110.0, waits)).queue_s == 0.0
    held = job(1, state="PENDING", nodes=(), slurm_priority=0)
    assert one(at(100.0, held), at(110.0, held)).queue_s == 0.0
    ours = replace(held, held_at_restart=True)
    assert one(at(100.0, ours), at(110.0, ours)).queue_s == 10.0


def test_a_start_divides_the_time_into_queue_and_gpus() -> None:
    before = at(100.0, job(1, state="PENDING", nodes=(), gpus=2))
    runs = job(1, start_s=106.0, gpus=2, lease=on("held", 4.0, (0, 1), held_s=4.0))
    row = one(before, at(110.0, runs))
    assert (row.queue_s, row.gpu_s, row.turn_s) == (6.0, 8.0, 0.0)


def test_turns_within_one_round_are_told_by_the_virtual_clock() -> None:
    before = at(100.0, job(1, lease=on("held", 50.0)), job(2, "n1-l1", lease=on("yielded", 20.0)))
    after = at(112.0, job(1, lease=on("held", 54.0)), job(2, "n1-l1", lease=on("yielded", 28.0)))
    first, second = spent(before, after, Memory())
    assert (first.gpu_s, first.turn_s, first.further_gpu_s) == (4.0, 8.0, 0.0)
    assert (second.gpu_s, second.turn_s, second.further_gpu_s) == (8.0, 4.0, 8.0)


def test_an_unbroken_stretch_counts_whole_though_reports_are_a_little_old() -> None:
    before = at(100.0, job(1, lease=on("held", 50.0, held_s=50.0)))
    after = at(110.0, job(1, lease=on("held", 59.0, held_s=60.0)))
    assert (one(before, after).gpu_s, one(before, after).turn_s) == (10.0, 0.0)


def test_packed_jobs_divide_their_gpu() -> None:
    def both(seconds: float) -> tuple[Job, Job]:
        lease = on("held", seconds, held_s=seconds)
        return job(1, lease=lease), job(2, "n1-l1", user="eve", lease=lease)

    rows = spent(at(100.0, *both(50.0)), at(110.0, *both(60.0)), Memory())
    assert [(row.user, row.gpu_s, row.turn_s) for row in rows] == [("ada", 5.0, 0.0), ("eve", 5.0, 0.0)]


def test_a_suspend_that_is_not_ours_is_nobodys_turn() -> None:
    stopped = job(1, state="SUSPENDED", lease=on("yielded", 5.0))
    before, after = at(100.0, stopped), at(110.0, stopped)
    assert one(before, after).turn_s == 0.0
    assert one(before, after, Memory(suspended=frozenset({JobKey(1, 0)}))).turn_s == 10.0


def test_a_gap_in_the_record_is_not_counted() -> None:
    assert counts(at(100.0), at(100.0 + MAX_GAP_S))
    assert not counts(at(100.0), at(101.0 + MAX_GAP_S))
    assert not counts(at(100.0), at(100.0))
    assert not counts(None, at(100.0))


IDLE = job(1, gpus=2, lease=on("held", 50.0, (0, 1)))
PENDING = job(2, state="PENDING", nodes=(), gpus=2, start_s=None)


@pytest.mark.parametrize(
    ("jobs", "lane0", "idle"),
    [
        ((IDLE, PENDING), {}, 2),
        ((IDLE, replace(PENDING, gpus=3)), {}, 0),
        ((IDLE,), {}, 0),
        ((IDLE, replace(PENDING, partition="other")), {}, 0),
        ((IDLE, replace(PENDING, partition="other,gpu")), {}, 2),
        ((IDLE, replace(PENDING, state_reason="QOSMaxGRESPerUser")), {}, 0),
        ((IDLE, replace(PENDING, slurm_priority=0)), {}, 0),
        ((IDLE, replace(PENDING, slurm_priority=0, held_at_restart=True)), {}, 2),
        ((IDLE, PENDING), {"drained": True}, 0),
        ((replace(IDLE, lease=None), PENDING), {}, 2),
        ((replace(IDLE, lease=None), replace(IDLE, key=JobKey(3, 0), lease=None), PENDING), {}, 0),
        # One waits for its turn on GPUs that another one shares with it in part: the rest is idle.
        ((IDLE, job(3, "n1-l1", gpus=2, lease=on("yielded", 1.0, (1, 2)))), {}, 2),
        ((IDLE, job(3, "n1-l1", gpus=2, state="SUSPENDED", lease=on("yielded", 1.0, (1, 2)))), {}, 0),
    ],
)
def test_gpus_are_idle_while_a_job_waits_that_fits(jobs, lane0, idle) -> None:
    assert idle_waiting_s(at(100.0, *jobs, **lane0), at(110.0, *jobs, **lane0), Memory()) == 10.0 * idle
    assert idle_waiting_s(at(100.0, *jobs, **lane0), at(110.0, IDLE), Memory()) == 0.0


STATES = st.sampled_from(["waiting", "held", "stopping", "yielded"])
LEASES = st.builds(
    on, STATES, st.floats(0, 500), st.sets(st.integers(0, 3), min_size=1).map(tuple),
    held_s=st.floats(0, 500), waited_s=st.floats(0, 500), weight=st.floats(0.1, 10),
)  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Job:
    lease = draw(LEASES)
    state = draw(st.sampled_from(["RUNNING", "SUSPENDED", "PENDING", "OTHER"]))
    user = ("ada", "eve", "kim")[number % 3]
    there = {"nodes": (), "lease": None} if state == "PENDING" else {"lease": lease}
    times = {"submit_s": draw(st.floats(0, 130)), "start_s": draw(st.none() | st.floats(0, 130))}
    node_name = draw(st.sampled_from(["n1", "n1-l1"]))
    return job(number, node_name, user=user, gpus=len(lease.gpus), state=state, **times, **there)


CLUSTERS = st.tuples(*(st.none() | jobs(number) for number in range(1, 7)))


@given(CLUSTERS, CLUSTERS, st.floats(0.1, MAX_GAP_S))
def test_no_gpu_second_is_counted_twice_and_none_is_negative(before, after, span_s) -> None:
    last = at(100.0 + span_s, *filter(None, after))
    rows = spent(at(100.0, *filter(None, before)), last, Memory())
    assert len(rows) == len(last.jobs)
    assert sum(row.gpu_s for row in rows) <= 4 * span_s * (1 + 1e-9)
    for row in rows:
        assert min(row[3:]) >= 0.0
        assert row.queue_s + row.turn_s <= span_s * (1 + 1e-9)
        assert row.further_gpu_s in (0.0, row.gpu_s)


@given(st.floats(0, 1e9), st.floats(0.1, MAX_GAP_S))
def test_hours_divide_a_stretch_of_time(from_s, span_s) -> None:
    parts = list(by_hour(from_s, from_s + span_s))
    assert sum(part for _, part in parts) == pytest.approx(1.0)
    assert all(part > 0 for _, part in parts)


HOURS = st.lists(
    st.builds(
        HourRow, st.integers(0, 3), st.integers(1, 5), st.integers(0, 1), st.just(""), st.booleans(),
        *[st.floats(0, 1e5)] * 4, st.integers(0, 9),
    )
)  # fmt: skip


@given(HOURS)
def test_users_add_up_to_jobs_and_the_total_to_users(rows) -> None:
    mine = [HourRow(**{**{n: getattr(r, n) for n in r.__struct_fields__}, "user": "ae"[r.job % 2]}) for r in rows]
    found = sharing_report(Record(0.0, 14400.0, {0: 3600.0}, mine, (), ()))
    for name in ("jobs", "gpu_s", "further_gpu_s", "queue_s", "turn_s", "saved_s", "yields"):
        by_user = {row.user: getattr(row.sums, name) for row in found.users}
        by_job = {user: sum(getattr(j.sums, name) for j in found.jobs if j.user == user) for user in by_user}
        assert by_user == pytest.approx(by_job)
        assert getattr(found.total, name) == pytest.approx(sum(by_user.values()))
    assert found.total.gpu_s + found.others.gpu_s == pytest.approx(sum(row.gpu_s for row in mine))
    alone = [sharing_report(Record(0.0, 14400.0, {}, mine, (), ()), user).total.gpu_s for user in "ae"]
    assert sum(alone) == pytest.approx(found.total.gpu_s)


# --- Starts on further lanes ---

LONG = job(1, gpus=4, start_s=10.0, submit_s=5.0)
PENDS = job(2, state="PENDING", nodes=(), gpus=2, submit_s=90.0, start_s=None)
RUNS = job(2, "n1-l1", gpus=2, submit_s=90.0, start_s=103.0)
BEFORE, AFTER = at(100.0, LONG, PENDS, gpus_used=4), at(110.0, LONG, RUNS, gpus_used=4)


def test_a_start_on_a_further_lane_is_noted_once() -> None:
    (start,) = started(BEFORE, AFTER)
    assert (start.job, start.at_s, start.gpus, start.free_s) == (2, 103.0, 2, None)
    assert started(AFTER, replace(AFTER, time_s=120.0)) == ()
    assert started(BEFORE, at(110.0, LONG, replace(RUNS, nodes=("n1",)))) == ()
    assert started(BEFORE, at(110.0, LONG, replace(RUNS, options=None))) == ()
    assert started(BEFORE, at(110.0, LONG, replace(RUNS, key=JobKey(2, 1)))) == ()
    both_new = at(110.0, replace(RUNS, submit_s=101.0))
    assert [start.job for start in started(at(100.0), both_new)] == [2]


def test_lane_0_is_watched_until_it_has_room_even_when_the_job_has_ended() -> None:
    starts = watched(started(BEFORE, AFTER), BEFORE, AFTER, {})
    assert starts[0].free_s is None
    without = at(500.0, LONG, gpus_used=4)
    starts = watched(starts, AFTER, without, {})
    assert starts[0].free_s is None
    (done,) = watched(starts, without, at(510.0), {})
    assert done.free_s == 500.0
    assert done.saved_s(0.0, 1000.0) == 397.0
    assert done.saved_s(0.0, 200.0) + done.saved_s(200.0, 1000.0) == 397.0


def test_what_lane_0_lost_to_turns_is_taken_off() -> None:
    starts = watched(started(BEFORE, AFTER), BEFORE, AFTER, {LONG.key: 60.0, RUNS.key: 500.0})
    (done,) = watched(starts, replace(AFTER, time_s=500.0), at(510.0, RUNS), {})
    assert (done.delay_s, done.saved_s(0.0, 1000.0)) == (60.0, 337.0)


def test_gpus_given_to_a_later_job_were_free_for_it() -> None:
    later = job(3, gpus=4, submit_s=95.0, start_s=200.0)
    sooner = replace(later, submit_s=80.0)
    for taker, free_s in ((later, 110.0), (sooner, None)):
        (start,) = watched(started(BEFORE, AFTER), AFTER, at(210.0, taker, RUNS, gpus_used=4), {})
        assert start.free_s == free_s


def test_room_must_be_in_its_partition_and_in_service() -> None:
    for change in ({"drained": True}, {"up": False}, {"partitions": ("other",)}, {"gpus_used": 3}):
        (start,) = watched(started(BEFORE, AFTER), AFTER, at(120.0, RUNS, **change), {})
        assert start.free_s is None
    promoted = replace(RUNS, key=JobKey(2, 1), nodes=("n1",))
    (start,) = watched(started(BEFORE, AFTER), AFTER, at(120.0, promoted, gpus_used=4), {})
    assert start.free_s == 110.0


def test_room_at_the_start_saves_nothing_and_a_gap_ends_the_watch() -> None:
    free = at(110.0, RUNS)
    (start,) = watched(started(BEFORE, free), BEFORE, free, {})
    assert start.saved_s(0.0, 1e9) == 0.0
    (lost,) = given_up(started(BEFORE, AFTER), 110.0)
    assert lost.saved_s(0.0, 1e9) == 7.0


# --- Large sites -------------------------------------------------------------------------------------------------


def test_waiting_jobs_are_counted_in_turns_and_no_second_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def queued(folder: Path) -> dict[int, float]:
        """Run rounds in which 30 jobs wait; one starts, one is canceled, one comes to wait for something else."""
        folder.mkdir()
        store = SqliteStore(folder / "cadenza.db", SystemClock())
        jobs = [job(n, state="PENDING", state_reason="Priority", slurm_priority=5, submit_s=0.0) for n in range(30)]
        for number in range(20):
            if number == 7:
                jobs[3] = replace(jobs[3], state="RUNNING", nodes=("n1",), start_s=1065.0)
                jobs[5] = replace(jobs[5], state_reason="Dependency")
                del jobs[9]
            told = replace(books(*jobs), hosts=(Host("n1", agent_alive=True),), time_s=1000.0 + 10.0 * number)
            store.begin(told, Decision((), Memory()), (), Memory())
        with StoreReader(folder / "cadenza.db") as reader:
            return {row.job: row.queue_s for row in reader.hours(0.0, 1e9)}

    whole = queued(tmp_path / "whole")
    monkeypatch.setattr(usage, "ROWS_A_ROUND", 5)
    parts = queued(tmp_path / "parts")
    assert whole[0] == 190.0
    assert [parts[n] for n in (3, 5, 9)] == [whole[n] for n in (3, 5)] + [60.0]
    assert all(whole[n] - 70.0 <= parts[n] <= whole[n] for n in whole)
    assert sum(parts.values()) > 0.8 * sum(whole.values())
