"""Bounds of making way, in whole simulated runs: moves of a job, its way back, and nothing where nobody can move."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, job

from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.actions import MakeWay, SetFactor
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Progress
from cadenza.policies.core.move import Move, Over
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.queue_rules import USUAL_WEIGHTS, QueueRules, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.preemption.standing import FIRST_MOVES, MOVES_A_DAY, STARVING_S
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.service.store.record_codec import decode_memory, encode_memory

HOUR, DAY = 3600.0, 86400.0
ORDERS = ("levels", "las", "srtf", "ftf", "fifo")
SHARING = SharingSettings(enforce=True, floor=True, partitions=frozenset({PARTITION}))


def policy(order: str = "levels") -> Policy:
    return build(
        order, "none", "preemption", PolicySettings(frozenset({PARTITION}), sharing=SHARING, phased_moves=True)
    )


def trace(rng: Random, count: int, *, movable: float) -> list[TraceJob]:
    """Jobs that offer more than the cluster has for two days, with heavy tails."""
    jobs = []
    for number in range(count):
        work_s = min(rng.lognormvariate(8.0, 2.0), 2 * DAY)
        jobs.append(TraceJob(
            number, float(rng.randrange(int(DAY))), rng.choice((1, 1, 1, 2, 4, 8)), max(work_s, 30.0),
            user=rng.choice(("ann", "bob", "cyd")), account=rng.choice(("x", "y")),
            time_limit_s=2 * work_s + 300, checkpoints=rng.random() < movable,
        ))  # fmt: skip
    return jobs


def run(jobs: list[TraceJob], decide: Policy, *, move_s: float = 60.0, lease_times: bool = True):
    setup = Setup(round_s=60.0, rounds_on_events=True, phased_moves=True, place=False, lease_times=lease_times)
    setup = replace(setup, costs=replace(setup.costs, restart_s=move_s), queue=QueueRules(Weights(**USUAL_WEIGHTS)))
    return simulate(jobs, read_cluster("3x8:24:100", 1), decide, setup)


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


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32), order=st.sampled_from(ORDERS), move_s=st.sampled_from((60.0, 300.0)))
def test_a_job_leaves_at_most_once_in_ten_move_costs_and_so_often_in_its_life(seed, order, move_s):
    """Whatever the ordering: no ordering thrashes. Every other job repeats what it trained since its own checkpoint."""
    came: dict[int, float] = {}
    inner = policy(order)

    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        jobs = tuple(
            replace(one, lease=replace(one.lease, lost_s=90.0)) if one.lease is not None and one.key.id % 2 else one
            for one in snapshot.jobs
        )
        return inner.decide(replace(snapshot, jobs=jobs), memory)

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        costs = {move.job.id: (move.cost_s or 60.0) + move.lost_s for move in memory.moves}
        for way in (one for one in decision.actions if isinstance(one, MakeWay)):
            for key in way.jobs:
                one = snapshot.by_key[key]
                ran_s = snapshot.time_s - one.start_s
                assert ran_s >= 10 * costs.get(key.id, 60.0), "its quantum"
                days = (snapshot.time_s - came.setdefault(key.id, one.submit_s)) / DAY
                assert key.restart + 1 <= FIRST_MOVES + MOVES_A_DAY * days

    jobs = trace(Random(seed), 40, movable=0.8)  # noqa: S311
    came.update({one.id: one.submit_s for one in jobs})
    result = run(jobs, checked(replace(inner, decide=decide), check), move_s=move_s)
    assert not result.unfinished
    for one in result.jobs:
        life_s = one.finish_s - one.submit_s
        assert one.restarts <= FIRST_MOVES + MOVES_A_DAY * life_s / DAY


@settings(max_examples=2)
@given(seed=st.integers(0, 2**32), order=st.sampled_from(ORDERS))
def test_where_no_job_can_move_nothing_is_ordered(seed, order):
    ordered = []
    jobs = trace(Random(seed), 40, movable=0.0)  # noqa: S311
    run(jobs, checked(policy(order), lambda _snapshot, _memory, decision: ordered.extend(decision.actions)))
    assert ordered == []


@pytest.mark.parametrize("seed", range(3))
def test_every_job_that_made_way_comes_back(seed):
    """The first of Slurm's queue is never a job that made way more than a day ago.

    Fixed seeds: where all others have used up their moves, it waits for their ends instead. In seed 2 each host has a
    job of a user under the fair share, while the user of the one that waits is above it.
    """
    gone: dict[int, float] = {}

    def check(snapshot: ClusterSnapshot, memory: Memory, _decision: Decision) -> None:
        del memory
        waiting = [
            one for one in snapshot.jobs if one.state == "PENDING" and one.state_reason in ("Resources", "Priority")
        ]
        first = min(waiting, key=lambda one: (-one.slurm_priority, one.submit_s, one.key), default=None)
        for one in snapshot.jobs:
            if one.state == "PENDING" and one.key.restart:
                gone.setdefault(one.key, snapshot.time_s)
                waited_s = snapshot.time_s - gone[one.key]
                assert one is not first or waited_s < STARVING_S + 2 * HOUR

    jobs = trace(Random(seed), 60, movable=1.0)  # noqa: S311
    assert not run(jobs, checked(policy(), check)).unfinished


def test_a_job_that_has_waited_for_a_day_stands_as_if_it_had_never_run():
    from test_sharing_preemption import KNOWN, SITE, decide, runs, site_of  # noqa: PLC0415

    move = Move(JobKey(1, 0), (), "", Over(NOW - DAY, "was requeued", 5.0), factor=-9_000, base=9_000)
    back = job(
        1, gpus=4, state="PENDING", state_reason="Priority", name="train", submit_s=NOW - DAY, slurm_priority=1,
        memory_mb=1000, progress=Progress(NOW, attained_s=100 * HOUR, submitted_s=NOW - 8 * DAY),
    )  # fmt: skip
    back = replace(back, key=JobKey(1, 1))
    memory = replace(KNOWN, moves=(move,), factors={1: -9_000})
    found = decide(site_of(runs(2, 4, had_h=1.0), back), memory).actions
    assert [one.factor for one in found if isinstance(one, SetFactor)] == [SITE.weights["age"]]
    assert [one.for_job.id for one in found if isinstance(one, MakeWay)] == [1], "it claims GPUs like a newcomer"
    again = decide(site_of(runs(2, 4, had_h=1.0), back), replace(memory, factors={1: SITE.weights["age"]})).actions
    assert not [one for one in again if isinstance(one, SetFactor)], "once is enough"


def test_records_of_a_round_are_freed_with_it_and_lease_times_change_no_result() -> None:
    jobs = trace(Random(5), 60, movable=0.5)  # noqa: S311
    gc.collect()
    gc.disable()
    try:
        plain = run(jobs, policy())
        assert gc.collect() < 1000, "a simulation collects no cycles: what a round makes must be in none"
    finally:
        gc.enable()
    assert plain.counts.restarts
    quick = run(jobs, policy(), lease_times=False)
    assert (quick.jobs, quick.samples, quick.counts) == (plain.jobs, plain.samples, plain.counts)
