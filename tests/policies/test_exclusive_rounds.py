"""Synergy's rounds on Slurm's queue: pins and SiteFactors in place of holds, and Slurm's own reasons respected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.actions import MakeWay, Place, Release, Requeue, SetFactor
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Progress, Share, SiteRules
from cadenza.policies.core.move import Move, Over
from cadenza.policies.exclusive import FAR_BELOW, NO_WEIGHTS
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.queue_rules import QueueRules, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.state.pending import REQUEUED
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate

SHARING = SharingSettings(enforce=True, place=True, floor=True)
NODES = (node(),)
SITE = SiteRules(weights={"age": 1000})


def decide(
    *jobs: Job, memory: Memory | None = None, order: str = "srtf", nodes=NODES, phased: bool = False, site=SITE
) -> Decision:
    settings = PolicySettings(frozenset({"gpu"}), sharing=SHARING, phased_moves=phased)
    found = replace(cluster(*jobs, nodes=nodes), site=site)
    return build(order, "proportional", "none", settings).decide(found, memory or Memory())


def waits(number: int, gpus: int = 4, left_s: float = 60.0, **facts) -> Job:
    size = {"gpus": gpus, "cpus": 6 * gpus, "memory_mb": 20_000 * gpus, "progress": Progress(NOW, left_s)}
    return job(number, **{"state": "PENDING", "state_reason": "Resources", **size, **facts})


def runs(number: int, gpus: int = 4, left_s: float = 9000.0, where: str = "node1", **facts) -> Job:
    share = Share(where, gpus, 6 * gpus, 20_000 * gpus)
    size = {"gpus": gpus, "cpus": 6 * gpus, "memory_mb": 20_000 * gpus, "nodes": (where,), "placement": (share,)}
    return job(number, **{**size, "progress": Progress(NOW, left_s, running=True, rate=1.0), **facts})


def of(kind: type, decision: Decision) -> list:
    return [action for action in decision.actions if isinstance(action, kind)]


def test_a_job_that_the_round_stops_comes_back_far_below_and_is_not_held():
    found = decide(runs(1), waits(2))
    (way,) = of(MakeWay, found)
    assert (way.jobs, way.factors) == ((key(1),), (FAR_BELOW,))
    assert [action.nodes for action in of(Place, found)] == [("node1",)]
    assert not of(Requeue, found)
    assert found.actions.index(way) < found.actions.index(of(Place, found)[0])


def test_those_that_save_make_way_together_for_the_one_that_starts_on_their_nodes():
    """Each is asked by itself: one of them may be able to save a checkpoint and the other not."""
    saves = lease("held", 0, checkpoints=True, held_s=900.0)
    there = (runs(1, 2, where="a", lease=saves), runs(2, 2, where="a"), runs(3, 4, where="b", lease=saves))
    found = decide(*there, waits(4), waits(5), nodes=(node("a"), node("b")))
    placed = {action.nodes[0]: action.job.id for action in of(Place, found)}
    assert {way.job.id: way.for_job.id for way in of(MakeWay, found)} == {1: placed["a"], 2: 2, 3: placed["b"]}
    assert all(len(way.jobs) == 1 for way in of(MakeWay, found))


def test_a_job_of_others_counts_on_each_node_with_what_slurm_gave_it_there():
    shares = (Share("node1", 3, 3, 3000), Share("node2", 1, 1, 1000))
    other = runs(1, 4, nodes=("node1", "node2"), num_nodes=2, placement=shares, options=None)
    found = decide(other, waits(2, 2), nodes=(node(), node("node2")))
    (place,) = of(Place, found)
    assert all(share.gpus <= {"node1": 1, "node2": 3}[share.node] for share in place.shares)


def test_the_factor_is_lifted_before_its_job_is_placed():
    stopped = replace(waits(1), key=JobKey(1, 1))
    found = decide(stopped, memory=Memory(factors={1: FAR_BELOW}))
    lifted, placed = SetFactor(stopped.key, 0, "its turn by the order"), of(Place, found)[0]
    assert found.actions.index(lifted) < found.actions.index(placed)
    assert not of(SetFactor, decide(stopped)), "no other factor is touched"
    assert not of(SetFactor, decide(stopped, waits(2, left_s=5.0), memory=Memory(factors={1: FAR_BELOW})))


def test_who_stands_before_the_pinned_ones_without_having_its_turn_gets_behind_them():
    """Slurm's main scheduler stops at the first job of a partition that does not fit."""
    first, last = waits(2, left_s=5000.0, slurm_priority=900), waits(3, left_s=5000.0, slurm_priority=3)
    found = decide(first, last, waits(4, slurm_priority=500))
    assert [(action.job, action.factor) for action in of(SetFactor, found)] == [(key(2), FAR_BELOW)]
    assert not of(SetFactor, decide(first, last, waits(4, slurm_priority=500), memory=Memory(factors={2: FAR_BELOW})))
    theirs = replace(first, options=None)
    assert not of(SetFactor, decide(theirs, last, waits(4, slurm_priority=500))), "others keep their place"


