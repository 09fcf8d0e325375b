"""Grow and shrink: only declared jobs, only idle GPUs of one host, after a time-out, and back at once."""

from __future__ import annotations

from dataclasses import replace

from gandiva_rig import ALL, NOTHING, after, decided, held, key, of, on, world
from snapshots import NOW

from cadenza.policies.actions import Place, Resize
from cadenza.policies.decision import Memory, SharingMemory
from cadenza.policies.model import Options
from cadenza.policies.sharing.moves import sizes

ELASTIC = replace(NOTHING, elastic=True)
GROWS = Options(min_gpus=1, max_gpus=4)


def idle(seconds: float = 100.0, *hosts: str, **facts) -> Memory:
    return Memory(sharing=SharingMemory(spare_s=tuple((name, NOW - seconds) for name in hosts or ("a",)), **facts))


def resized(decision):
    return {a.job.id: [share.gpus for share in a.shares] for a in of(Resize, decision)}


def test_a_declared_job_grows_after_the_time_out():
    snapshot = world(on(1, "a", 0, options=GROWS))
    assert resized(decided(snapshot, idle(), ELASTIC)) == {1: [4]}
    assert resized(decided(snapshot, idle(30.0), ELASTIC)) == {}
    assert resized(decided(snapshot, Memory(), ELASTIC)) == {}
    assert decided(snapshot, Memory(), ELASTIC).memory.sharing.spare_s == (("a", NOW),)
    assert resized(decided(snapshot, idle(), replace(ELASTIC, introspective=False))) == {}


def test_others_never_grow():
    for options in (Options(), Options(min_gpus=1), Options(max_gpus=1), None):
        assert resized(decided(world(on(1, "a", 0, options=options)), idle(), ELASTIC)) == {}


def test_the_faster_of_several_grows_first_and_within_its_host():
    slow, fast = on(1, "a", 0, options=GROWS, iteration_s=0.5), on(2, "a", 1, options=GROWS)
    assert resized(decided(world(slow, fast, on(4, "a", 2)), idle(), ELASTIC)) == {2: [2]}
    assert list(resized(decided(world(slow, fast), idle(), ELASTIC))) == [2, 1]
    alone = on(3, "b", 0, 1, options=Options(max_gpus=8))
    assert resized(decided(world(alone, hosts=("a", "b")), idle(100, "a", "b"), ELASTIC)) == {3: [4]}


def test_nobody_grows_while_a_job_waits():
    grown = on(1, "a", 0, 1, options=Options(max_gpus=4))
    assert resized(decided(world(grown, held(9, 4)), idle(), ELASTIC)) == {}
    turns = [on(1, "a", 0, options=GROWS), on(2, "b", 0, 1, 2, 3), on(3, "b", 0, 1, 2, 3, lane=1, state="yielded")]
    assert resized(decided(world(*turns, hosts=("a", "b")), idle(), ELASTIC)) == {}


def test_a_grown_job_gives_back_at_once_what_a_new_one_needs():
    grown = on(1, "a", 0, 1, 2, 3, options=Options(max_gpus=4))
    asked = idle(0.0, "a", asked_gpus=((1, 1),), moved_s=((1, NOW - 1.0),))
    for gpus, left in ((1, {1: [2]}), (2, {1: [2]}), (4, {})):
        assert resized(decided(world(grown, held(9, gpus)), asked, ELASTIC)) == left
    two = decided(world(grown, held(9, 2)), asked, ELASTIC)
    assert [a.nodes for a in of(Place, two)] == [("a",)]


def test_free_gpus_elsewhere_leave_it_alone():
    grown = on(1, "a", 0, 1, 2, 3, options=GROWS)
    assert resized(decided(world(grown, held(9, 2), hosts=("a", "b")), Memory(), ELASTIC)) == {}


def test_never_below_what_it_asked_for_without_a_minimum():
    job = on(1, "a", 0, 1, options=Options(max_gpus=4))
    assert sizes(job, 2) == (2, 4)
    assert sizes(replace(job, gpus=4), 2) == (2, 4)
    assert sizes(replace(job, options=Options(min_gpus=1, max_gpus=6)), 2) == (1, 2, 4, 6)
    assert resized(decided(world(job, on(2, "a", 2, 3), held(9)), Memory(), ELASTIC)) == {}


def test_what_it_had_first_is_remembered():
    snapshot = world(on(1, "a", 0, options=GROWS))
    memory = after(snapshot, decided(snapshot, idle(), ALL))
    assert memory.sharing.asked_gpus == ((1, 1),)
    assert memory.sharing.moved_s == ((1, NOW),)
    grown = world(on(1, "a", 0, 1, options=GROWS))
    assert after(grown, decided(grown, memory, NOTHING)).sharing.asked_gpus == ((1, 1),)
    assert key(1) in decided(grown, memory, NOTHING).reasons
