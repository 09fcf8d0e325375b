"""Preemption: invariants of every decision in simulated runs, its bounds, and small cases worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from gandiva_rig import SHARING, host, on
from hypothesis import example, given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease

from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.actions import Migrate, Place, Requeue, Resume, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Options, Progress
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.preemption import reservation, starvation
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.service.store.record_codec import decode_memory, encode_memory

LANES = st.sampled_from((1, 2))
"""As shipped, and with a further lane."""
DAY_S = starvation.STARVING_S


def policy(*, share_between_users: bool = True, order: str = "levels") -> Policy:
    sharing = replace(
        SHARING,
        partitions=frozenset({PARTITION}),
        share_between_users=share_between_users,
        floor=True,
        suspend=True,
    )
    rules = PolicySettings(frozenset({PARTITION}), sharing=sharing, phased_moves=True)
    return build(order, "none", "preemption", rules)


@pytest.mark.parametrize(
    ("said", "ranks", "leaves"),
    [
        (None, None, True),  # nothing is known yet
        (True, None, True),
        (False, None, False),
        (True, False, False),  # the ranks know better, whatever the user has said
        (False, True, True),
        (None, False, False),
    ],
)
def test_a_users_word_on_checkpoints_counts_until_the_ranks_attach(said, ranks, leaves):
    pends = job(1, state="PENDING", nodes=(), options=Options(checkpoints=said))
    runs = on(1, "a", 0, options=Options(checkpoints=said), ready=ranks is not None, checkpoints=bool(ranks))
    assert reservation.can_leave(pends if ranks is None else runs) is leaves
    if ranks is None:
        assert reservation.can_leave(runs) is leaves, "its ranks have not attached"


def trace(rng: Random, count: int = 14, *, movable: float = 0.7, limits: bool = False) -> list[TraceJob]:
    jobs = [
        TraceJob(
            number,
            float(rng.randrange(0, 6000)),
            rng.choice([1, 1, 1, 2, 2, 4, 8]),
            rng.choice([30.0, 300.0, 2000.0, 9000.0]) * rng.uniform(0.5, 2.0),
            user=rng.choice(["ann", "bob"]),
            memory_gb_per_gpu=rng.choice([4.0, 10.0]),
            checkpoints=rng.random() < movable,
        )
        for number in range(count)
    ]
    return [replace(one, time_limit_s=2 * one.work_s + 300) for one in jobs] if limits else jobs


def run(jobs, decide, lanes: int, *, skip: bool = True, **facts):
    setup = Setup(
        round_s=60.0,
        lanes=lanes,
        rounds_on_events=True,
        phased_moves=True,
        admission="held",
        checkpoint_s=1800.0,
        skip=skip,
        **facts,
    )
    return simulate(jobs, read_cluster("3x4:24:100", lanes), decide, setup)


def checked(inner: Policy, check) -> Policy:
    """The policy with a check of each decision. A round takes an error for that of a job's data, and goes on."""

    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        decision = inner.decide(snapshot, memory)
        try:
            assert decode_memory(encode_memory(decision.memory)) == decision.memory
            check(snapshot, memory, decision)
        except AssertionError as error:
            pytest.fail(f"at {snapshot.time_s:.0f} s: {error}")  # no Exception: the round does not catch it
        return decision

    return replace(inner, decide=decide)


def gpus_in_use(snapshot: ClusterSnapshot, decision: Decision) -> Counter:
    """The GPUs of the jobs that have them once the decision is carried out, by how many have each."""
    resumed = {action.job for action in decision.actions if isinstance(action, Resume)}
    stopped = {action.job for action in decision.actions if isinstance(action, Yield | Migrate | Requeue)}
    used: Counter = Counter()
    for one in snapshot.jobs:
        if one.lease is not None and one.key not in stopped and (one.lease.state == "held" or one.key in resumed):
            used.update(one.lease.gpus)
    return used


