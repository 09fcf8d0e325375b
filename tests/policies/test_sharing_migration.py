"""Migration and defragmentation: free GPUs are filled, hosts evened out, rates kept, priorities respected."""

from __future__ import annotations

from dataclasses import replace

from gandiva_rig import NOTHING, SHARING, after, decided, host, key, of, on, profile, world
from snapshots import NOW, cluster, moving

from cadenza.policies.core.actions import Migrate, Unpack
from cadenza.policies.core.decision import Memory, SharingMemory
from cadenza.policies.core.model import Options, Progress
from cadenza.policies.core.move import Wanted
from cadenza.policies.sharing.state.settings import GandivaSettings

MOVE = replace(NOTHING, migrate=True)
REACTIVE = replace(MOVE, introspective=False)
DEFRAG = replace(NOTHING, defrag=True)


def moves(decision):
    return {a.job.id: [(share.node, share.gpus) for share in a.shares] for a in of(Migrate, decision)}


def full(where: str, first: int = 1, **facts):
    return [on(first + index, where, index, **facts) for index in range(4)]


def waits(number: int, where: str, *gpus: int, lane: int = 1, **facts):
    return on(number, where, *gpus, state="yielded", lane=lane, **{"waited_s": 20.0, **facts})


def test_a_waiting_job_goes_to_gpus_that_became_free():
    jobs = [*full("a"), waits(5, "a", 0), *full("b", 11)[:3]]
    for rules in (REACTIVE, MOVE):
        assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=rules)) == {5: [("b", 1)]}
    assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=NOTHING)) == {}


def test_also_to_another_gpu_of_its_host():
    jobs = [on(1, "a", 0), waits(2, "a", 0), on(3, "a", 1)]
    assert moves(decided(world(*jobs), gandiva=REACTIVE)) == {2: [("a", 1)]}


def test_who_is_about_to_get_its_turn_stays():
    over = on(1, "a", 0, held_s=90.0, vtime_s=90.0)
    jobs = [over, *full("a")[1:], waits(5, "a", 0), *full("b", 11)[:3]]
    assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=REACTIVE)) == {}
    young = [on(1, "a", 0), *jobs[1:]]
    assert moves(decided(world(*young, hosts=("a", "b")), gandiva=REACTIVE)) == {5: [("b", 1)]}


def test_the_longest_rounds_are_relieved_first_and_only_so_many():
    jobs = [*full("a"), waits(5, "a", 0), waits(6, "a", 1), waits(7, "a", 1, lane=2), *full("b", 11)[:3]]
    snapshot = world(*jobs, hosts=("a", "b"), lanes=3)
    assert moves(decided(snapshot, gandiva=REACTIVE)) == {6: [("b", 1)]}
    two = world(*jobs[:-1], hosts=("a", "b"), lanes=3)
    assert list(moves(decided(two, gandiva=REACTIVE))) == [6, 5]
    assert list(moves(decided(two, gandiva=replace(REACTIVE, moves_per_round=1)))) == [6]


def test_a_job_moves_once_in_a_while_and_only_when_it_pays():
    jobs = [*full("a"), waits(5, "a", 0), *full("b", 11)[:3]]
    snapshot = world(*jobs, hosts=("a", "b"))
    lately = Memory(sharing=SharingMemory(moved_s=((1, NOW - 100.0), (5, NOW - 100.0))))
    assert moves(decided(snapshot, lately, REACTIVE)) == {}
    assert after(snapshot, decided(snapshot, gandiva=REACTIVE)).sharing.moved_s == ((5, NOW),)
    ending = replace(jobs[4], progress=Progress(NOW, 620.0, 600.0))
    assert moves(decided(world(*jobs[:4], ending, *jobs[5:], hosts=("a", "b")), gandiva=REACTIVE)) == {}


def test_the_holder_goes_where_those_that_wait_cannot():
    holder, *others = full("a")
    lost = waits(5, "a", 0, checkpoints=False)

    def found(*pair, memory=None):
        snapshot = world(*pair, *others, *full("b", 11)[:3], hosts=("a", "b"))
        return moves(decided(snapshot, memory, REACTIVE))

    assert found(holder, lost) == {1: [("b", 1)]}
    lately = Memory(sharing=SharingMemory(moved_s=((5, NOW - 100.0),)))
    assert found(holder, waits(5, "a", 0), memory=lately) == {1: [("b", 1)]}
    assert found(on(1, "a", 0, checkpoints=False), lost) == {}
    fixed = replace(waits(5, "a", 0), requeueable=False)
    assert found(holder, fixed) == {1: [("b", 1)]}
    assert found(replace(holder, requeueable=False), fixed) == {}
    assert found(replace(holder, progress=Progress(NOW, 620.0, 600.0)), lost) == {}
    assert found(holder) == {}


def test_on_a_real_cluster_the_holder_goes_and_the_next_one_gets_its_gpus():
    """Only who has its GPUs can save a checkpoint there, and the move is carried out round by round."""
    snapshot = world(*full("a"), waits(5, "a", 0), *full("b", 11)[:3], hosts=("a", "b"))
    decision = moving(lambda seen, memory: decided(seen, memory, REACTIVE))(snapshot, Memory())
    assert moves(decision) == {1: [("b", 1)]}
    assert [(move.job, move.phase, move.nodes) for move in decision.memory.moves] == [(key(1), Wanted(NOW), ("b",))]