@pytest.mark.parametrize("site", [SiteRules(), SiteRules(multifactor=False, weights={"age": 9})])
def test_nobody_is_stopped_where_no_factor_counts(site):
    """One that is stopped would start again at once, before the job that it was stopped for."""
    found = decide(runs(1), waits(2), site=site)
    assert not of(MakeWay, found)
    assert found.reasons[key(1)] == NO_WEIGHTS


def test_no_placement_asks_for_more_than_its_node_has():
    """Slurm shows what the job had when it was placed last, on several nodes."""
    spread = waits(1, 4, cpus=40, memory_mb=150_000)
    (found,) = of(Place, decide(spread))
    assert (found.shares[0].cpus, found.shares[0].memory_mb) == (24, 100_000)


def test_a_job_that_cannot_save_makes_way_at_once():
    running = runs(1, lease=lease("held", 0, 1, 2, 3, checkpoints=False, held_s=900.0))
    assert [way.jobs for way in of(MakeWay, decide(running, waits(2), phased=True))] == [(key(1),)]


def test_a_job_that_can_save_does_so_before_it_makes_way():
    running = runs(1, lease=lease("held", 0, 1, 2, 3, checkpoints=True, held_s=900.0))
    found = decide(running, waits(2), phased=True)
    assert not of(MakeWay, found)
    assert [(move.job, move.shares, move.factor) for move in found.memory.moves] == [(key(1), (), FAR_BELOW)]


@pytest.mark.parametrize(
    "reason", ["AssocGrpGRES", "QOSMaxGRESPerUser", "Licenses", "Dependency", "BeginTime", "JobArrayTaskLimit"]
)
def test_nobody_is_stopped_for_a_job_that_slurm_would_not_start(reason):
    limited = waits(2, 4, state_reason=reason, account="x", user="bob", name="train")
    found = decide(runs(1), limited)
    assert not of(MakeWay, found)
    assert not of(Place, found)
    assert found.reasons[key(2)] == f"waits in Slurm ({reason})"
    again = waits(3, 4, state_reason="Priority", account="x", user="bob", name="train")
    found = decide(runs(1), limited, again)
    limits = reason not in ("Dependency", "BeginTime")
    assert bool(of(MakeWay, found)) is not limits, "an account, user, array or license at its limit"
    if limits:
        assert found.reasons[key(3)] == f"waits in Slurm: a job before it has met a limit ({reason})"


def test_a_hold_by_its_owner_and_nodes_of_its_owners_choice_stand():
    held = waits(2, slurm_priority=0, state_reason="JobHeldUser")
    theirs = waits(3, required_nodes=("node1",))
    found = decide(runs(1), held, theirs)
    assert not {MakeWay, Place, Release, SetFactor} & set(map(type, found.actions))
    assert found.reasons[key(2)] == "is held"
    assert found.reasons[key(3)] == "waits in Slurm (Resources; it requires node1)"


def test_a_pin_ends_with_its_turn_with_its_incarnation_and_with_slurms_reason():
    def ended(one: Job, *others: Job, memory: Memory) -> dict[int, str]:
        found = decide(one, *others, memory=memory)
        return {action.job.id: action.reason for action in of(Release, found) if action.unpin}

    pinned, ours = waits(2, required_nodes=("node1",)), Memory(placed={key(2)})
    assert ended(pinned, memory=ours) == {}, "the plan confirms it"
    assert not of(Place, decide(pinned, memory=ours)), "Slurm only has to start it"
    assert list(ended(pinned, runs(1, left_s=1.0), memory=ours)) == [2], "the GPUs are another's in this round"
    limited = replace(pinned, state_reason="AssocGrpGRES")
    assert "(AssocGrpGRES)" in ended(limited, memory=ours)[2]
    assert ended(replace(pinned, key=JobKey(2, 1)), memory=ours) == {2: REQUEUED}
    assert ended(pinned, memory=Memory()) == {}, "the pin may be its owner's"


def test_a_hold_of_ours_is_released_whoever_has_the_gpus():
    held = waits(2, slurm_priority=0, state_reason="JobHeldAdmin")
    found = decide(runs(1, left_s=1.0), held, memory=Memory(held={key(2): NOW}))
    assert [action.job for action in of(Release, found)] == [key(2)]


def with_actions(snapshot: ClusterSnapshot, decision: Decision) -> ClusterSnapshot:
    """Return Slurm's record once a decision has left: who made way is back in the queue, and pins are set."""
    jobs = {job.key: job for job in snapshot.jobs}
    for action in decision.actions:
        if isinstance(action, MakeWay):
            for old in action.jobs:
                back = replace(jobs[old], key=JobKey(old.id, old.restart + 1), state="PENDING", nodes=(), placement=())
                jobs[old] = replace(back, state_reason="Priority", start_s=None)
        elif isinstance(action, Place):
            jobs[action.job] = replace(jobs[action.job], required_nodes=action.nodes)
        elif isinstance(action, Release) and action.unpin:
            jobs[action.job] = replace(jobs[action.job], required_nodes=())
    return replace(snapshot, jobs=tuple(jobs.values()))