# --- every decision --------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), between=st.booleans(), limits=st.booleans(), lanes=LANES)
def test_a_gpu_has_one_job_and_a_job_one_place(seed, between, limits, lanes):
    keeps = {}

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        assert not [gpu for gpu, count in gpus_in_use(snapshot, decision).items() if count > 1]
        kinds = (Place, Migrate, Requeue, Yield, Resume)
        ordered = Counter(action.job for action in decision.actions if isinstance(action, kinds))
        assert not [one for one, count in ordered.items() if count > 1]
        moved = {action.job.id for action in decision.actions if isinstance(action, Migrate | Requeue)}
        assert all(keeps[number] for number in moved), "a job without checkpoints stays until its end"
        assert not moved & {move.job.id for move in memory.moves if not move.over} - {
            action.job.id for action in decision.actions if isinstance(action, Requeue)
        }
        assert {one.key.id for one in snapshot.jobs} == {one.id for one in decision.reasons}
        assert not [text for text in decision.reasons.values() if "neither pending, running nor suspended" in text]

    jobs = trace(Random(seed), limits=limits)  # noqa: S311
    keeps.update({one.id: one.checkpoints for one in jobs})
    result = run(jobs, checked(policy(share_between_users=between), check), lanes)
    assert not result.unfinished


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), between=st.booleans(), movable=st.sampled_from((1.0, 0.7)), lanes=LANES)
@example(seed=763140376, between=False, movable=0.7, lanes=2)  # GPUs that are reserved
def test_no_gpu_stays_idle_that_a_waiting_job_could_have(seed, between, movable, lanes):
    """In a round that orders nothing, with no job on its way, each waiting job lacks something on every lane.

    That is GPUs that no job has, CPUs or memory of the lane, or memory of the host for all jobs there. One that
    stays until its end also keeps away from a host where it would leave too few GPUs to the one for which GPUs are
    reserved: the first submitted of such jobs, once it has waited for an hour.
    """

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        if decision.actions or any(not move.over for move in memory.moves):
            return
        used = gpus_in_use(snapshot, decision)
        stays = [one for one in snapshot.jobs if one.gpus and not reservation.can_leave(one)]
        since_s = snapshot.time_s - reservation.RESERVED_AFTER_S
        long = [(one.submit_s, one.key, one) for one in stays if one.held and one.submit_s <= since_s]
        *_, reserved = min(long, default=(None,))
        waiting = [one for one in snapshot.jobs if one.held and one.num_nodes == 1]
        for lane in snapshot.nodes:
            names = {node.name for node in snapshot.nodes if node.host == lane.host}
            there = [one for one in snapshot.jobs if not names.isdisjoint(one.nodes)]
            mine = [gpu.index for one in there if lane.name in one.nodes for gpu in one.lease.gpus]
            kept = sum(gpu.host == lane.host for one in there if one in stays for gpu in one.lease.gpus)
            spare = lane.gpus - kept - (reserved.gpus // reserved.num_nodes if reserved is not None else 0)
            for one in waiting:
                seat = {Gpu(lane.host, index) for index in [i for i in range(lane.gpus) if i not in mine][: one.gpus]}
                met = [other.user for other in there if not seat.isdisjoint(other.lease.gpus)]
                lacks = (
                    len(seat) < one.gpus or not seat.isdisjoint(used),
                    lane.cpus - lane.cpus_used < one.cpus or lane.memory_mb - lane.memory_used_mb < one.memory_mb,
                    bool(there) and sum(other.memory_mb for other in (one, *there)) > lane.memory_mb,
                    not between and {one.user} != {one.user, *met},
                    reserved not in (None, one) and one in stays and one.gpus > spare,
                )
                assert any(lacks), (one.key, lane.name, decision.reasons[one.key])

    jobs = trace(Random(seed), movable=movable)  # noqa: S311
    assert not run(jobs, checked(policy(share_between_users=between), check), lanes).unfinished


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), limits=st.booleans(), lanes=LANES, order=st.sampled_from(("levels", "fifo", "las")))
@example(seed=9162, limits=False, lanes=2, order="levels")  # a level's end that rounding puts into the present
def test_rounds_left_out_change_nothing(seed, limits, lanes, order):
    """Under an order that changes with every second none is left out."""
    jobs = trace(Random(seed), limits=limits)  # noqa: S311
    every, few = (run(jobs, policy(order=order), lanes, skip=skip) for skip in (False, True))
    assert few.jobs == every.jobs
    assert (few.counts.decided < every.counts.decided) == (order != "las")