def test_hosts_of_a_class_are_evened_out_in_introspective_mode():
    high = [*full("a"), *(waits(5 + i, "a", i) for i in range(4)), *(waits(21 + i, "a", i, lane=2) for i in range(4))]
    snapshot = world(*high, *full("b", 11), hosts=("a", "b"), lanes=3)
    assert moves(decided(snapshot, gandiva=REACTIVE)) == {}
    assert moves(decided(snapshot, gandiva=MOVE)) == {5: [("b-l1", 1)], 6: [("b-l1", 1)], 7: [("b-l1", 1)]} | {
        8: [("b-l1", 1)]
    }


def test_the_lower_priority_moves_away_from_the_higher():
    urgent = [replace(one, options=Options(priority=1)) for one in full("a")]
    jobs = [*urgent, waits(5, "a", 0), *full("b", 11)]
    assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=REACTIVE)) == {5: [("b-l1", 1)]}
    equal = [*full("a"), waits(5, "a", 0), *full("b", 11)]
    assert moves(decided(world(*equal, hosts=("a", "b")), gandiva=REACTIVE)) == {}


def test_packed_jobs_part_when_gpus_are_idle():
    packed = [on(1, "a", 0), on(2, "a", 0, lane=1)]
    memory = Memory(sharing=SharingMemory(packs=((key(1), key(2)),)))
    decision = decided(world(*packed), memory, replace(MOVE, pack=True))
    assert [a.job for a in of(Unpack, decision)] == [key(1)]
    assert moves(decision) == {1: [("a", 1)]}
    assert after(world(*packed), decision).sharing.packs == ()


def test_a_job_of_two_hosts_goes_to_one_that_can_hold_it():
    wide = replace(on(1, "a", 0, 1), gpus=4, nodes=("a", "b"), num_nodes=2, options=Options(max_gpus=4))
    assert moves(decided(world(wide, hosts=("a", "b", "c")), gandiva=REACTIVE)) == {1: [("c", 4)]}
    stays = replace(wide, options=Options())  # its script does not follow another number of nodes
    assert moves(decided(world(stays, hosts=("a", "b", "c")), gandiva=REACTIVE)) == {}
    short = replace(wide, progress=Progress(NOW, 700.0, 600.0))
    assert moves(decided(world(short, hosts=("a", "b", "c")), gandiva=REACTIVE)) == {}


def test_the_memory_of_a_host_bounds_who_comes():
    heavy = profile(memory_gb_per_gpu=(30.0,))
    jobs = [*full("a"), on(5, "a", 0, state="yielded", lane=1, memory_mb=30 * 1024, profile=heavy)]
    room = world(*jobs, hosts=("a",)).nodes
    small = tuple(replace(lane, memory_mb=28 * 1024) for lane in host("b"))
    assert moves(decided(cluster(*jobs, nodes=(*room, *small)), gandiva=REACTIVE)) == {}
    large = tuple(replace(lane, memory_mb=31 * 1024) for lane in host("b"))
    assert moves(decided(cluster(*jobs, nodes=(*room, *large)), gandiva=REACTIVE)) == {5: [("b", 1)]}


# --- Defragmentation -----------------------------------------------------------------------------------


def test_the_emptiest_host_in_use_is_emptied():
    jobs = [on(1, "a", 0), *full("b", 11)[:3], *full("c", 21)[:2]]
    snapshot = world(*jobs, hosts=("a", "b", "c", "d"))
    assert moves(decided(snapshot, gandiva=DEFRAG)) == {1: [("b", 1)]}
    assert moves(decided(snapshot, gandiva=replace(DEFRAG, introspective=False))) == {}


def test_it_ends_when_every_host_has_less_than_three_of_four_free():
    jobs = [*full("a", 1)[:2], *full("b", 11)[:3]]
    assert moves(decided(world(*jobs, hosts=("a", "b", "c")), gandiva=DEFRAG)) == {}
    assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=replace(DEFRAG, free_share=0.5))) == {1: [("b", 1)]}


def test_a_job_stays_when_the_loss_is_not_negligible():
    ending = on(1, "a", 0, progress=Progress(NOW, 1600.0, 600.0))
    jobs = [ending, *full("b", 11)[:3]]
    assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=DEFRAG)) == {}
    assert moves(decided(world(*jobs, hosts=("a", "b")), gandiva=replace(DEFRAG, loss=0.03))) == {1: [("b", 1)]}


def test_defragmentation_reaches_a_fixed_point():
    """Each move leads to a fuller host: applying it and asking again moves nothing twice."""
    jobs = {n: on(n, name, 0) for n, name in enumerate("abcde", 1)}
    memory = Memory()
    for _ in range(6):
        snapshot = world(*jobs.values(), hosts=tuple("abcde"))
        decision = decided(snapshot, memory, DEFRAG)
        for number, ((node, _),) in moves(decision).items():
            there = {gpu.index for one in jobs.values() if one.nodes == (node,) for gpu in one.lease.gpus}
            jobs[number] = on(number, node, min(set(range(4)) - there))
        memory = after(snapshot, decision)
    assert moves(decision) == {}
    used = [sum(one.nodes == (name,) for one in jobs.values()) for name in "abcde"]
    assert sorted(used) == [0, 0, 0, 1, 4]


def test_everything_off_is_time_slices_alone():
    jobs = [*full("a"), waits(5, "a", 0), *full("b", 11)[:1]]
    decision = decided(world(*jobs, hosts=("a", "b")), gandiva=NOTHING)
    assert of(Migrate, decision) == []
    off = GandivaSettings(introspective=False, migrate=False)
    assert decided(world(*jobs, hosts=("a", "b")), gandiva=off).actions == decision.actions
    assert decided(world(*jobs, hosts=("a", "b")), gandiva=off, sharing=replace(SHARING, enforce=False)).actions
