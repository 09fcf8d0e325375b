"""Packing: lowest utilization first, only under overload and where memory fits; what does not pay is undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gandiva_rig import ALL, NOTHING, NOW, SHARING, after, decided, key, of, on, pace, profile, world

from cadenza.policies.core.actions import Pack, Resume, Unpack, Yield
from cadenza.policies.core.decision import Alone, Lost, Memory, SharingMemory
from cadenza.policies.core.model import Job, JobUsage, Options
from cadenza.policies.sharing.state.settings import GandivaSettings

PACK = replace(NOTHING, pack=True)
LOW, NEXT, BUSY = profile(0.1, model="low"), profile(0.4, model="next"), profile(0.9, model="busy")


def measured(*numbers: int, seconds: float = 0.1, **facts) -> Memory:
    return Memory(sharing=SharingMemory(alone=tuple(Alone(key(number), seconds) for number in numbers), **facts))


def unmeasured(jobs) -> list[Job]:
    """The same jobs before they have run alone long enough."""
    return [replace(one, lease=replace(one.lease, pace=None)) for one in jobs]


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


def test_the_lowest_utilization_joins_the_next_lowest_on_its_gpus():
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
        (unmeasured(three(BUSY, NEXT, LOW)), measured(1), PACK, {}),  # jobs 2 and 3 have not run alone
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


def together(speed: float, jobs=(LOW, BUSY), held_s: float = 100.0):
    """Two packed jobs that both run at a part of their speed alone."""
    first, second = jobs
    slow = {"iteration_s": 0.1 / speed, "held_s": held_s}
    return [
        on(1, "a", 0, profile=first, co_runners=(2,), **slow),
        on(2, "a", 0, lane=1, profile=second, co_runners=(1,), **slow),
    ] + [on(number, "a", number - 9, profile=BUSY) for number in (10, 11, 12)]


def test_a_pack_that_pays_stays():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    snapshot = world(*together(0.6))
    decision = decided(snapshot, memory, PACK)
    assert of(Unpack, decision) == []
    assert after(snapshot, decision).sharing == replace(memory.sharing, alone=decision.memory.sharing.alone)
    assert {row.job: row.iteration_s for row in decision.memory.sharing.alone}[key(1)] == 0.1
    assert decision.reasons[key(2)] == (
        "runs with job 1: together 120% of what turns do (job 1 167 ms an iteration, 100 ms alone, "
        "job 2 167 ms an iteration, 100 ms alone)"
    )


def test_a_pack_that_does_not_pay_is_undone_and_remembered():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    snapshot = world(*together(0.45))
    decision = decided(snapshot, memory, PACK)
    assert [a.job for a in of(Unpack, decision)] == [key(1)]
    assert "together 90% of what turns do" in of(Unpack, decision)[0].reason
    learned = after(snapshot, decision).sharing
    assert learned.packs == ()
    assert learned.lost == (Lost(key(1), key(2), NOW, "low", "busy"),)
    again = decided(snapshot, replace(memory, sharing=learned), PACK)
    assert of(Pack, again) == []


def test_models_that_lost_once_are_not_tried_again():
    lost = measured(1, 2, 3, lost=(Lost(key(2), key(3), NOW - 60, "next", "low"),))
    other = three(BUSY, replace(NEXT), LOW)
    assert packs(other, lost) == [(key(3), key(1))]
    more = ((4, LOW), (5, NEXT))
    others = [on(number, "a", 0, state="yielded", lane=number - 3, profile=one) for number, one in more]
    found = [a.jobs for a in of(Pack, decided(world(*other, *others, lanes=4), lost, PACK))]
    assert found == [(key(3), key(4)), (key(2), key(5))], "others of these models need no trial"
    gone = replace(lost, sharing=replace(lost.sharing, lost=(Lost(key(8), key(9), NOW - 60, "next", "low"),)))
    assert packs(other, gone) == [(key(3), key(1))], "also when the pair has ended"


def test_a_pair_that_lost_long_ago_is_tried_again():
    old = measured(1, 2, 3, lost=(Lost(key(2), key(3), NOW - 90000, "next", "low"),))
    snapshot = world(*three(BUSY, NEXT, LOW), lanes=3)
    decision = decided(snapshot, old, PACK)
    assert [a.jobs for a in of(Pack, decision)] == [(key(3), key(2))]
    assert after(snapshot, decision).sharing.lost == ()


def test_a_gain_within_the_margin_is_no_gain():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    assert len(of(Unpack, decided(world(*together(0.52)), memory, PACK))) == 1
    assert of(Unpack, decided(world(*together(0.52)), memory, replace(PACK, pack_margin=0.0))) == []


def test_a_noisy_measurement_counts_after_three_windows():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    for window_s, undone in ((30.0, 0), (59.0, 0), (60.0, 1)):
        jobs = together(0.4)
        noisy = pace(0.25, window_s, error=0.2, co_runners=(2,))
        jobs[0] = replace(jobs[0], lease=replace(jobs[0].lease, pace=noisy))
        assert len(of(Unpack, decided(world(*jobs), memory, PACK))) == undone


def test_a_partner_that_hardly_gets_on_loses():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    jobs = together(0.9)
    starved = pace(0.1, 61.0, co_runners=(1,))._replace(iterations=0, iteration_s=0.0)
    jobs[1] = replace(jobs[1], lease=replace(jobs[1].lease, pace=starved))
    (undone,) = of(Unpack, decided(world(*jobs), memory, PACK))
    assert "job 2 6.1e+04 ms an iteration" in undone.reason


def test_times_beside_others_say_nothing_of_the_pack():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    jobs = together(0.4)
    jobs[0] = replace(jobs[0], lease=replace(jobs[0].lease, pace=pace(0.25, co_runners=(3,))))
    assert of(Unpack, decided(world(*jobs), memory, PACK)) == []


def test_a_pair_that_profiles_say_loses_is_not_tried():
    low = profile(0.1, model="low", together={"next": 1.03, "busy": 1.2})
    assert packs(three(BUSY, NEXT, low), measured(1, 2, 3)) == [(key(3), key(1))]


def test_the_gpu_drivers_word_comes_before_the_profile_and_the_loader_says_the_rest():
    jobs = three(BUSY, NEXT, LOW)
    jobs[0] = replace(jobs[0], lease=replace(jobs[0].lease, use=JobUsage(gpu_percent=5.0)))
    assert packs(jobs, measured(1, 2, 3)) == [(key(1), key(3))]
    plain = replace(LOW, gpu_utilization=None)
    jobs = three(BUSY, plain, plain)
    jobs[1] = replace(jobs[1], lease=replace(jobs[1].lease, pace=pace(0.1)._replace(data_wait=0.8)))
    assert packs(jobs, measured(1, 2, 3)) == [(key(2), key(1))], "waits most in its loader: least busy"


def test_what_a_job_has_on_the_gpu_counts_when_it_is_more_than_its_profile_says():
    jobs = three(LOW, NEXT, BUSY)
    jobs[0] = replace(jobs[0], lease=replace(jobs[0].lease, use=JobUsage(gpu_memory_mb=12 * 1024.0)))
    found = packs(jobs, measured(1, 2, 3))
    assert found == [(key(2), key(3))]
    assert packs(three(profile(0.1, 11.3), NEXT, BUSY), measured(1, 2, 3)) == [(key(2), key(3))], "no margin is left"


def test_hosts_have_the_cpus_and_the_memory():
    hungry = profile(0.1, model="hungry", cpus_per_gpu=(1.0, 9.0), throughput=((0.2,), (1.0,)))
    jobs = [replace(one, cpus=9) for one in three(hungry, hungry, BUSY)]
    assert packs(jobs, measured(1, 2, 3)) == [(key(1), key(2))], "18 CPUs, and one for each of three others"
    jobs[4] = replace(jobs[4], profile=hungry)
    assert packs(jobs, measured(1, 2, 3)) == [(key(1), key(3))]
    jobs = three(BUSY, NEXT, LOW)
    large_mb = 10**6
    jobs[0] = replace(jobs[0], memory_mb=large_mb, placement=(jobs[0].placement[0]._replace(memory_mb=large_mb),))
    assert packs(jobs, measured(1, 2, 3), sharing=replace(SHARING, floor=True)) == []


def test_nothing_is_judged_before_both_have_run_together_long_enough():
    memory = measured(1, 2, packs=((key(1), key(2)),))
    young = together(0.4)
    young[1] = replace(young[1], lease=replace(young[1].lease, pace=pace(0.25, 2.0, co_runners=(1,))))
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