# --- bounds ----------------------------------------------------------------------------------------------


def test_a_job_without_a_turn_for_a_day_comes_first_for_an_hour(monkeypatch):
    """A long job of all GPUs meets newcomers without end; each of its waits ends with the bound and a first slice.

    No newcomer waits for so long before it ends.
    """
    stream = [TraceJob(n, n * 120.0, 4, 130.0, checkpoints=True) for n in range(1, 250)]
    longest = {}

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        del memory, decision
        one = next((one for one in snapshot.jobs if one.key.id == 0), None)
        if one is not None and one.progress is not None and not one.progress.running:
            since_s = one.progress.ran_s if one.progress.ran_s is not None else one.submit_s
            longest[0] = max(longest.get(0, 0.0), snapshot.time_s - since_s)

    monkeypatch.setattr(starvation, "STARVING_S", 3600.0)
    monkeypatch.setattr(starvation, "OWED_TURN_S", 1800.0)
    nodes = read_cluster("1x4:24:100", 2)
    setup = Setup(round_s=60.0, lanes=2, rounds_on_events=True, phased_moves=True, admission="held")
    result = simulate([TraceJob(0, 0.0, 4, 3600.0, checkpoints=True), *stream], nodes, checked(policy(), check), setup)
    first = next(one for one in result.jobs if one.id == 0)
    assert first.finish_s is not None
    assert 3500.0 < longest[0] <= 3600.0 + 4 * 60.0
    assert first.finish_s < 15_000.0, "without the bound it ends after the last newcomer, past 32,000 s"


MARGIN_S = 300.0
"""Time for a checkpoint, a requeue, a start and the rounds between them."""


@settings(max_examples=12)
@given(
    sizes=st.lists(st.sampled_from((1, 2, 4)), min_size=2, max_size=12),
    work_s=st.lists(st.sampled_from((200.0, 1500.0, 20_000.0)), min_size=12, max_size=12),
    shape=st.tuples(st.integers(1, 2), LANES),
    between=st.booleans(),
    seed=st.integers(0, 2**32),
    stream=st.sampled_from((0, 1, 2, 4)),
)
@example(sizes=[4] * 6, work_s=[20_000.0] * 12, shape=(1, 2), between=True, seed=0, stream=0)
# More turns than a day has.
@example(sizes=[4] * 12, work_s=[20_000.0] * 12, shape=(1, 2), between=True, seed=0, stream=0)
@example(sizes=[4] * 12, work_s=[20_000.0] * 12, shape=(1, 1), between=True, seed=0, stream=0)
@example(sizes=[4, 2], work_s=[20_000.0] * 12, shape=(1, 2), between=True, seed=0, stream=4)
@example(sizes=[4, 2], work_s=[20_000.0] * 12, shape=(1, 1), between=True, seed=0, stream=4)
def test_a_job_waits_for_a_day_and_a_turn_of_each_job_that_waited_longer(sizes, work_s, shape, between, seed, stream):
    """Whatever arrives, and however many wait: jobs that keep checkpoints. A day stands for 3,600 s, an hour for 300 s.

    A job whose wait begins finds those that wait already before it, and those that have the turn that they were owed.
    """
    (hosts, lanes), bound_s, turn_s, before = shape, 3600.0, 300.0, {}
    rng = Random(seed)  # noqa: S311
    jobs = [
        TraceJob(n, rng.uniform(0, 1500), gpus, work_s[n], user=rng.choice(["ann", "bob"]), memory_gb_per_gpu=4.0)
        for n, gpus in enumerate(sizes)
    ]
    if stream:  # newcomers without end, which take nearly all GPU time
        gap_s = 110.0 * stream / (4 * hosts)
        jobs += [TraceJob(20 + n, 1500.0 + n * gap_s, stream, 130.0) for n in range(int(8000.0 / gap_s))]

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        del memory
        owed = {number for number, _ in decision.memory.sharing.owed_s}
        waiting = {
            one.key.id: starvation.waits_since(one, one.progress)
            for one in snapshot.jobs
            if one.progress is not None and not one.progress.running
        }
        for number in before.keys() - waiting.keys():
            del before[number]
        for number, since_s in waiting.items():
            if number not in before:
                before[number] = owed | {other for other, other_s in waiting.items() if other_s <= since_s}
            late_s = snapshot.time_s - since_s - bound_s
            assert late_s <= MARGIN_S + len(before[number] - {number}) * (turn_s + MARGIN_S), number

    setup = Setup(
        round_s=60.0,
        lanes=lanes,
        rounds_on_events=True,
        phased_moves=True,
        admission="held",
        horizon_s=9_500.0 if stream else 20_000.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starvation, "STARVING_S", bound_s)
        patch.setattr(starvation, "OWED_TURN_S", turn_s)
        nodes = read_cluster(f"{hosts}x4:24:100", lanes)
        simulate(jobs, nodes, checked(policy(share_between_users=between), check), setup)


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32), wide=st.sampled_from((3, 4)), factor=st.sampled_from((1.2, 3.0)), lanes=LANES)
def test_a_wide_job_that_cannot_move_waits_for_an_hour_and_the_time_limits_of_others(seed, wide, factor, lanes):
    """Narrow jobs without checkpoints come without end, and need all GPU time that there is."""
    rng, stream = Random(seed), []  # noqa: S311
    for number in range(1, 110):
        work_s = rng.uniform(300.0, 1500.0)
        limit_s = factor * work_s + 300.0
        gpus = rng.choice((1, 1, 2))
        stream.append(TraceJob(number, number * 90.0, gpus, work_s, checkpoints=False, time_limit_s=limit_s))
    late = TraceJob(0, 1000.0, wide, 600.0, checkpoints=False, time_limit_s=200_000.0)
    result = run([late, *stream], policy(), lanes, horizon_s=10_000.0)
    found = next(one for one in result.jobs if one.id == 0)
    assert found.start_s is not None
    assert found.start_s <= 1000.0 + reservation.RESERVED_AFTER_S + factor * 1500.0 + 300.0 + MARGIN_S


