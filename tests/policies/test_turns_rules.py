"""One call of next_turn: priorities, exclusive jobs, users, claims, and that input order changes nothing."""

from __future__ import annotations

import re
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns_world import gpus, key

from cadenza.policies.sharing.turns.fair_queue import (
    MAX_FAIR_WAITS,
    MAX_FAIR_WAITS_BEHIND,
    Contender,
    Turn,
    arrival_vtime,
    groups,
    next_turn,
)

some = settings(max_examples=30, deadline=None)


def job(number: int, *indices: int, **facts) -> Contender:
    return Contender(key=key(number), gpus=gpus(*indices), **{"ready": True, **facts})


def turn(*contenders: Contender, **rules) -> Turn:
    return next_turn(contenders, **{"slice_s": 60.0, "min_run_s": 5.0, "share_between_users": False, **rules})


@st.composite
def contenders(draw: st.DrawFn):
    """Any state the agents can report: holders never overlap, because an agent gives a GPU once."""
    found, used = [], set()
    for number in range(draw(st.integers(1, 9))):
        gang = draw(st.sets(st.integers(0, 5), min_size=1, max_size=6))
        state = draw(st.sampled_from(("waiting", "held", "stopping", "yielded")))
        holding = state in ("held", "stopping") and not gang & used
        used |= gang if holding else set()
        found.append(
            job(
                number,
                *gang,
                state=state if holding else draw(st.sampled_from(("waiting", "yielded"))),
                user=draw(st.sampled_from("ab")),
                priority=draw(st.integers(0, 2)),
                weight=draw(st.sampled_from((0.5, 1.0, 2.0))),
                vtime_s=draw(st.floats(0, 300)),
                held_s=draw(st.floats(0, 120)) if holding else 0.0,
                waited_s=0.0 if holding else draw(st.floats(0, 900)),
                ready=draw(st.booleans()),
                exclusive=draw(st.integers(0, 5)) == 0,
                resume_ordered=draw(st.booleans()),
                preferred=draw(st.booleans()),
                eligible=draw(st.booleans()),
                iteration_s=draw(st.sampled_from((None, 1.0, 30.0))),
            )
        )
    return found


anything = st.tuples(contenders(), st.booleans(), st.booleans())


def run(case) -> tuple[dict, Turn]:
    jobs, share, displace = case
    return {c.key: c for c in jobs}, turn(*jobs, share_between_users=share, displace=displace)


@some
@given(anything)
def test_nobody_gets_a_gpu_that_another_job_has_or_gets(case):
    by_key, result = run(case)
    for number in result.resumes:
        rest = [c for c in by_key.values() if c.holding or c.key in result.resumes]
        assert not any(by_key[number].gpus & c.gpus for c in rest if c.key != number)
    holders = [by_key[number].gpus for number in result.holders]
    assert sum(map(len, holders)) == len(frozenset().union(*holders))


@some
@given(anything)
def test_higher_priority_never_yields_to_lower_nor_anybody_who_cannot(case):
    by_key, result = run(case)
    for number in result.yields:
        holder = by_key[number]
        assert holder.state == "held"
        assert holder.ready
        assert not holder.exclusive
        taker = by_key[key(int(re.findall(r"for job (\d+):", result.reasons[number])[0]))]
        assert taker.gpus & holder.gpus
        assert taker.exclusive or taker.priority >= holder.priority


@some
@given(anything)
def test_equal_priorities_are_stopped_only_after_the_minimum_run_time(case):
    by_key, result = run(case)
    for number in result.yields:
        holder = by_key[number]
        takers = [c for c in by_key.values() if not c.holding and c.gpus & holder.gpus]
        if not any(c.exclusive or c.priority > holder.priority for c in takers):
            assert holder.held_s >= 5.0


