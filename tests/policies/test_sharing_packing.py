"""Packing: lowest utilisation first, only under overload and where memory fits; what does not pay is undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gandiva_rig import ALL, NOTHING, SHARING, after, decided, key, of, on, profile, world

from cadenza.policies.actions import Pack, Resume, Unpack, Yield
from cadenza.policies.decision import Memory, SharingMemory
from cadenza.policies.model import Options
from cadenza.policies.sharing.settings import GandivaSettings

PACK = replace(NOTHING, pack=True)
LOW, NEXT, BUSY = profile(0.1, model="low"), profile(0.4, model="next"), profile(0.9, model="busy")


def measured(*numbers: int, seconds: float = 0.1, **facts) -> Memory:
    return Memory(sharing=SharingMemory(alone_s=tuple((key(number), seconds) for number in numbers), **facts))


def three(*profiles, **facts):
    """Three jobs on one GPU, so that the cluster's height is 2 with the others'."""
    busy, *others = profiles
    there = [on(1, "a", 0, profile=busy, **facts)]
    there += [
        on(number, "a", 0, state="yielded", lane=lane, profile=one, waited_s=20.0, **facts)
        for lane, (number, one) in enumerate(zip((2, 3), others, strict=True), 1)
    ]
    fill = [on(number, "a", number - 9, profile=BUSY) for number in (10, 11, 12)]
    return [*there, *fill]


def packs(jobs, memory, gandiva=PACK, sharing=SHARING, **facts):
    return [a.jobs for a in of(Pack, decided(world(*jobs, lanes=3, **facts), memory, gandiva, sharing))]


def test_the_lowest_utilisation_joins_the_next_lowest_on_its_gpus():
    assert packs(three(BUSY, NEXT, LOW), measured(1, 2, 3)) == [(key(3), key(2))]


def test_packed_jobs_take_their_turn_together():
    jobs = three(BUSY, NEXT, LOW)
    jobs[0] = replace(jobs[0], lease=replace(jobs[0].lease, held_s=70.0, vtime_s=70.0))
    decision = decided(world(*jobs, lanes=3), measured(1, 2, 3), PACK)
    assert [a.job for a in of(Yield, decision)] == [key(1)]
    assert [a.job for a in of(Resume, decision)] == [key(2), key(3)]


def test_a_job_that_joins_a_holder_gets_the_gpus_at_once():
    jobs = three(LOW, NEXT, BUSY)
    snapshot = world(*jobs, lanes=3)
    decision = decided(snapshot, measured(1, 2, 3), PACK)
    assert [a.jobs for a in of(Pack, decision)] == [(key(1), key(2))]
    assert [a.job for a in of(Resume, decision)] == [key(2)]
    assert after(snapshot, decision).sharing.packs == ((key(1), key(2)),)
    assert decision.reasons[key(1)].startswith("runs with job 2 on a:gpu0")


@pytest.mark.parametrize(
    ("jobs", "memory", "gandiva", "facts"),
    [
        (three(BUSY, NEXT, LOW), measured(1), PACK, {}),  # jobs 2 and 3 have not run alone
        (three(BUSY, NEXT, LOW), measured(1, 2, 3), NOTHING, {}),
        (three(BUSY, NEXT, LOW), measured(1, 2, 3), replace(PACK, introspective=False), {}),
        (three(BUSY, NEXT, LOW), measured(1, 2, 3), PACK, {"gpu_memory_gb": 7.0}),
        (three(BUSY, NEXT, LOW), measured(1, 2, 3), PACK, {"gpu_memory_gb": None}),
        ([on(1, "a", 0), on(2, "a", 0, state="yielded", lane=1)], measured(1, 2), PACK, {}),  # no overload
    ],
)
def test_who_is_not_packed(jobs, memory, gandiva, facts):
    nodes = world(*jobs, lanes=3)
    if facts:
        nodes = replace(nodes, nodes=tuple(replace(lane, **facts) for lane in nodes.nodes))
    assert of(Pack, decided(nodes, memory, gandiva)) == []


def test_users_and_priorities_are_not_mixed():
    jobs = three(BUSY, NEXT, LOW)
    jobs[2] = replace(jobs[2], user="bob")
    alone = replace(SHARING, share_between_users=False)
    assert packs(jobs, measured(1, 2, 3), sharing=alone) == [(key(2), key(1))]
    jobs[2] = replace(jobs[2], options=Options(priority=1))
    assert packs(jobs, measured(1, 2, 3)) == [(key(2), key(1))]


def together(speed: float, jobs=(LOW, BUSY)):
    """Two packed jobs that both run at a part of their speed alone."""
    first, second = jobs
    slow = {"iteration_s": 0.1 / speed}
    return [on(1, "a", 0, profile=first, **slow), on(2, "a", 0, lane=1, profile=second, **slow)] + [
        on(number, "a", number - 9, profile=BUSY) for number in (10, 11, 12)
    ]


def test_a_pack_that_pays_stays():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    snapshot = world(*together(0.6))
    decision = decided(snapshot, memory, PACK)
    assert of(Unpack, decision) == []
    assert after(snapshot, decision).sharing == replace(memory.sharing, alone_s=decision.memory.sharing.alone_s)
    assert dict(decision.memory.sharing.alone_s)[key(1)] == 0.1


def test_a_pack_that_does_not_pay_is_undone_and_remembered():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    snapshot = world(*together(0.45))
    decision = decided(snapshot, memory, PACK)
    assert [a.job for a in of(Unpack, decision)] == [key(1)]
    learned = after(snapshot, decision).sharing
    assert learned.packs == ()
    assert learned.lost == ((key(1), key(2)),)
    again = decided(snapshot, replace(memory, sharing=learned), PACK)
    assert of(Pack, again) == []


def test_models_that_lost_once_are_not_tried_again():
    lost = measured(1, 2, 3, lost=((key(2), key(3)),))
    other = three(BUSY, replace(NEXT), LOW)
    assert packs(other, lost) == [(key(3), key(1))]
    twins = [*other[:1], *(replace(one, profile=LOW) for one in other[1:3]), *other[3:]]
    fifth = on(5, "a", 0, state="yielded", lane=3, profile=LOW)
    found = [a.jobs for a in of(Pack, decided(world(*twins, fifth, lanes=4), lost_of(lost, 5), PACK))]
    assert found == [(key(2), key(1))]


def lost_of(memory: Memory, number: int) -> Memory:
    return replace(memory, sharing=replace(memory.sharing, alone_s=(*memory.sharing.alone_s, (key(number), 0.1))))


def test_nothing_is_judged_before_both_have_run_together_long_enough():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    young = together(0.4)
    young[1] = replace(young[1], lease=replace(young[1].lease, held_s=2.0))
    assert of(Unpack, decided(world(*young), memory, PACK)) == []


def test_packs_end_with_the_setting_and_with_a_partner():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    assert [a.job for a in of(Unpack, decided(world(*together(0.9)), memory, NOTHING))] == [key(1)]
    snapshot = world(*together(0.9)[1:])
    assert after(snapshot, decided(snapshot, memory, PACK)).sharing.packs == ()


def test_larger_packs_are_a_setting():
    memory = measured(1, 2, 3, packs=((key(1), key(2)),))
    jobs = [*together(0.9, (LOW, LOW)), on(3, "a", 0, lane=2, state="yielded", profile=LOW, waited_s=5.0)]
    assert packs(jobs, memory) == []
    assert packs(jobs, memory, GandivaSettings(max_packed=3, migrate=False)) == [(key(3), key(1), key(2))]


def test_reactive_mode_has_no_packing():
    assert packs(three(BUSY, NEXT, LOW), measured(1, 2, 3), replace(ALL, introspective=False)) == []