# --- by hand ---------------------------------------------------------------------------------------------


def served(number: int, gpu_s: float, one):
    """The job with this attained service."""
    progress = Progress(
        NOW, 1e6, attained_s=gpu_s / one.gpus, running=one.lease is not None and one.lease.state == "held"
    )
    return replace(one, progress=progress)


def pending(number: int, gpus: int, *, keeps: bool = True, **facts):
    one = job(
        number,
        state="PENDING",
        gpus=gpus,
        cpus=gpus,
        memory_mb=1000,
        slurm_priority=0,
        held_by_plugin=True,
        options=Options(checkpoints=keeps),
        **{"submit_s": NOW, **facts},
    )
    return replace(one, progress=Progress(NOW))


def decide(*jobs, nodes, memory: Memory | None = None, **facts):
    sharing = replace(SHARING, floor=True, **facts)
    built = build(
        "levels", "none", "preemption", PolicySettings(frozenset({"gpu"}), sharing=sharing, phased_moves=True)
    )
    return built.decide(cluster(*jobs, nodes=nodes), memory or Memory())


def kinds(decision: Decision) -> dict:
    return {action.job.id: type(action) for action in decision.actions if hasattr(action, "job")}


def test_a_newcomer_has_its_first_slice_over_a_long_job():
    long = served(1, 5000.0, on(1, "a", 0, 1, 2, 3))
    found = decide(long, pending(2, 2), nodes=host("a", jobs=(long,)))
    assert kinds(found) == {1: Yield, 2: Place}
    assert next(a for a in found.actions if isinstance(a, Place)).nodes == ("a-l1",)


def test_a_wait_is_too_long_at_the_time_at_which_a_quiet_round_says_so():
    """By rounding, the wait at that time is shorter than the bound."""
    since_s = next(x for x in (50_000 + n / 7 for n in range(1000)) if x + DAY_S - x < DAY_S)
    waits = pending(1, 4, submit_s=since_s)
    owner = served(2, 5.0, on(2, "a", 0, 1, 2, 3, checkpoints=False))
    built = build("levels", "none", "preemption", PolicySettings(frozenset({"gpu"}), sharing=SHARING))
    found = replace(cluster(waits, owner, nodes=host("a", jobs=(owner,))), time_s=since_s + DAY_S)
    memory = built.decide(found, Memory()).memory
    assert [number for number, _ in memory.sharing.owed_s] == [1]
    assert decode_memory(encode_memory(memory)) == memory


