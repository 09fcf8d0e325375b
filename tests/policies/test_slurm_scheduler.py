"""The simulated slurmctld: limits, reasons, plans, tiers, factors and requeues; no policy means Slurm."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.actions import MakeWay, Migrate, Release, Requeue, SetFactor
from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.idle_gpus import HostGpus, Wanted, idle_waiting_gpus, narrowest_jobs
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.queue_rules import Account, Qos, QueueRules, Tier, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.simulator.job import SimJob
from cadenza.policies.simulator.run_values import GUARD, Setup
from cadenza.policies.simulator.scheduler import BY_ORDER, QueuedJob, _RoomNow
from cadenza.policies.simulator.sim_gateway import SimGateway
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.slurm_baseline import simulate_slurm
from cadenza.policies.simulator.world import World
from cadenza.policies.slurm.backfill import EASY, SLURM, Backfill, Future, Pass, Shares

LONG = {"work_s": 1000.0, "time_limit_s": 1000.0}


def job(number: int, submit_s: float = 0.0, gpus: int = 1, **more: Any) -> TraceJob:
    return TraceJob(**{"id": number, "submit_s": submit_s, "gpus": gpus, **LONG, **more})


def starts(jobs: list[TraceJob], nodes: str = "1x8:24:500", **rules: Any) -> dict[int, float | None]:
    found = simulate_slurm(jobs, read_cluster(nodes), Setup(queue=QueueRules(**rules)))
    return {one.id: one.start_s for one in found.jobs}


def shown(jobs: list[TraceJob], at_s: float, nodes: str = "1x8:24:500", **rules: Any) -> dict[int, Job]:
    """Return the jobs as a snapshot shows them at some time."""
    world = World(jobs, read_cluster(nodes), Setup(place=False, queue=QueueRules(**rules)))
    world.advance(at_s)
    return {one.key.id: one for one in world.snapshot().jobs}


# --- Limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "rules", "reason"),
    [
        ({"account": "lab"}, {"accounts": {"lab": Account(gpus=2)}}, "AssocGrpGRES"),
        ({"account": "lab"}, {"accounts": {"lab": Account(max_jobs=2)}}, "AssocMaxJobsLimit"),
        ({"qos": "low"}, {"qos": {"low": Qos(gpus_per_user=2)}}, "QOSMaxGRESPerUser"),
        ({"array": "a", "array_limit": 2}, {}, "JobArrayTaskLimit"),
        ({"licenses": (("matlab", 2),)}, {"licenses": {"matlab": 4}}, "Licenses"),
    ],
)
def test_a_job_at_a_limit_waits_with_slurms_reason_and_keeps_no_other_waiting(
    mine: dict[str, Any], rules: dict[str, Any], reason: str
) -> None:
    jobs = [*(job(number, **mine) for number in (1, 2, 3)), job(4, 1.0)]
    assert starts(jobs, **rules) == {1: 0.0, 2: 0.0, 3: 1000.0, 4: 3.0}
    found = shown(jobs, 10.0, **rules)
    assert (found[3].state, found[3].state_reason) == ("PENDING", reason)


def test_a_limit_of_a_user_is_that_users_alone() -> None:
    jobs = [job(1, user="ada", qos="low"), job(2, user="ben", qos="low"), job(3, user="ada", qos="low")]
    assert starts(jobs, qos={"low": Qos(gpus_per_user=1)}) == {1: 0.0, 2: 0.0, 3: 1000.0}
    accounts = {"lab": Account(max_jobs=1)}
    assert starts([replace(one, account="lab", qos="") for one in jobs], accounts=accounts) == {
        1: 0.0,
        2: 0.0,
        3: 1000.0,
    }


def test_a_type_of_gpu_is_a_nodes() -> None:
    nodes = "1x4:12:250:P100,1x4:12:250:V100"
    jobs = [job(1, gpus=4, gpu_type="V100"), job(2, gpus=2, gpu_type="V100"), job(3, 1.0, gpus=2)]
    assert starts(jobs, nodes) == {1: 0.0, 2: 1000.0, 3: 30.0}
    assert shown(jobs, 0.0, nodes)[1].gpu_type == "V100"
    with pytest.raises(InputError, match="job 1 asks for 8 GPUs of type V100, the cluster has 4"):
        starts([job(1, gpus=8, gpu_type="V100")], nodes)


# --- Order -----------------------------------------------------------------------------------------------


def test_a_qos_goes_first_and_nice_goes_last() -> None:
    jobs = [job(1, gpus=8), job(2, 1.0, gpus=8, nice=500), job(3, 2.0, gpus=8), job(4, 3.0, gpus=8, qos="high")]
    rules = {"weights": Weights(age=1000, qos=1000), "qos": {"high": Qos(priority=1)}}
    assert starts(jobs, **rules) == {1: 0.0, 4: 1000.0, 3: 2000.0, 2: 3000.0}


def test_fair_share_starts_the_jobs_of_who_has_had_least() -> None:
    jobs = [*(job(number, float(number), gpus=8, user="ada") for number in range(3)), job(3, 900.0, gpus=8, user="ben")]
    assert starts(jobs, weights=Weights(fairshare=1000)) == {0: 0.0, 3: 1000.0, 1: 2000.0, 2: 3000.0}
    assert starts(jobs)[3] == 3000.0


def test_a_higher_tier_goes_first_whatever_the_priority_and_a_blocked_job_keeps_its_nodes() -> None:
    nodes = tuple(replace(node, partitions=(PARTITION, "fast")) for node in read_cluster("1x8:24:500"))
    rules = QueueRules(weights=Weights(qos=1000), qos={"high": Qos(priority=9)}, partitions={"fast": Tier(tier=2)})
    jobs = [
        job(1, gpus=6, work_s=100.0, time_limit_s=100.0),
        job(2, 1.0, gpus=8, qos="high"),
        job(3, 2.0, gpus=8, partition="fast"),
        job(4, 20.0, gpus=2),
        job(5, 21.0, gpus=2, time_limit_s=60.0, work_s=60.0),
    ]
    found = {one.id: one.start_s for one in simulate_slurm(jobs, nodes, Setup(queue=rules)).jobs}
    assert found == {1: 0.0, 3: 100.0, 2: 1100.0, 4: 2100.0, 5: 30.0}


def test_reasons_are_slurms() -> None:
    jobs = [
        job(1, gpus=6),
        job(2, 1.0, gpus=8),
        job(3, 2.0, gpus=4),
        job(4, 3.0, gpus=2, work_s=10.0, time_limit_s=10.0),
    ]
    rules = {"weights": Weights(age=7000)}
    early, found = shown(jobs, 0.0, **rules), shown(jobs, 10.0, **rules)
    assert early[1].state == "RUNNING"
    assert [found[number].state_reason for number in (2, 3, 4)] == ["Resources", "Priority", "Priority"]
    later = shown(jobs, 400.0, **rules)
    assert 4 not in later
    assert later[2].slurm_priority > found[2].slurm_priority == 1


# --- What a policy does ----------------------------------------------------------------------------------


def steered(jobs: list[TraceJob], nodes: str = "1x8:24:500", **more: Any) -> tuple[World, SimGateway]:
    rules = QueueRules(weights=Weights(age=7000))
    setup = Setup(place=False, phased_moves=True, costs=SimCosts(restart_s=40.0), checkpoint_s=300.0, queue=rules)
    world = World(jobs, read_cluster(nodes), replace(setup, **more))
    world.advance(0.0)
    return world, SimGateway(world)


def states(world: World) -> dict[int, str]:
    return {one.key.id: one.state for one in world.snapshot().jobs}


def test_a_site_factor_orders_the_queue_and_stays_over_a_requeue() -> None:
    world, gateway = steered([job(1, gpus=8), job(2, 0.0, gpus=8), job(3, 0.0, gpus=8)])
    assert states(world) == {1: "RUNNING", 2: "PENDING", 3: "PENDING"}
    assert gateway.apply(SetFactor(JobKey(2, 0), -5000, "test")).ok
    gateway.end_round()
    world.advance(990.0)
    found = {one.key.id: one.slurm_priority for one in gateway.read().jobs}
    assert found[2] == 1 < found[3]
    world.advance(1000.0)
    assert states(world) == {2: "PENDING", 3: "RUNNING"}
    gateway.apply(SetFactor(JobKey(3, 0), -10, "test"))
    gateway.apply(Requeue(JobKey(3, 0), hold=False, reason="test"))
    assert world.live[JobKey(3, 1)].queued.site_factor == -10


def test_jobs_that_make_way_come_back_behind_the_job_that_they_left_for() -> None:
    world, gateway = steered([job(1, gpus=4), job(2, gpus=4), job(3, 1.0, gpus=8), job(4, 2.0, gpus=4)])
    world.advance(500.0)
    for number in (1, 2):
        gateway.apply(Migrate(JobKey(number, 0), (), "test"))
    world.advance(520.0)
    leases = [one.lease for one in gateway.read().jobs if one.state == "RUNNING"]
    assert all(lease is not None and lease.saved for lease in leases)
    action = MakeWay((JobKey(1, 0), JobKey(2, 0)), (-9000, -9000), JobKey(3, 0), "test")
    assert gateway.apply(action).ok
    gateway.end_round()
    assert states(world)[3] == "RUNNING"
    assert [world.live[JobKey(number, 1)].done_s for number in (1, 2)] == [500.0, 500.0], "their work is saved"
    waiting = {one.key.id: one for one in gateway.read().jobs if one.state == "PENDING"}
    assert not any(one.held for one in waiting.values())
    assert waiting[1].state_reason == "BeginTime"
    world.advance(560.0)
    waiting = {one.key.id: one for one in gateway.read().jobs if one.state == "PENDING"}
    assert {number: one.state_reason for number, one in waiting.items()} == {
        4: "Resources", 1: "Priority", 2: "Priority",
    }  # fmt: skip
    assert waiting[1].slurm_priority == 1
    world.advance(1e6)
    finishes = {one.id: one.finish_s for one in world.ended}
    assert finishes[3] == 1520.0
    assert gateway.counts[MakeWay] == 2


def test_age_starts_anew_at_a_requeue() -> None:
    world, gateway = steered([job(1, gpus=8), job(2, 1.0, gpus=8)])
    world.advance(600.0)
    gateway.apply(Requeue(JobKey(1, 0), hold=False, reason="test"))
    gateway.end_round()
    world.advance(900.0)
    assert states(world) == {1: "PENDING", 2: "RUNNING"}
    assert world.live[JobKey(1, 1)].queued.eligible_s == 601.0


def test_one_that_makes_way_after_its_end_is_no_error_unless_all_have_ended() -> None:
    world, gateway = steered([job(1), job(2)])
    gone = JobKey(7, 0)
    assert not gateway.apply(MakeWay((gone,), (-1,), JobKey(2, 0), "test")).ok
    assert gateway.apply(MakeWay((gone, JobKey(1, 0)), (-1, -1), JobKey(2, 0), "test")).ok
    assert JobKey(1, 1) in world.live


def test_a_held_job_starts_once_it_is_released() -> None:
    world, gateway = steered([job(1, gpus=8)])
    gateway.apply(Requeue(JobKey(1, 0), hold=True, reason="test"))
    gateway.end_round()
    world.advance(100.0)
    (one,) = gateway.read().jobs
    assert one.held
    gateway.apply(Release(JobKey(1, 1), "test"))
    gateway.end_round()
    assert states(world) == {1: "RUNNING"}


def test_a_job_that_waits_for_a_policy_is_pending_and_not_held() -> None:
    world = World([job(1), job(2, managed=False)], read_cluster("1x8:24:500"), Setup())
    world.advance(0.0)
    one, other = sorted(world.snapshot().jobs, key=lambda job: job.key)
    assert (one.state, one.held, one.slurm_priority, one.state_reason) == ("PENDING", False, 1, "Resources")
    assert (other.state, other.opted_in, other.options) == ("RUNNING", False, None), "Slurm starts who did not opt in"


def test_a_snapshot_has_the_sites_rules() -> None:
    rules = QueueRules(
        weights=Weights(age=5, qos=7), qos={"high": Qos(priority=3)}, partitions={PARTITION: Tier(tier=2)}
    )
    world = World([job(1, qos="high", account="lab")], read_cluster("1x8:24:500"), Setup(place=False, queue=rules))
    world.advance(0.0)
    seen = world.snapshot()
    assert (seen.site.weights, seen.site.qos_priority, seen.site.tiers) == (
        {"age": 5, "qos": 7},
        {"high": 3},
        {PARTITION: 2},
    )
    assert seen.site.fair_share == {}
    assert (seen.jobs[0].qos, seen.jobs[0].account, seen.jobs[0].time_limit_s) == ("high", "lab", 1000.0)


# --- No policy is Slurm -----------------------------------------------------------------------------------

SITE = QueueRules(
    weights=Weights(age=5000, fairshare=10_000, jobsize=1000, qos=20_000),
    qos={"high": Qos(priority=1, gpus_per_user=8), "": Qos()},
    accounts={"a": Account(share=3, gpus=12), "b": Account(max_jobs=2)},
    licenses={"one": 1},
)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceJob]:
    random = Random(draw(st.integers(0, 10**6)))  # noqa: S311 (one draw of hypothesis, many of a job)
    return [
        TraceJob(
            number, float(random.randrange(0, 6000, 7)), random.choice([1, 1, 2, 4, 8, 12, 16]),
            float(random.randrange(5, 4000)), account=random.choice("ab"), user=random.choice("uvw"),
            qos=random.choice(["", "", "high"]), nice=random.choice([0, 0, 50]), managed=random.random() < 0.7,
            time_limit_s=random.choice([None, 5000.0]), licenses=random.choice([(), (), (("one", 1),)]),
            array=(array := random.choice(["", "", "x"])), array_limit=1 if array else None, memory_gb_per_gpu=20.0,
        )
        for number in range(draw(st.integers(1, 40)))
    ]  # fmt: skip


def observing(share: str) -> Policy:
    """Return a policy whose rounds decide everything, and of which the guard lets nothing out."""
    parts = frozenset({PARTITION})
    rules = PolicySettings(partitions=parts, sharing=SharingSettings(partitions=parts), phased_moves=True)
    return build("fifo", "none", share, rules)


def idle(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
    del snapshot
    return Decision((), memory)


@settings(max_examples=40, deadline=None)
@given(traces(), st.sampled_from(["idle", "timeslice"]), st.booleans())
def test_with_a_policy_that_does_nothing_every_start_is_slurms(jobs: list[TraceJob], share: str, events: bool) -> None:
    nodes = read_cluster("2x8:24:500")
    setup = Setup(round_s=17.0, place=False, queue=SITE, phased_moves=True, rounds_on_events=events)
    policy = Policy("idle", idle) if share == "idle" else observing(share)
    ours = simulate(jobs, nodes, policy, replace(setup, guard=replace(GUARD, enforce=False)))
    theirs = simulate_slurm(jobs, nodes, setup)
    assert [(one.id, one.start_s, one.finish_s) for one in ours.jobs] == [
        (one.id, one.start_s, one.finish_s) for one in theirs.jobs
    ]
    assert ours.unfinished == theirs.unfinished


@settings(max_examples=40, deadline=None)
@given(traces())
def test_no_limit_is_passed_at_any_time(jobs: list[TraceJob]) -> None:
    found = simulate_slurm(jobs, read_cluster("2x8:24:500"), Setup(queue=SITE)).jobs
    given_jobs = {one.id: one for one in jobs}
    for at_s in {one.start_s for one in found if one.start_s is not None}:
        now = [
            given_jobs[one.id]
            for one in found
            if one.start_s is not None and one.start_s <= at_s and (one.finish_s is None or at_s < one.finish_s)
        ]
        assert sum(one.gpus for one in now) <= 16
        assert sum(one.gpus for one in now if one.account == "a") <= 12
        assert sum(one.array == "x" for one in now) <= 1
        assert sum(bool(one.licenses) for one in now) <= 1
        for user in "uvw":
            assert sum(one.account == "b" and one.user == user for one in now) <= 2
            assert sum(one.gpus for one in now if one.qos == "high" and one.user == user) <= 8
    for one in found:
        if one.start_s is None:  # never: it is larger than a limit of its own
            mine = given_jobs[one.id]
            assert one.gpus > min(12 if mine.account == "a" else 16, 8 if mine.qos == "high" else 16)


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60), st.integers(0, 255)), max_size=30),
    st.integers(0, 99),
    st.integers(1, 60),
)
def test_nodes_are_free_where_no_reservation_meets_the_time(
    reserved: list[tuple[int, int, int]], from_s: int, length_s: int
) -> None:
    one = Pass(0.0, 255, Backfill(window_s=100.0))
    for begin_s, for_s, nodes in reserved:
        one.reserve(begin_s, begin_s + for_s, nodes)
    taken = 0
    for begin_s, for_s, nodes in reserved:
        taken |= nodes if begin_s <= from_s + length_s and begin_s + for_s > from_s else 0
    found, _ = one.free_of_reservations(from_s, from_s + length_s)
    assert found == 255 & ~taken
    few, _ = one.free_of_reservations(from_s, from_s + length_s, among=15, count=2)
    assert few == found or (few & 15).bit_count() < 2


class Asks:
    """A pending job that asks for so much on each of so many nodes."""

    def __init__(self, each: tuple[Amount, ...]) -> None:
        self.each, self.pins, self.among, self.limit_s = each, (), 15, 100.0


AMOUNTS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
RUNNING = st.tuples(
    st.integers(-2, 6).map(float), st.lists(st.tuples(st.integers(0, 3), AMOUNTS), min_size=1, max_size=3).map(tuple)
)


@given(
    st.lists(AMOUNTS, min_size=4, max_size=4),
    st.lists(RUNNING, max_size=8),
    st.lists(st.tuples(st.booleans(), RUNNING, st.integers(0, 7)), max_size=6),
    st.lists(AMOUNTS, min_size=1, max_size=3),
)
def test_what_becomes_free_is_the_same_when_jobs_start_and_leave_one_by_one(
    free: list[Amount],
    running: list[tuple[float, Shares]],
    changes: list[tuple[bool, tuple[float, Shares], int]],
    asked: list[Amount],
) -> None:
    lanes, jobs, room = [3, 12], list(running), [list(one) for one in free]
    first = Future(0.0, free, running, lanes)
    for need in asked:  # so that answers are kept
        first.spot(Asks((need,)), 15, 0)
    followed = first.copy()
    for starts_now, one, which in changes:
        if not starts_now and not jobs:
            continue
        end_s, shares = one if starts_now else jobs.pop(which % len(jobs))
        if starts_now:
            jobs.append(one)
            followed.start(end_s, shares)
        else:
            followed.leave(end_s, shares)
        for at, amount in shares:
            room[at] = [had + (-more if starts_now else more) for had, more in zip(room[at], amount, strict=True)]
    for future, now_free, there in ((first, free, running), (followed, room, jobs)):
        anew = Future(0.0, now_free, there, lanes)
        assert (future.ends_s, future.nodes, future.on(5, 15)) == (anew.ends_s, anew.nodes, anew.on(5, 15))
        for ended in range(len(there) + 1):
            for need in asked:
                for each in ((need,), (need, need)):
                    assert future.spot(Asks(each), 15, ended) == anew.spot(Asks(each), 15, ended)


# --- What is kept up to date is what it would be if it were worked out anew ----------------------------------


def plain_use(world: World) -> tuple[int, float]:
    """Return the GPUs with a holder, and those that compute, from all GPUs of all jobs."""
    holders: dict[Gpu, list[SimJob]] = {}
    for job in world.live.values():
        for gpu in job.gpus_held if job.lease is not None and job.lease.holds else ():
            holders.setdefault(gpu, []).append(job)
    return len(holders), float(sum(any(job.running for job in jobs) for jobs in holders.values()))


def plain_idle_waiting(world: World) -> float:
    """Return the GPUs that no job holds where a waiting job fits, from all jobs."""
    used = Counter[str]()
    for job in world.live.values():
        held = job.lease is not None and job.lease.holds
        used.update(gpu.host for gpu in job.gpus_held if held)
    hosts = [
        HostGpus(node.gpus, node.gpus - used[node.host] if node.up else 0, node.partitions, node.gpu_type, node.name)
        for node in world.nodes.values()
        if node.lane == 0
    ]
    waiting = [
        (Wanted(job.trace.partition, job.trace.gpu_type, job.trace.barred), job.gpus)
        for job in world.live.values()
        if not job.running and (job.state != "PENDING" or not world.queue.limit(job.queued))
        if job.gpus <= sum(host.idle for host in hosts)
    ]
    return float(idle_waiting_gpus(hosts, narrowest_jobs(waiting)))


@settings(max_examples=40, deadline=None)
@given(traces(), st.sampled_from(["preemption", "timeslice", "gandiva"]), st.booleans())
def test_the_use_of_gpus_and_the_queue_are_kept_as_they_are(jobs: list[TraceJob], share: str, limits: bool) -> None:
    parts, seen = frozenset({PARTITION}), 0
    rules = PolicySettings(partitions=parts, sharing=SharingSettings(partitions=parts), phased_moves=True)
    lanes = 1 if share == "preemption" else 2
    queue = SITE if limits else QueueRules(weights=SITE.weights)
    setup = Setup(round_s=60.0, place=False, queue=queue, phased_moves=True, rounds_on_events=True, lanes=lanes)
    jobs = [replace(job, checkpoints=job.id % 2 == 0) for job in jobs]
    if not limits:
        jobs = [replace(job, array="", array_limit=None, licenses=()) for job in jobs]
    sample = World._sample

    def checked(world: World) -> None:
        nonlocal seen
        assert world.leases is not None
        assert world.leases.use() == plain_use(world)
        assert world._idle_waiting() == plain_idle_waiting(world)
        queue = world.queue
        assert [job for job in queue.queue if not job.looked] == [job for job in queue.queue if job in queue._unseen]
        assert queue.queue == sorted(queue.queue, key=BY_ORDER)
        assert all(queue._place_of(job) == at for at, job in enumerate(queue.queue))
        kinds = {(job.kind, job.among, job.each, job.pins) for job in queue.queue}
        assert len(kinds) == len({kind for kind, *_ in kinds}) == len({(*asks,) for _, *asks in kinds})
        seen += 1
        sample(world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "_sample", checked)
        simulate(
            jobs,
            read_cluster("2x8:24:500", lanes),
            build("levels" if lanes == 1 else "fifo", "none", share, rules),
            setup,
        )
    assert seen


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from([SLURM, EASY, Backfill(max_jobs=5)]))
def test_what_has_no_room_in_a_pass_has_none_later_in_it(jobs: list[TraceJob], rules: Backfill) -> None:
    """Each answer of a pass is the plain one: nodes without a reservation until the limit that have room now."""
    has, last = _RoomNow.has, _RoomNow.last_before

    def checked(room: _RoomNow, job: QueuedJob) -> bool:
        found = has(room, job)
        assert found == bool(room._place(job, room._plan.unreserved(job.limit_s)))
        return found

    def last_before(room: _RoomNow, end: int) -> int:
        plain = [job for job in room._tested[:end] if job not in room._running and checked(room, job)]
        found = last(room, end)
        assert found == (room._tested.index(plain[-1]) if plain else -1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_RoomNow, "has", checked)
        patch.setattr(_RoomNow, "last_before", last_before)
        simulate_slurm(jobs, read_cluster("2x8:24:500"), Setup(queue=SITE), rules)
