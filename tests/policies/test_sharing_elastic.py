"""Grow and shrink: only declared jobs, only idle GPUs of one host, after a time-out, and back at once."""

from __future__ import annotations

from dataclasses import replace

from gandiva_rig import ALL, NOTHING, SHARING, after, decided, held, key, of, on, pace, world
from hypothesis import given
from hypothesis import strategies as st
from snapshots import NOW, job

from cadenza.policies.core.actions import Place, Resize, Yield
from cadenza.policies.core.decision import Memory, SharingMemory
from cadenza.policies.core.model import JobKey, Options, Share
from cadenza.policies.core.move import Move, Ordered, Phase, Requeued
from cadenza.policies.sharing.state.round_state import sizes

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


# --- Does it pay? ---------------------------------------------------------------------------------------


def grew(iteration_s: float, batch: str = "global", grown_s: float = 0.1, window_s: float = 100.0):
    """A job that grew from one GPU, where an iteration took ``iteration_s``, to four; and the memory of it."""
    options = replace(GROWS, batch=batch)
    before = world(on(1, "a", 0, options=options, pace=pace(iteration_s)))
    memory = after(before, decided(before, idle(), ELASTIC))
    assert memory.sharing.growths == ((1, 1, iteration_s, NOW, ""),)
    job = on(1, "a", 0, 1, 2, 3, options=options, pace=pace(grown_s, window_s))
    return world(replace(job, key=JobKey(1, 1))), replace(memory, sharing=replace(memory.sharing, moved_s=()))


def test_a_job_that_gained_nothing_goes_back_and_stays_so_for_a_while():
    snapshot, memory = grew(0.102)
    decision = decided(snapshot, memory, ELASTIC)
    assert resized(decision) == {1: [1]}
    assert "with 4 GPUs it did 102% of the work that it did with 1" in decision.reasons[JobKey(1, 1)]
    memory = after(snapshot, decision)
    small = world(on(1, "a", 0, options=GROWS))
    spare = replace(memory, sharing=replace(memory.sharing, spare_s=(("a", NOW - 100.0),), moved_s=()))
    assert resized(decided(small, spare, ELASTIC)) == {}
    later = replace(small, time_s=NOW + 2 * ELASTIC.pack_again_s)
    assert resized(decided(later, spare, ELASTIC)) == {1: [4]}


def test_a_job_that_gained_keeps_its_gpus():
    snapshot, memory = grew(0.2)
    decision = decided(snapshot, memory, ELASTIC)
    assert resized(decision) == {}
    assert decision.memory.sharing.growths == ()


def test_with_a_batch_for_each_gpu_as_long_an_iteration_is_four_times_the_work():
    assert resized(decided(*grew(0.1, "per-gpu"), ELASTIC)) == {}
    assert resized(decided(*grew(0.1, "per-gpu", grown_s=0.4), ELASTIC)) == {1: [1]}


def test_a_short_look_is_none():
    snapshot, memory = grew(0.1, window_s=5.0)
    decision = decided(snapshot, memory, ELASTIC)
    assert resized(decision) == {}
    assert len(decision.memory.sharing.growths) == 1


# --- Who waits ------------------------------------------------------------------------------------------


NATIVE = replace(SHARING, place=False)
GROWN = on(1, "a", 0, 1, 2, 3, options=GROWS)


def in_queue(number: int, gpus: int = 3, reason: str = "Resources", **facts):
    """A job that Slurm itself is to start."""
    return job(number, state="PENDING", state_reason=reason, gpus=gpus, **facts)


def test_a_job_in_slurms_queue_waits_if_it_lacks_resources_alone():
    for reason, left in (("Resources", {1: [1]}), ("Priority", {1: [1]}), ("", {1: [1]}), ("Dependency", {})):
        snapshot = world(GROWN, in_queue(9, reason=reason))
        assert resized(decided(snapshot, gandiva=ELASTIC, sharing=NATIVE)) == left, reason
    not_ours = in_queue(9, options=None)
    assert resized(decided(world(GROWN, not_ours), gandiva=ELASTIC, sharing=NATIVE)) == {1: [1]}
    elsewhere = in_queue(9, partition="other")
    assert resized(decided(world(GROWN, elsewhere), gandiva=ELASTIC, sharing=NATIVE)) == {}