def test_a_requeue_costs_no_place_within_a_level():
    """Slurm submits a requeued job anew."""
    first, second = (
        served(1, 5000.0, pending(1, 4, submit_s=NOW - 10)),
        served(2, 5000.0, pending(2, 4, submit_s=NOW - 20)),
    )
    assert kinds(decide(first, second, nodes=host("a", lanes=1))) == {2: Place}
    again = replace(first, progress=replace(first.progress, submitted_s=NOW - 30))
    assert kinds(decide(again, second, nodes=host("a", lanes=1))) == {1: Place}


def test_a_job_does_not_move_to_gpus_of_its_own_lane_that_it_would_not_get():
    """Slurm has the job's own GPU back before it starts it again: the lowest of the lane, which another has claimed."""
    blocked, runs = served(1, 5000.0, on(1, "a", 0)), served(2, 5000.0, on(2, "a", 1, 2))
    first = served(3, 5.0, on(3, "a", 0, 1, state="yielded", lane=1))
    full = changed_lane(host("a", jobs=(blocked, runs, first)))
    assert kinds(decide(blocked, runs, first, nodes=full)) == {1: Yield, 2: Yield, 3: Resume}
    last = served(1, 5000.0, on(1, "a", 3))
    better = served(3, 5.0, on(3, "a", 2, 3, state="yielded", lane=1))
    full = changed_lane(host("a", jobs=(last, better)))
    assert kinds(decide(last, better, nodes=full)) == {1: Migrate, 3: Resume}, "of its own lane, and lower than its own"


def staying(number: int, where: str, *gpus: int, limit_s: float, **facts):
    """A job without checkpoints that has run for 1,000 s."""
    one = on(number, where, *gpus, checkpoints=False, time_limit_s=limit_s, run_s=1000.0, **facts)
    return served(number, 5000.0, one)


def test_a_job_that_cannot_move_does_not_delay_one_that_waits_for_long():
    """GPUs 0 and 1 of host a are free in 1,000 s at the latest, those of b in 4,000 s: the wide job is to have a."""
    first, second = staying(1, "a", 0, 1, limit_s=2000.0), staying(2, "b", 0, limit_s=5000.0)
    nodes = host("a", lanes=1, jobs=(first,)) + host("b", lanes=1, jobs=(second,))
    wide = pending(3, 4, keeps=False, submit_s=NOW - 4000, time_limit_s=90_000.0)

    def placed(**facts):
        found = decide(first, second, wide, pending(4, 2, **facts), nodes=nodes)
        return [action.nodes for action in found.actions if isinstance(action, Place)]

    full = staying(5, "b", 1, 2, 3, limit_s=5000.0)
    assert placed(keeps=False, time_limit_s=900.0) == [("a",)], "it is gone by then"
    assert placed(keeps=False, time_limit_s=1100.0) == [("b",)]
    nodes = host("a", lanes=1, jobs=(first,)) + host("b", lanes=1, jobs=(second, full))
    found = decide(first, second, full, wide, pending(4, 2, keeps=False, time_limit_s=1100.0), nodes=nodes)
    assert kinds(found) == {}
    found = decide(first, second, full, wide, pending(4, 2), nodes=nodes)
    assert kinds(found) == {4: Place}, "one that keeps checkpoints makes way when the time comes"
    fresh = replace(wide, submit_s=NOW - 3000)
    found = decide(first, second, full, fresh, pending(4, 2, keeps=False, time_limit_s=1100.0), nodes=nodes)
    assert kinds(found) == {4: Place}, "the wide job does not wait for long yet"


@pytest.mark.parametrize(("limit_s", "goes"), [(600.0, True), (10_000.0, False), (None, False)])
def test_a_job_that_cannot_move_ranks_by_what_it_may_attain(limit_s, goes):
    """The other has attained 5,000 GPU seconds, which is the third level."""
    runs = served(1, 5000.0, on(1, "a", 0, 1, 2, 3))
    found = decide(runs, pending(2, 4, keeps=False, time_limit_s=limit_s), nodes=host("a", jobs=(runs,)))
    assert kinds(found) == ({1: Migrate} if goes else {}), found.reasons
    assert goes or "by its time limit, because it keeps no checkpoints" in found.reasons[key(2)]