def with_starts(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Return the cluster once Slurm has started each pinned job whose nodes have its GPUs free."""
    free = {node.name: node.gpus for node in snapshot.nodes}
    for one in snapshot.jobs:
        for share in one.placement:
            free[share.node] -= share.gpus
    jobs = []
    for one in snapshot.jobs:
        if one.state == "PENDING" and len(one.required_nodes) == 1 and free[one.required_nodes[0]] >= one.gpus:
            (where,) = one.required_nodes
            free[where] -= one.gpus
            share = Share(where, one.gpus, one.cpus, one.memory_mb)
            one = replace(one, state="RUNNING", nodes=(where,), placement=(share,), state_reason="")  # noqa: PLW2901
        jobs.append(one)
    return replace(snapshot, jobs=tuple(jobs), time_s=snapshot.time_s + 300.0)


@given(
    sizes=st.lists(st.tuples(st.sampled_from((1, 2, 4)), st.floats(60.0, 90_000.0)), min_size=1, max_size=8),
    order=st.sampled_from(("srtf", "las", "fifo")),
    rounds=st.integers(1, 5),
)
def test_every_job_that_waits_can_be_started_by_slurm_and_whoever_was_stopped_is_on_record(sizes, order, rounds):
    """Nothing is held; the factor of a job that has been stopped is known until it is lifted for its next turn."""
    snapshot, memory = (
        cluster(*(waits(n, g, s) for n, (g, s) in enumerate(sizes, 1)), nodes=(node("a"), node("b"))),
        Memory(),
    )
    snapshot = replace(snapshot, site=SITE)
    stopped: set[int] = set()
    for _ in range(rounds):
        settings = PolicySettings(frozenset({"gpu"}), sharing=SHARING)
        decision = build(order, "proportional", "none", settings).decide(snapshot, memory)
        assert not any(isinstance(action, Requeue) for action in decision.actions)
        factors = {action.job.id: action.factor for action in decision.actions if isinstance(action, SetFactor)}
        lifted = {number for number, factor in factors.items() if not factor}
        placed = {action.job.id for action in decision.actions if isinstance(action, Place)}
        assert lifted == placed & stopped, "the factor goes before the pin"
        stopped = stopped - lifted | (factors.keys() - lifted)
        stopped |= {way.job.id for way in decision.actions if isinstance(way, MakeWay)}
        memory = remember(decision.memory, decision.actions, snapshot)
        assert memory.factors == dict.fromkeys(sorted(stopped), FAR_BELOW)
        snapshot = with_starts(with_actions(snapshot, decision))
        assert all(one.slurm_priority > 0 for one in snapshot.jobs)


@pytest.mark.parametrize(("order", "place"), [("las", False), ("srtf", False), ("srtf", True)])
def test_on_a_simulated_slurm_all_jobs_end_and_nobody_stays_pinned_or_far_below(order, place):
    """``place``: whether only the policy starts jobs, or Slurm does, too, where GPUs are free."""
    partitions = frozenset({PARTITION})
    settings = PolicySettings(partitions, sharing=replace(SHARING, partitions=partitions), phased_moves=True)
    policy, left = build(order, "proportional", "none", settings), []

    def watched(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        decision = policy.decide(snapshot, memory)
        left[:] = [decision.memory.factors.get(job.key.id) for job in snapshot.jobs if job.state == "RUNNING"]
        assert not any(job.held for job in snapshot.jobs)
        return decision

    trace = [
        TraceJob(
            n, 250.0 * n, (1, 8, 2, 4)[n % 4], (900.0, 7200.0)[n % 3 == 0], memory_gb_per_gpu=20.0, checkpoints=True
        )
        for n in range(1, 21)
    ]
    queue = QueueRules(weights=Weights(partition=1000))
    setup = Setup(round_s=300.0, phased_moves=True, place=place, queue=queue)
    result = simulate(trace, read_cluster("2x8:24:500"), Policy("watched", watched), setup)
    assert not result.unfinished
    assert result.counts.restarts > 0, "somebody was stopped"


def test_a_round_stops_no_job_within_ten_times_what_its_last_move_cost():
    """By attained service two jobs of equal rank would change places in every round."""
    rules = PolicySettings(frozenset({"gpu"}), sharing=SHARING)
    newcomer = waits(2)

    def stopped(ran_s: float, cost_s: float = 0.0) -> bool:
        has = (Share("node1", 4, 24, 80_000),)
        old = job(
            1, gpus=4, cpus=24, memory_mb=80_000, start_s=NOW - ran_s, placement=has,
            progress=Progress(NOW, attained_s=ran_s, running=True),
        )  # fmt: skip
        moves = (Move(key(1), (), "", Over(NOW - ran_s, "came"), cost_s=cost_s),) if cost_s else ()
        found = replace(cluster(old, newcomer, nodes=NODES), site=SITE)
        decision = build("las", "proportional", "none", rules).decide(found, Memory(moves=moves))
        return any(isinstance(one, MakeWay) for one in decision.actions)

    assert [stopped(599.0), stopped(600.0)] == [False, True]
    assert [stopped(49.0, 5.0), stopped(50.0, 5.0)] == [False, True]
