"""Packed jobs in the turns: they have their GPUs at once, make way together, and no other job shares a GPU."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from test_turns_rules import contenders, job, turn
from turns_world import gpus, key

from cadenza.policies.sharing.turns.fair_queue import groups

some = settings(max_examples=100, deadline=None)


def packed(*jobs):
    keys = frozenset(one.key for one in jobs)
    return [replace(one, packed_with=keys - {one.key}) for one in jobs]


def test_a_partner_of_a_holder_gets_the_gpus_too():
    pair = packed(job(1, 0, state="held", held_s=9.0, vtime_s=9.0), job(2, 0))
    result = turn(*pair)
    assert result.resumes == (key(2),)
    assert result.holders == {key(1), key(2)}
    assert turn(*pair[:1], job(2, 0)).resumes == ()


def test_both_make_way_when_the_slice_of_the_first_is_over():
    pair = packed(
        job(1, 0, state="held", held_s=61.0, vtime_s=61.0), job(2, 0, state="held", held_s=30.0, vtime_s=59.0)
    )
    result = turn(*pair, job(3, 0, state="yielded", vtime_s=0.0))
    assert result.yields == (key(1), key(2))
    assert result.upcoming == (key(3),)


def test_both_get_their_turn_although_another_job_ranks_between_them():
    pair = packed(job(1, 0, state="yielded", vtime_s=0.0), job(2, 0, state="yielded", vtime_s=20.0))
    other = job(3, 0, state="yielded", vtime_s=12.0)
    assert turn(*pair, other).resumes == (key(1), key(2))
    assert turn(*pair, replace(other, vtime_s=9.0)).resumes == (key(3),)


def test_a_pack_counts_only_when_both_say_so_on_the_same_gpus():
    first, second = packed(job(1, 0, state="held", held_s=9.0), job(2, 0))
    assert turn(first, replace(second, packed_with=frozenset())).resumes == ()
    assert turn(first, replace(second, gpus=gpus(0, 1))).resumes == ()


@st.composite
def with_packs(draw: st.DrawFn):
    """Contenders of which some share all their GPUs and are packed; packed ones may hold at once."""
    found = {c.key: c for c in draw(contenders())}
    twins = []
    for one in [c for c in found.values() if not c.exclusive]:
        if draw(st.booleans()):
            state = draw(st.sampled_from(("waiting", "yielded", one.state)))
            twin = replace(one, key=key(100 + one.key.id), state=state, priority=one.priority)
            if not twin.holding:
                twin = replace(twin, held_s=0.0, vtime_s=draw(st.floats(0, 300)))
            twins += packed(one, twin)
    return list({**found, **{c.key: c for c in twins}}.values())


@some
@given(with_packs(), st.booleans(), st.randoms(use_true_random=False))
def test_only_packed_jobs_share_a_gpu_and_order_changes_nothing(jobs, share, rng):
    result = turn(*jobs, share_between_users=share)
    by_key = {c.key: c for c in jobs}
    holders = sorted(result.holders)
    for index, one in enumerate(holders):
        for other in holders[:index]:
            if by_key[one].gpus & by_key[other].gpus:
                assert other in by_key[one].packed_with
    shuffled = list(jobs)
    rng.shuffle(shuffled)
    assert turn(*shuffled, share_between_users=share) == result


@some
@given(with_packs(), st.booleans())
def test_groups_can_still_be_decided_one_by_one(jobs, share):
    whole = turn(*jobs, share_between_users=share)
    parts = [turn(*group, share_between_users=share) for group in groups(jobs)]
    assert whole.holders == frozenset().union(*(part.holders for part in parts))
    assert set(whole.yields) == {name for part in parts for name in part.yields}