@pytest.mark.parametrize(("hours", "first"), [(100.0, 2), (10.0, 3)])
def test_jobs_that_cannot_move_start_first_come_first_served_above_64_gpu_hours(hours, first):
    """The other may attain 400 GPU hours, and was submitted earlier."""
    early = pending(2, 4, keeps=False, submit_s=NOW - 20.0, time_limit_s=360_000.0)
    late = pending(3, 4, keeps=False, submit_s=NOW - 10.0, time_limit_s=hours / 4 * 3600.0)
    assert kinds(decide(early, late, nodes=host("a", lanes=1))) == {first: Place}


def changed_lane(nodes):
    """Lane 1 closed to other jobs."""
    return tuple(replace(node, drained=node.lane == 1, drain_reason="by an admin") for node in nodes)


def test_users_who_do_not_share_make_way_by_checkpoint():
    long = served(1, 5000.0, on(1, "a", 0, 1, 2, 3))
    found = decide(long, pending(2, 2, user="bob"), nodes=host("a", jobs=(long,)), share_between_users=False)
    assert kinds(found) == {1: Migrate}
    assert next(iter(found.actions)).shares == ()
    assert "their GPUs are promised to it" in found.reasons[key(2)]


@pytest.mark.parametrize("waited_s", [0.0, 1000.0])
def test_a_job_that_slurm_started_where_another_user_is_does_not_keep_that_job_from_its_gpus(waited_s):
    """No agent lets it have its first turn there; so the better rank would stand both still."""
    theirs = served(1, 5000.0, on(1, "a", 1, 2, state="yielded", user="ann"))
    stranger = served(2, 0.0, on(2, "a", 0, 1, 2, 3, state="waiting", lane=1, user="bob", waited_s=waited_s))
    nodes = host("a", jobs=(theirs, stranger))
    found = decide(theirs, stranger, nodes=nodes, share_between_users=False)
    assert kinds(found) == {1: Resume} | ({2: Requeue} if waited_s else {}), found.reasons
    assert kinds(decide(theirs, stranger, nodes=nodes)) == {2: Resume}, "where users share, the better one is first"
    native = decide(theirs, stranger, nodes=nodes, share_between_users=False, admission="native")
    assert kinds(native) == {1: Resume}


def test_a_job_without_room_on_its_gpus_does_not_keep_the_one_that_has_their_memory_from_them():
    keeper = served(1, 5000.0, on(1, "a", 0, 1, state="yielded"))
    waits = served(2, 0.0, on(2, "a", 0, 1, state="yielded", lane=1))
    nodes = host("a", jobs=(keeper, waits))
    assert kinds(decide(keeper, waits, nodes=nodes))[2] is Resume
    full = replace(waits, lease=replace(waits.lease, no_room="a: GPU 0 is full"))
    found = decide(keeper, full, nodes=nodes)
    assert kinds(found) == {1: Resume}
    assert found.reasons[key(2)].endswith("; a: GPU 0 is full")


def test_a_job_of_two_hosts_is_placed_anew_where_one_has_another_users_job():
    """Its agents hold its GPUs on one host and cannot give it those on the other."""
    theirs = served(1, 5000.0, on(1, "b", 0, 1, state="yielded", user="ann"))
    half = replace(lease("held", 0, 1, hosts=("a", "b"), ready=False, held_s=1000.0), waiting_on=("b",))
    stranger = job(2, user="bob", gpus=4, num_nodes=2, nodes=("a-l1", "b-l1"), lease=half, progress=Progress(NOW))
    nodes = host("a", jobs=(stranger,)) + host("b", jobs=(theirs, stranger))
    assert kinds(decide(theirs, stranger, nodes=nodes, share_between_users=False)) == {1: Resume, 2: Requeue}
    whole = replace(stranger, lease=replace(half, waiting_on=()))
    assert 2 not in kinds(decide(theirs, whole, nodes=nodes, share_between_users=False))


