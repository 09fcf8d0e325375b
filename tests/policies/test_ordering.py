"""Invariants of every ordering, and small cases computed by hand for those that are a sort."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import job, key
from strategies import GPU_TYPES, NOW, queues

from cadenza.policies.core.model import Progress
from cadenza.policies.core.profile import Profile
from cadenza.policies.ordering import levels
from cadenza.policies.ordering.ftf import UNKNOWN_S, contention, rho
from cadenza.policies.ordering.ranking import Queue, Ranking, attained_service, starving_first
from cadenza.policies.ordering.tiresias import PROMOTE_KNOB, THRESHOLDS, level
from cadenza.policies.registry import ENTRIES, ordering

NAMES = [entry.name for entry in ENTRIES if entry.kind == "ordering"]
FAST = Profile("m", 1.0, (1.0, 3.0, 6.0), (62.5,), ((0.5,), (1.0,), (2.0,)))
"""Twice as fast with six CPUs."""


def waiting(number: int, *, ago: float = 900.0, gpus: int = 1, total: float | None = 1000.0, **facts):
    progress = Progress(at_s=NOW, total_s=total, **facts)
    return job(number, state="PENDING", gpus=gpus, submit_s=NOW - ago, progress=progress)


def queue(*jobs, gpus: int = 8, **facts) -> Queue:
    return Queue(NOW, jobs, {"": gpus}, **facts)


def ids(name: str, found: Queue) -> list[int]:
    return [one.key.id for one in ordering(name)(found).jobs]


# --- every ordering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(data=st.data())
def test_each_job_once_and_the_input_order_means_nothing(name, data):
    found = data.draw(queues(gpu_types=data.draw(st.sampled_from((("",), GPU_TYPES)))))
    ranking = ordering(name)(found)
    assert sorted(one.key for one in ranking.jobs) == sorted(one.key for one in found.jobs)
    shuffled = replace(found, jobs=tuple(data.draw(st.permutations(found.jobs))))
    assert ordering(name)(shuffled) == ranking


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_order(name):
    assert ordering(name)(queue()) == Ranking(())
    assert ids(name, replace(queue(waiting(1), waiting(2)), gpus={})) == [1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_equal_jobs_go_by_id(name):
    assert ids(name, queue(waiting(3), waiting(2), waiting(4))) == [2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_without_progress_is_a_new_one(name):
    fresh = replace(waiting(1), progress=None)
    assert set(ids(name, queue(fresh, waiting(2)))) == {1, 2}


# --- fifo, srtf, las -----------------------------------------------------------------------------------


def test_fifo():
    assert ids("fifo", queue(waiting(1, ago=5), waiting(2, ago=7), waiting(9, ago=6))) == [2, 9, 1]


def test_srtf_unknown_work_last():
    jobs = waiting(1, total=None), waiting(2, total=900.0, done_s=100.0), waiting(3, total=801.0)
    assert ids("srtf", queue(*jobs)) == [2, 3, 1]


def test_srtf_counts_on_the_best_speed_of_who_waits_and_the_present_one_of_who_runs():
    waits = replace(waiting(1, total=1500.0), profile=FAST)
    runs = replace(
        waiting(2), profile=FAST, progress=Progress(at_s=NOW - 100.0, total_s=1000.0, running=True, rate=1.0, speed=1.0)
    )
    found = queue(waits, runs)
    assert ids("srtf", found) == [1, 2]  # 1500 / 2 against 900 / 1
    assert ids("srtf", replace(found, profiled=False)) == [2, 1]


def test_srtf_who_holds_too_little_to_run_at_all_goes_last():
    stuck = Progress(at_s=NOW, total_s=1.0, running=True, rate=0.0, speed=0.0)
    assert ids("srtf", queue(replace(waiting(1), profile=FAST, progress=stuck), waiting(2, total=1e6))) == [2, 1]


def test_las_counts_gpus_times_time():
    jobs = waiting(1, attained_s=100.0, gpus=4), waiting(2, attained_s=300.0), waiting(3, attained_s=150.0, gpus=2)
    assert ids("las", queue(*jobs)) == [2, 3, 1]  # 300 = 300 by arrival, then 400


def test_las_a_running_job_goes_on_attaining():
    runs = replace(waiting(1), progress=Progress(at_s=NOW - 50.0, attained_s=60.0, running=True))
    assert ids("las", queue(runs, waiting(2, attained_s=100.0))) == [2, 1]


# --- finish-time fairness ------------------------------------------------------------------------------


def test_ftf_by_hand():
    # 16 GPUs wanted of 8: N = 2. rho = (elapsed + remaining N) / (total N).
    short = waiting(1, ago=1000.0, total=1000.0, gpus=8)  # (1000 + 2000) / 2000 = 1.5
    long = waiting(2, ago=1000.0, total=4000.0, gpus=4)  # (1000 + 8000) / 8000 = 1.125
    ahead = waiting(3, ago=1000.0, total=4000.0, done_s=3000.0, gpus=4)  # (1000 + 2000) / 8000 = 0.375
    found = queue(ahead, long, short)
    assert contention(found) == 2.0
    assert [rho(one, NOW, 2.0) for one in (short, long, ahead)] == [1.5, 1.125, 0.375]
    assert ids("ftf", found) == [1, 2, 3]
    # (1000 + 1000) / 1000 = 2, (1000 + 4000) / 4000 = 1.25, (1000 + 1000) / 4000 = 0.5, the least first
    assert ids("ftf-coded", found) == [3, 2, 1]


@pytest.mark.parametrize("name", ["fifo", "fairshare", "ftf"])
def test_a_requeue_costs_no_place(name):
    """Slurm submits a requeued job anew."""
    found = queue(waiting(1, ago=10.0), waiting(2, ago=20.0))
    assert ids(name, found) == [2, 1]
    assert ids(name, queue(waiting(1, ago=10.0, submitted_s=NOW - 30.0), waiting(2, ago=20.0))) == [1, 2]


def test_ftf_a_lone_job_that_never_waited_is_treated_fairly():
    runs = Progress(at_s=NOW - 600.0, total_s=1000.0, running=True, rate=1.0)
    assert rho(replace(waiting(1, ago=600.0), progress=runs), NOW, 1.0) == 1.0


@given(st.floats(0.0, 1e6), st.floats(1.0, 1e6), st.floats(0.0, 1.0), st.floats(1.0, 50.0))
def test_ftf_equal_jobs_have_equal_rho_and_waiting_makes_it_worse(ago, total, part, crowd):
    first, second = (waiting(number, ago=ago, total=total, done_s=part * total) for number in (1, 2))
    assert rho(first, NOW, crowd) == rho(second, NOW, crowd)
    assert rho(first, NOW + 1000.0, crowd) > rho(first, NOW, crowd)


def test_ftf_unknown_work_is_half_done_and_an_hour_at_least():
    known = waiting(1, total=10_000.0, done_s=5000.0)
    assert rho(replace(known, progress=replace(known.progress, total_s=None)), NOW, 3.0) == rho(known, NOW, 3.0)
    assert rho(waiting(2, total=None), NOW, 1.0) == rho(waiting(3, total=UNKNOWN_S), NOW, 1.0)


def test_ftf_coded_unknown_work_last():
    assert ids("ftf-coded", queue(waiting(1, total=None), waiting(2, total=1.0, ago=1e6))) == [2, 1]


def test_ftf_nothing_to_do_is_no_division_by_zero():
    empty = waiting(1, total=0.0)
    assert set(ids("ftf", queue(empty, waiting(2)))) == set(ids("ftf-coded", queue(empty, waiting(2)))) == {1, 2}


# --- levels --------------------------------------------------------------------------------------------


def test_levels_go_by_gpu_service_and_within_a_level_by_arrival():
    jobs = (
        waiting(1, ago=100.0, attained_s=599.0),  # the first level still
        waiting(2, ago=200.0, gpus=8, attained_s=75.0),  # 600 GPU seconds: the second level
        waiting(3, ago=300.0, attained_s=3_599.0),
        waiting(4, ago=900.0, attained_s=3_600.0),
        waiting(5, ago=50.0, attained_s=0.0),
        waiting(6, ago=5.0, attained_s=1e9),
    )
    assert ids("levels", queue(*jobs)) == [1, 5, 3, 2, 4, 6]


@given(attained_s=st.floats(0, 1e6), gpus=st.integers(1, 16))
def test_a_running_job_leaves_its_level_when_it_says(attained_s, gpus):
    runs = replace(waiting(1, gpus=gpus, attained_s=attained_s, running=True), state="RUNNING")
    until_s = levels.leaves_level_s(runs, NOW)
    now = levels.level_of(attained_service(runs, NOW))
    if now == len(levels.THRESHOLDS):
        assert until_s == float("inf")
        return
    assert until_s > NOW
    assert levels.level_of(attained_service(runs, NOW + 0.999 * (until_s - NOW))) == now
    assert levels.level_of(attained_service(runs, until_s + 0.01)) > now
    assert levels.leaves_level_s(waiting(1, gpus=gpus, attained_s=attained_s), NOW) == float("inf")


# --- tiresias ------------------------------------------------------------------------------------------


def test_tiresias_queues():
    first, second = THRESHOLDS
    jobs = (
        waiting(1, ago=9.0, attained_s=second, ran_s=NOW),
        waiting(2, ago=8.0, attained_s=first / 4, gpus=4, ran_s=NOW),
        waiting(3, ago=7.0, attained_s=first - 1, ran_s=NOW),
        waiting(4, ago=6.0),
    )
    assert [level(one, queue()) for one in jobs] == [2, 1, 0, 0]
    assert ids("tiresias", queue(*jobs)) == [3, 4, 2, 1]  # arrival inside a queue, not attained service


def test_tiresias_promotes_who_waited_longer_than_the_knob_times_their_run():
    limit = PROMOTE_KNOB * 4000.0
    ran = {"attained_s": 4000.0, "ago": 1e6}
    assert level(waiting(1, ran_s=NOW - limit, **ran), queue()) == 1
    assert level(waiting(1, ran_s=NOW - limit - 1.0, **ran), queue()) == 0
    runs = replace(waiting(1, ago=1e6), progress=Progress(at_s=NOW, attained_s=4000.0, running=True))
    assert level(runs, queue()) == 1


# --- the bound on waiting ------------------------------------------------------------------------------


def test_starving_jobs_go_first_the_longest_wait_first():
    jobs = (
        waiting(1, ago=50.0),
        waiting(2, ago=9000.0, ran_s=NOW - 100.0),
        waiting(3, ago=500.0),
        waiting(4, ago=900.0),
        replace(waiting(5, ago=9999.0), progress=Progress(at_s=NOW, running=True)),
    )
    found = queue(*jobs)
    ranking = Ranking(jobs, {key(1): "a100"})
    bounded = starving_first(ranking, found, 100.0)
    assert [one.key.id for one in bounded.jobs] == [4, 3, 1, 2, 5]
    assert bounded.gpu_type == ranking.gpu_type
    assert starving_first(ranking, found, 900.0) is ranking


@settings(max_examples=25)
@given(queues(), st.floats(0.0, 1e5))
def test_the_bound_keeps_every_job_and_the_order_of_the_others(found, bound):
    ranking = ordering("las")(found)
    bounded = starving_first(ranking, found, bound)
    assert sorted(one.key for one in bounded.jobs) == sorted(one.key for one in ranking.jobs)
    fine = [one for one in ranking.jobs if not _starves(one, bound)]
    assert [one for one in bounded.jobs if not _starves(one, bound)] == fine
    assert list(bounded.jobs[len(ranking.jobs) - len(fine) :]) == fine


def _starves(one, bound) -> bool:
    since = one.submit_s if one.progress.ran_s is None else one.progress.ran_s
    return not one.progress.running and NOW - since > bound