def test_nobody_shrinks_for_a_job_that_slurm_may_start_by_itself():
    shrunk = {1: [1]}
    for age_s, reason, left in ((1.0, "None", {}), (1.0, "", {}), (1.0, "Resources", shrunk), (6.0, "None", shrunk)):
        snapshot = world(GROWN, in_queue(9, reason=reason))
        asked = replace(snapshot.jobs[1], submit_s=snapshot.time_s - age_s)
        found = decided(replace(snapshot, jobs=(snapshot.jobs[0], asked)), gandiva=ELASTIC, sharing=NATIVE)
        assert resized(found) == left, (age_s, reason)


def test_nobody_grows_while_a_job_is_in_slurms_queue():
    small = on(1, "a", 0, options=GROWS)
    assert resized(decided(world(small, in_queue(9, 8)), idle(), ELASTIC, NATIVE)) == {}
    assert resized(decided(world(small), idle(), ELASTIC, NATIVE)) == {1: [4]}


def test_a_job_that_slurm_started_behind_anothers_lease_waits():
    for state in ("waiting", "yielded"):
        guest = on(9, "a", 0, 1, 2, lane=1, state=state)
        decision = decided(world(GROWN, guest), gandiva=ELASTIC, sharing=NATIVE)
        (found,) = of(Resize, decision)
        assert found.job == key(1)
        assert [(share.node, share.gpus) for share in found.shares] == [("a-l1", 1)], "where Slurm gives it GPU 3"
        assert key(1) not in {action.job for action in of(Yield, decision)}, "it stops once, to save"


def test_turns_go_on_where_shrinking_would_not_end_them():
    guest = on(9, "a", 0, 1, 2, lane=1, state="waiting")
    for rival in (
        on(1, "a", 0, 1, 2, 3, options=Options(min_gpus=2)),
        on(1, "a", 0, 1, 2, 3),
        on(1, "a", 0, 1, 2, 3, options=GROWS, checkpoints=False),
        on(1, "a", 0, 1, 2, 3, options=GROWS, ready=False),
    ):
        assert resized(decided(world(rival, guest), gandiva=ELASTIC, sharing=NATIVE)) == {}
    co_runners = on(2, "a", 0, lane=1, options=Options())
    three_lanes = world(GROWN, co_runners, on(9, "a", 0, 1, 2, lane=2, state="waiting"), lanes=3)
    assert resized(decided(three_lanes, gandiva=ELASTIC, sharing=NATIVE)) == {}


def test_a_job_of_several_hosts_gets_gpus_of_each():
    other = on(2, "b", 0, 1, 2, 3, options=GROWS)
    wide = in_queue(9, 4, num_nodes=2)
    found = decided(world(GROWN, other, wide, hosts=("a", "b")), gandiva=ELASTIC, sharing=NATIVE)
    assert resized(found) == {1: [2], 2: [2]}
    fixed = on(2, "b", 0, 1, 2, 3)
    assert resized(decided(world(GROWN, fixed, wide, hosts=("a", "b")), gandiva=ELASTIC, sharing=NATIVE)) == {}


def test_a_job_that_wants_one_node_is_served_there_or_not_at_all():
    there = in_queue(9, required_nodes=("b-l1",))
    assert resized(decided(world(GROWN, there, hosts=("a", "b")), gandiva=ELASTIC, sharing=NATIVE)) == {}
    here = in_queue(9, required_nodes=("a-l1",))
    assert resized(decided(world(GROWN, here, hosts=("a", "b")), gandiva=ELASTIC, sharing=NATIVE)) == {1: [1]}