@some
@given(anything, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(case, random):
    jobs, share, displace = case
    mixed = list(jobs)
    random.shuffle(mixed)
    assert run((mixed, share, displace))[1] == run(case)[1]


@some
@given(anything)
def test_groups_do_not_depend_on_each_other(case):
    jobs, share, displace = case
    whole = turn(*jobs, share_between_users=share, displace=displace)
    parts = [turn(*group, share_between_users=share, displace=displace) for group in groups(jobs)]
    assert whole.holders == frozenset().union(*(part.holders for part in parts))
    assert sorted(whole.yields) == sorted(number for part in parts for number in part.yields)
    assert whole.reasons == {number: why for part in parts for number, why in part.reasons.items()}


@some
@given(anything)
def test_free_gpus_are_given_unless_they_are_promised(case):
    """Work conservation: a job that may run and whose GPUs are free runs, or waits for a job before it."""
    by_key, result = run(case)
    for waiting in by_key.values():
        used = [c for c in by_key.values() if c.holding and c.gpus & waiting.gpus]
        if not waiting.holding and waiting.eligible and not used and waiting.key not in result.resumes:
            assert "come" in result.reasons[waiting.key] or "another user" in result.reasons[waiting.key]


@some
@given(anything)
def test_without_displacement_only_unmanaged_jobs_make_anybody_yield(case):
    jobs, share, _ = case
    by_key, result = run((jobs, share, False))
    for number in result.yields:
        assert any(c.exclusive and not c.holding and c.gpus & by_key[number].gpus for c in by_key.values())


@some
@given(contenders())
def test_users_are_kept_apart_unless_they_share(jobs):
    by_key, result = run((jobs, False, True))
    for number in (*result.resumes, *result.upcoming):
        fresh = by_key[number]
        if fresh.started or fresh.exclusive:
            continue
        for other in by_key.values():
            there = other.started or other.key in result.resumes or other.key in result.upcoming
            if there and not other.exclusive and other.gpus & fresh.gpus:
                assert other.user == fresh.user


@some
@given(anything)
def test_every_contender_has_a_reason(case):
    by_key, result = run(case)
    assert result.reasons.keys() == by_key.keys()
    assert set(result.vtimes) == {*result.resumes, *result.upcoming}


def test_a_slice_ends_half_an_iteration_early():
    holder = job(1, 0, state="held", vtime_s=57.0, held_s=57.0, iteration_s=6.0)
    waiting = job(2, 0)
    assert turn(holder, waiting).yields == (key(1),)
    early = job(1, 0, state="held", vtime_s=56.9, held_s=56.9, iteration_s=6.0)
    assert turn(early, waiting).yields == ()


def test_reasons_read_like_sentences():
    holder = job(12, 0, 1, 2, 3, state="held", vtime_s=12, held_s=12.0)
    result = turn(holder, job(17, 0))
    assert result.reasons == {
        key(12): "holds node1:gpu0-3 for 12 s of its 60 s slice; next: job 17",
        key(17): "waits for node1:gpu0: job 12 may keep it for 48 s more",
    }
    assert turn(job(12, 0, state="held", vtime_s=90, held_s=90.0), job(17, 0)).reasons == {
        key(12): "makes way on node1:gpu0 for job 17: its 60 s slice is over",
        key(17): "gets node1:gpu0 as soon as job 12 made way",
    }


def test_higher_priority_and_unmanaged_jobs_do_not_wait_for_the_slice():
    holder = job(1, 0, 1, state="held", held_s=0.1)
    assert turn(holder, job(2, 1, priority=1)).yields == (key(1),)
    assert turn(holder, job(2, 1, exclusive=True), displace=False).yields == (key(1),)
    assert turn(holder, job(2, 1)).yields == ()


def test_a_gang_takes_all_its_gpus_at_one_moment():
    over = job(1, 0, state="held", vtime_s=60, held_s=60.0)
    early = job(2, 1, state="held", vtime_s=60, held_s=30.0)
    gang = job(3, 0, 1)
    assert turn(over, early, gang).yields == ()
    assert turn(over, job(2, 1, state="held", vtime_s=60, held_s=60.0), gang).yields == (key(1), key(2))


@pytest.mark.parametrize(("held_s", "fills"), [(30.0, True), (50.0, False)])
def test_a_free_gpu_of_a_waiting_gang_is_filled_while_that_is_worth_a_switch(held_s, fills):
    blocker = job(1, 1, state="held", vtime_s=held_s, held_s=held_s)
    gang, small = job(2, 0, 1), job(3, 0, vtime_s=5.0)
    assert (key(3) in turn(blocker, gang, small).resumes) == fills


def test_a_filler_makes_way_after_the_minimum_run_time():
    over = job(1, 1, state="held", vtime_s=60, held_s=60.0)
    gang = job(2, 0, 1, waited_s=60.0)
    filler = job(3, 0, state="held", vtime_s=40 + 4.0, held_s=4.0)
    assert turn(over, gang, filler).yields == ()
    filler = job(3, 0, state="held", vtime_s=40 + 5.0, held_s=5.0)
    assert turn(over, gang, filler).yields == (key(1), key(3))


def test_free_gpus_wait_for_a_gang_whose_blockers_are_stopping():
    """Also in the agent's work conservation, or the first to stop would come straight back."""
    stopping = job(1, 1, state="stopping", held_s=60.0, vtime_s=60.0)
    stopped = job(2, 0, state="yielded", vtime_s=60.0)
    gang = job(3, 0, 1)
    result = turn(stopping, stopped, gang, displace=False)
    assert result.resumes == ()
    assert result.upcoming == (key(3),)


def test_what_the_service_prefers_goes_first_among_equals():
    assert turn(job(1, 0), job(2, 0, resume_ordered=True), displace=False).resumes == (key(2),)
    assert turn(job(1, 0, priority=1), job(2, 0, resume_ordered=True), displace=False).resumes == (key(1),)


def test_an_overdue_job_goes_first_and_starts_level_with_the_others():
    holder = job(1, 0, state="held", vtime_s=70.0, held_s=60.0)
    late, fresh = job(2, 0, vtime_s=9000.0, waited_s=400.0), job(3, 0, vtime_s=20.0)
    result = turn(holder, late, fresh)
    assert result.upcoming == (key(2),)
    assert result.vtimes == {key(2): 20.0}
    assert turn(holder, job(2, 0, vtime_s=9000.0, waited_s=100.0), fresh).upcoming == (key(3),)


def test_a_preferred_job_displaces_the_others_when_their_slice_is_over():
    fresh = job(1, 0, state="held", held_s=59.0, vtime_s=59.0)
    first = job(2, 0, state="yielded", preferred=True, vtime_s=500.0)
    assert turn(fresh, first).yields == ()
    assert turn(job(1, 0, state="held", held_s=60.0, vtime_s=60.0), first).yields == (key(1),)
    assert turn(first, job(3, 0, state="yielded")).resumes == (key(2),)


def test_a_preferred_job_keeps_its_gpus_until_another_is_overdue():
    first = job(1, 0, state="held", preferred=True, held_s=300.0, vtime_s=900.0)
    fair_s = 2 * 60.0
    behind = job(2, 0, state="yielded", waited_s=MAX_FAIR_WAITS_BEHIND * fair_s)
    result = turn(first, behind)
    assert result.yields == ()
    assert result.reasons == {
        key(1): "holds node1:gpu0 for 300 s and comes first in the order; next: job 2",
        key(2): "waits for node1:gpu0: job 1 comes first in the order",
    }
    assert turn(first, job(2, 0, state="yielded", waited_s=MAX_FAIR_WAITS_BEHIND * fair_s + 1)).yields == (key(1),)
    assert turn(first, job(2, 0, state="yielded", priority=1)).yields == (key(1),)
    assert turn(first, job(2, 0, exclusive=True)).yields == (key(1),)


def test_preferred_jobs_take_turns_as_all_do_among_themselves():
    holder = job(1, 0, state="held", preferred=True, held_s=60.0, vtime_s=60.0)
    assert turn(holder, job(2, 0, preferred=True, vtime_s=0.0)).yields == (key(1),)
    assert turn(holder, job(2, 0, preferred=True, vtime_s=200.0)).yields == ()


def test_without_preferred_jobs_a_job_is_overdue_as_ever():
    holder = job(1, 0, state="held", held_s=60.0, vtime_s=60.0)
    late = job(2, 0, state="yielded", vtime_s=9000.0, waited_s=MAX_FAIR_WAITS * 2 * 60.0 + 1)
    assert turn(holder, late).yields == (key(1),)


def test_a_job_of_another_user_waits_until_those_that_started_have_ended():
    asleep = job(1, 0, state="yielded", user="ann")
    result = turn(asleep, job(2, 0, user="bob", priority=1))
    assert result.resumes == (key(1),)
    assert "sharing between users is off" in result.reasons[key(2)]


def test_arrivals_start_with_the_least_virtual_time_of_those_they_meet():
    others = [job(1, 0, vtime_s=50), job(2, 1, vtime_s=20), job(3, 2, vtime_s=1), job(4, 0, exclusive=True)]
    assert arrival_vtime(gpus(0, 1), others) == 20
    assert arrival_vtime(gpus(7), others) == 0


def test_a_weight_must_be_positive():
    with pytest.raises(ValueError, match=r"job 1: the weight must be above 0, not 0\.0"):
        job(1, 0, weight=0.0)


def test_fifty_contenders_take_about_a_millisecond():
    many = [
        job(n, *range(n % 4, n % 4 + 4), state="held" if n == 0 else "yielded", vtime_s=n * 7 % 60, held_s=70)
        for n in range(50)
    ]
    assert min(timeit.repeat(lambda: turn(*many), number=10, repeat=5)) / 10 < 0.005