def test_a_job_that_keeps_no_checkpoints_stays():
    long = served(1, 5000.0, on(1, "a", 0, 1, 2, 3, checkpoints=False))
    found = decide(long, pending(2, 2), nodes=host("a", jobs=(long,)))
    assert kinds(found) == {}
    assert "stays queued" in found.reasons[key(2)]


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (on(1, "a", 0, 1, checkpoints=False), "holds a:gpu0-1 until it ends, because it keeps no checkpoints"),
        (on(1, "a", 0, 1, requeueable=False), "holds a:gpu0-1 until it ends, because Slurm may not requeue it"),
        (on(1, "a", 0, ready=False), "holds a:gpu0: level 1 of 8"),
        (on(1, "a", 0, state="waiting", ready=False), "gets a:gpu0: level 1 of 8"),
        (
            on(1, "a", 0, lease=replace(lease("waiting", 0, hosts=("a",)), exclusive=True)),
            "waits for a:gpu0, which other jobs leave at once",
        ),
        (
            on(1, "a", 0, lease=replace(lease("held", 0, hosts=("a",)), lost="its ranks are gone"), lane=1),
            "cannot go on, is requeued: its ranks are gone",
        ),
    ],
)
def test_a_job_that_stays_whatever_its_rank_has_its_reason(one, says):
    found = decide(one, nodes=host("a", jobs=(one,)))
    assert found.reasons[key(1)] == says


def test_a_blocked_job_moves_to_idle_gpus():
    first = served(1, 100.0, on(1, "a", 0, 1, 2, 3))
    blocked = served(2, 5000.0, on(2, "a", 0, 1, state="yielded", lane=1))
    blocked = replace(blocked, lease=replace(blocked.lease, saves_away=True))
    nodes = (*host("a", jobs=(first, blocked)), *host("b"))
    found = decide(first, blocked, nodes=nodes)
    assert [(a.job.id, [share.node for share in a.shares]) for a in found.actions] == [(2, ["b"])]


def test_running_jobs_make_room_for_a_wider_one_that_waits():
    small = served(1, 100.0, on(1, "a", 0))
    other = served(2, 100.0, on(2, "b", 0, 1))
    nodes = (*host("a", jobs=(small,)), *host("b", jobs=(other,)))
    found = decide(small, other, pending(3, 4), nodes=nodes)
    assert [(a.job.id, [share.node for share in a.shares]) for a in found.actions] == [(1, ["b"])]
    assert "makes room for job 3" in found.reasons[key(1)]
    lately = Memory(sharing=replace(Memory().sharing, moved_s=((1, NOW - 100.0), (2, NOW - 100.0))))
    assert kinds(decide(small, other, pending(3, 4), nodes=nodes, memory=lately)) == {}


def test_an_unmanaged_job_and_one_that_has_half_its_gpus_get_them_at_once():
    long = served(1, 5.0, on(1, "a", 0, 1))
    other = on(2, "a", 0, state="waiting", lane=1)
    other = replace(other, options=None, lease=replace(other.lease, exclusive=True))
    assert kinds(decide(long, other, nodes=host("a", jobs=(long, other)))) == {1: Yield}
    half = on(2, "a", 0, lane=1, ready=False)
    half = replace(half, num_nodes=2, nodes=("a-l1", "b"))
    nodes = (*host("a", jobs=(long, half)), *host("b"))
    assert kinds(decide(long, half, nodes=nodes)) == {1: Yield}


def test_gpus_of_a_host_where_a_job_has_no_process_left_go_to_the_next_job():
    """As when its task there died and Slurm calls it running: the agent there has dropped it."""
    half = replace(on(1, "a", 0, 1, ready=False), num_nodes=2, gpus=4, nodes=("a", "b"))
    waits = on(2, "b", 0, 1, state="yielded", lane=1)
    nodes = (*host("a", jobs=(half,)), *host("b", jobs=(half, waits)))
    assert kinds(decide(half, waits, nodes=nodes)) == {2: Resume}
    launched = replace(half, start_s=NOW - 1)
    assert kinds(decide(launched, waits, nodes=nodes)) == {}, "its task is about to come"
    known = replace(half, lease=replace(half.lease, gpus=lease("held", 0, 1, hosts=("a", "b")).gpus))
    assert kinds(decide(known, waits, nodes=nodes)) == {}