# --- On the way -----------------------------------------------------------------------------------------


def on_its_way(number: int, phase: Phase, *shares: Share) -> Memory:
    return replace(idle(), moves=(Move(key(number), shares, "resized", phase, resize=True, former_gpus=4),))


def test_one_job_that_shrinks_for_a_waiting_one_is_enough():
    other = on(2, "b", 0, 1, 2, 3, options=GROWS)
    snapshot = world(GROWN, other, in_queue(9), hosts=("a", "b"))
    memory = on_its_way(1, Ordered(NOW), Share("a", 1, 6, 8000))
    assert resized(decided(snapshot, memory, ELASTIC, NATIVE)) == {}
    assert resized(decided(snapshot, idle(), ELASTIC, NATIVE)) == {1: [1]}
    left = in_queue(1, 4, "", slurm_priority=0, options=GROWS)
    gone = world(left, other, in_queue(9), hosts=("a", "b"))
    assert resized(decided(gone, on_its_way(1, Requeued(NOW, NOW), Share("a", 1, 6, 8000)), ELASTIC, NATIVE)) == {}
    wider = on_its_way(1, Requeued(NOW, NOW), Share("a", 2, 12, 8000))
    assert resized(decided(gone, wider, ELASTIC, NATIVE)) == {2: [1]}


def test_nobody_grows_into_gpus_that_are_kept_for_a_job_on_its_way():
    small = on(2, "a", 3, lane=1, options=GROWS)
    moving = in_queue(1, 2, "", slurm_priority=0, options=GROWS)
    memory = on_its_way(1, Requeued(NOW, NOW), Share("a", 2, 12, 16000))
    assert resized(decided(world(small, moving), memory, ELASTIC, NATIVE)) == {2: [2]}
    wider = on_its_way(1, Requeued(NOW, NOW), Share("a", 3, 18, 24000))
    assert resized(decided(world(small, moving), wider, ELASTIC, NATIVE)) == {}


sizes_of_jobs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=4)


@given(asked=sizes_of_jobs, waits=st.lists(st.integers(1, 4), max_size=3), idle_s=st.sampled_from([0.0, 100.0]))
def test_sizes_stay_within_what_was_declared_and_what_the_host_has(asked, waits, idle_s):
    jobs, first = [], 0
    for number, (gpus, low, high) in enumerate(asked, 1):
        if first + gpus <= 4:
            options = Options(min_gpus=min(low, high), max_gpus=max(low, high))
            jobs.append(on(number, "a", *range(first, first + gpus), options=options))
            first += gpus
    snapshot = world(*jobs, *(in_queue(20 + i, gpus) for i, gpus in enumerate(waits)))
    sizes_now = {one.key.id: one for one in jobs}
    total = {one.key.id: one.gpus for one in jobs}
    for number, (gpus,) in resized(decided(snapshot, idle(idle_s), ELASTIC, NATIVE)).items():
        before, options = sizes_now[number].gpus, sizes_now[number].options
        assert min(options.min_gpus, before) <= gpus <= max(options.max_gpus, before)
        assert not (waits and gpus > before)
        total[number] = gpus
    assert sum(total.values()) <= 4


def test_a_user_is_told_why_the_size_stays():
    for facts, why in (
        ({"checkpoints": False}, "its size stays: it saves no checkpoints (client.checkpoint)"),
        ({"requeueable": False}, "its size stays: Slurm may not requeue it (no batch job, or --no-requeue)"),
    ):
        reasons = decided(world(on(1, "a", 0, options=GROWS, **facts)), idle(), ELASTIC).reasons
        assert reasons[key(1)].endswith(f"; {why}")
    for options, gandiva in ((GROWS, ELASTIC), (Options(), ELASTIC), (GROWS, NOTHING)):
        plain = on(1, "a", 0, options=options, checkpoints=options is GROWS and gandiva is ELASTIC)
        assert "its size stays" not in decided(world(plain), Memory(), gandiva).reasons[key(1)]
