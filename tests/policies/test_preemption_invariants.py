"""Preemption: what holds of every decision, on random clusters, queues and sites."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, lease, node

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import MakeWay, SetFactor
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Options, Progress, SiteRules
from cadenza.policies.core.move import Move, Over
from cadenza.policies.ordering.levels import level_of
from cadenza.policies.sharing.board.node_room import NodeRoom
from cadenza.policies.sharing.state.settings import SharingSettings

HOUR = 3600.0
RULES = PolicySettings(frozenset({"gpu"}), sharing=SharingSettings(enforce=True, floor=True, min_run_s=0.0))
REASONS = ("Resources", "Priority", "", "AssocGrpGRES", "Licenses", "Dependency", "JobHeldUser", "QOSMaxGRESPerUser")
ORDERS = ("levels", "las", "fifo", "srtf", "fairshare")


def snapshot_of(rng: Random) -> tuple[ClusterSnapshot, Memory]:
    """A random site: hosts that are full or nearly so, and a queue of managed and other jobs."""
    hosts = [f"node{number}" for number in range(rng.randint(1, 6))]
    jobs, moves, nodes, number = [], [], [], 0
    for name in hosts:
        free = 8
        while free and rng.random() < 0.95:
            number += 1
            gpus = min(rng.choice((1, 1, 2, 4, 8)), free)
            run_s, movable = rng.choice((10.0, 500.0, 4000.0, 9e4)), rng.random() < 0.6
            cost_s = rng.choice((0.0, 5.0, 60.0, 300.0))
            past, lost_s = Over(NOW - run_s, "was requeued"), rng.choice((0.0, 0.0, 20.0, 360.0))
            moves.append(Move(JobKey(number, 0), (), "", past, cost_s=cost_s, lost_s=lost_s))
            one = job(
                number, gpus=gpus, cpus=gpus, memory_mb=1000, nodes=(name,), user=rng.choice("abc"),
                account=rng.choice("xy"), qos=rng.choice(("low", "normal")), run_s=run_s, start_s=NOW - run_s,
                slurm_priority=rng.randint(1, 30_000), time_limit_s=rng.choice((HOUR, 48 * HOUR)),
                options=Options() if rng.random() < 0.9 else None,
                lease=lease(
                    "held", *range(8 - free, 8 - free + gpus), hosts=(name,), checkpoints=movable,
                    lost_s=rng.choice((0.0, 0.0, 5.0, 1e9)),
                ),
                progress=Progress(NOW, attained_s=run_s * rng.choice((1, 10)), running=True),
            )  # fmt: skip
            jobs.append(replace(one, key=JobKey(number, 1)))
            free -= gpus
        nodes.append(node(name, gpus=8, gpus_used=8 - free, cpus_used=8 - free))
    for _ in range(rng.randint(0, 12)):
        number += 1
        gpus = rng.choice((1, 1, 2, 4, 8, 16))
        jobs.append(job(
            number, gpus=gpus, cpus=gpus, memory_mb=1000, num_nodes=-(-gpus // 8), state="PENDING",
            state_reason=rng.choice(REASONS), user=rng.choice("abc"), account=rng.choice("xy"),
            qos=rng.choice(("low", "normal")), slurm_priority=rng.randint(1, 30_000), name=rng.choice(("known", "new")),
            time_limit_s=rng.choice((60.0, HOUR, 48 * HOUR)), options=Options() if rng.random() < 0.7 else None,
        ))  # fmt: skip
    site = SiteRules(
        weights={"age": 5_000, "fairshare": 10_000},
        qos_priority={"low": 0, "normal": 10},
        fair_share={"x": rng.choice((0.5, 2.0)), "y": rng.choice((0.5, 2.0))} if rng.random() < 0.5 else {},
    )
    found = replace(cluster(*jobs, nodes=tuple(nodes)), site=site)
    return found, Memory(moves=tuple(moves), keep_checkpoints={f"{user}/known": NOW for user in "abc"})


def decided(seed: int, order: str):
    snapshot, memory = snapshot_of(Random(seed))  # noqa: S311
    decision = build(order, "none", "preemption", RULES).decide(snapshot, memory)
    return snapshot, memory, decision, [one for one in decision.actions if isinstance(one, MakeWay)]


def level(one: Job) -> int:
    return level_of(one.progress.attained(NOW) * one.gpus)


@given(st.integers(0, 2**32), st.sampled_from(ORDERS))
def test_only_jobs_that_can_leave_and_are_past_their_quantum_make_way_and_each_once(seed, order):
    snapshot, memory, _, ways = decided(seed, order)
    gone = [key for way in ways for key in way.jobs]
    assert len(gone) == len(set(gone))
    costs = {move.job.id: (move.cost_s or 60.0) + move.lost_s for move in memory.moves}
    for key in gone:
        one = snapshot.by_key[key]
        assert one.options is not None
        assert one.lease.ready
        assert one.lease.checkpoints
        assert one.run_s >= 10 * costs[key.id], "its GPUs are its own for ten times what its last move cost"


@given(st.integers(0, 2**32))
def test_by_levels_only_worse_levels_make_way_or_jobs_move_together(seed):
    snapshot, _, _, ways = decided(seed, "levels")
    for way in ways:
        waiting = snapshot.by_key[way.for_job]
        known = waiting.options is not None and waiting.name == "known"
        claim = 0 if known else level_of(min(waiting.time_limit_s * waiting.gpus, 64 * HOUR)) + 1
        gone = [snapshot.by_key[key] for key in way.jobs]
        joins = all(one.run_s >= HOUR for one in gone) and sum(one.gpus for one in gone) < waiting.gpus
        assert joins or all(level(one) > claim for one in gone)


@given(st.integers(0, 2**32), st.sampled_from(ORDERS))
def test_the_sites_classes_and_shares_are_kept(seed, order):
    snapshot, _, _, ways = decided(seed, order)
    site = snapshot.site
    for way in ways:
        waiting = snapshot.by_key[way.for_job]
        for one in (snapshot.by_key[key] for key in way.jobs):
            assert site.qos_priority[one.qos] <= site.qos_priority[waiting.qos]
            if one.account != waiting.account:
                assert not site.fair_share.get(waiting.account, 1.0) < 1.0 <= site.fair_share.get(one.account, 1.0)


@given(st.integers(0, 2**32), st.sampled_from(ORDERS))
def test_room_is_made_for_jobs_that_wait_for_resources_only_and_reaches_them(seed, order):
    """After the requeue no job before the one that it is for, of those that wait for resources, fits into the room."""
    snapshot, _, _, ways = decided(seed, order)
    served = {way.for_job for way in ways}
    for way in ways:
        waiting = snapshot.by_key[way.for_job]
        assert waiting.state_reason in ("Resources", "Priority", "")
        room = NodeRoom(snapshot, (), (snapshot.by_key[key] for key in way.jobs))
        touched = {name for key in way.jobs for name in snapshot.by_key[key].amounts}
        for other in snapshot.jobs:
            first = other.state == "PENDING" and other.slurm_priority > waiting.slurm_priority
            if first and other.state_reason == "Resources" and other.key not in served:
                request = room.request(other)
                before = NodeRoom(snapshot, (), ())
                fits = room.fits(request, room.admitting(request))
                assert not (fits and touched & set(fits)) or before.fits(request, before.admitting(request))


@given(st.integers(0, 2**32), st.sampled_from(ORDERS))
def test_jobs_come_back_behind_the_one_that_they_make_way_for(seed, order):
    snapshot, _, _, ways = decided(seed, order)
    for way in ways:
        for key, factor in zip(way.jobs, way.factors, strict=True):
            assert snapshot.by_key[key].slurm_priority + factor < snapshot.by_key[way.for_job].slurm_priority


@given(st.integers(0, 2**32), st.sampled_from(ORDERS))
def test_the_order_of_a_snapshot_means_nothing_and_nothing_else_is_done(seed, order):
    snapshot, memory, decision, _ = decided(seed, order)
    turned = replace(snapshot, jobs=snapshot.jobs[::-1], nodes=snapshot.nodes[::-1])
    again = build(order, "none", "preemption", RULES).decide(turned, memory)
    assert (again.actions, again.memory) == (decision.actions, decision.memory)
    assert {type(one) for one in decision.actions} <= {MakeWay, SetFactor}