@pytest.mark.parametrize("admission", ["native", "held"])
def test_with_native_admission_jobs_only_take_turns_and_move(admission):
    long = served(1, 5000.0, on(1, "a", 0, 1, 2, 3))
    found = decide(
        long, pending(2, 2, user="bob"), nodes=host("a", jobs=(long,)), admission=admission, share_between_users=False
    )
    assert (Migrate in kinds(found).values()) == (admission == "held")


# --- nodes that a job's own request rules out ---------------------------------------------------------------


def test_a_job_is_placed_on_nodes_that_slurm_lets_it_have():
    lanes = host("node1", 2) + host("node2", 2)
    waiting = job(1, state="PENDING", slurm_priority=0, held_by_plugin=True, partition=PARTITION)
    lanes = tuple(replace(lane, partitions=(PARTITION,)) for lane in lanes)

    def placed(barred: set[str]) -> tuple[tuple[str, ...] | None, str]:
        decision = policy().decide(cluster(replace(waiting, barred=frozenset(barred)), nodes=lanes), Memory())
        places = [action.nodes for action in decision.actions if isinstance(action, Place)]
        return places[0] if places else None, decision.reasons[waiting.key]

    assert placed(set())[0] == ("node1",)
    assert placed({"node1", "node1-l1"})[0] == ("node2",)
    assert placed({"node1", "node2"})[0] == ("node1-l1",)
    assert placed({lane.name for lane in lanes}) == (
        None,
        "stays queued: no node of its partition meets its constraint, its excluded nodes and reservations",
    )


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"memory_mb": 60_000}, "a host has GPUs for it, but too little host memory"),
        ({"cpus": 25}, "a host has GPUs for it, but too few free CPUs"),
        ({"lanes": 1, "books": 4}, "a host has GPUs for it, but no free lane"),
        ({"gpus": 3}, "better-ranked jobs have the GPUs"),
        ({"gpu_type": "other"}, "better-ranked jobs have the GPUs"),
    ],
    ids=["host memory", "CPUs", "lane", "GPUs", "type"],
)
def test_a_job_that_stays_queued_hears_what_it_lacks(facts, cause):
    """Two of four GPUs are idle, and the job that has the others keeps no checkpoints."""
    facts = dict(facts)
    first = on(1, "a", 0, 1, checkpoints=False, memory_mb=50_000)
    nodes = host("a", facts.pop("lanes", 2), jobs=(first,))
    nodes = (replace(nodes[0], gpus_used=facts.pop("books", 2)), *nodes[1:])
    found = decide(first, replace(pending(2, facts.pop("gpus", 2)), **facts), nodes=nodes)
    assert found.reasons[key(2)] == f"stays queued: {cause}; level 1 of 8"


def test_a_reason_names_gpu_hours_where_the_order_has_no_levels():
    waits = served(2, 5400.0, pending(2, 4))
    owner = served(1, 900.0, on(1, "a", 0, 1, 2, 3, checkpoints=False))
    rules = PolicySettings(frozenset({"gpu"}), sharing=replace(SHARING, floor=True), phased_moves=True)
    for order, says in (("levels", "level 3 of 8"), ("las", "1.5 GPU hours")):
        found = build(order, "none", "preemption", rules).decide(
            cluster(waits, owner, nodes=host("a", lanes=1, jobs=(owner,))), Memory()
        )
        assert found.reasons[waits.key] == f"stays queued: better-ranked jobs have the GPUs; {says}"


def test_a_job_is_placed_anew_when_its_node_is_reserved():
    lanes = tuple(replace(lane, partitions=(PARTITION,)) for lane in host("node1", 2) + host("node2", 2))
    waiting = job(1, state="PENDING", state_reason="Resources", partition=PARTITION, required_nodes=("node1",))
    reserved = replace(waiting, barred=frozenset({"node1", "node1-l1"}))
    memory = Memory(placed=frozenset({waiting.key}))
    assert not [a for a in policy().decide(cluster(waiting, nodes=lanes), memory).actions if isinstance(a, Place)]
    (action,) = policy().decide(cluster(reserved, nodes=lanes), memory).actions
    assert isinstance(action, Place)
    assert action.nodes == ("node2",)
