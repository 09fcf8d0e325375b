"""Bottleneck moves: jobs that their host holds back go where they are faster, and no job falls below its promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gandiva_rig import NOTHING, SHARING, after, decided, held, host, of, on, profile, world
from hypothesis import assume, given
from hypothesis import strategies as st
from snapshots import NOW, cluster, key

from cadenza.policies.allocation.cadenza.allocate import cadenza
from cadenza.policies.allocation.problem import share_speed
from cadenza.policies.core.actions import Migrate, Tune
from cadenza.policies.core.decision import Memory, SharingMemory
from cadenza.policies.core.model import Progress, Share
from cadenza.policies.core.profile import Reference
from cadenza.slurm_plugin.service.store import record_codec

FLOOR = replace(SHARING, floor=True)
RELIEF = replace(NOTHING, relieve=True)
NONE = replace(NOTHING, relieve=False)
SIX = Reference(gpus=4, cpus=24, memory_gb=100)
HUNGRY = profile(
    model="image",
    reference=SIX,
    cpus_per_gpu=(1.0, 3.0, 6.0, 9.0, 12.0),
    throughput=((0.17,), (0.5,), (1.0,), (1.5,), (2.0,)),
)
"""Twice as fast with the 12 CPUs of two shares."""
SATED = profile(model="language", reference=SIX, cpus_per_gpu=(1.0, 3.0), throughput=((1.0,), (1.0,)))


def full(where: str, first: int, kind=HUNGRY, count: int = 4, **facts):
    return [on(first + index, where, index, profile=kind, **facts) for index in range(count)]


def relief(snapshot, memory=None, gandiva=RELIEF, sharing=FLOOR):
    decision = decided(snapshot, memory, gandiva, sharing, allocate=cadenza)
    return {a.job.id: a.shares for a in of(Migrate, decision)}, decision


def test_a_job_that_lacks_cpus_goes_where_some_are_free():
    jobs = [*full("a", 1), *full("b", 11, SATED, 2)]
    moved, decision = relief(world(*jobs, hosts=("a", "b")))
    assert [share.node for share in moved[1]] == ["b"]
    assert "CPUs or memory that it lacks" in decision.reasons[key(1)]
    assert relief(world(*jobs, hosts=("a", "b")), gandiva=NONE)[0] == {}
    assert relief(world(*jobs, hosts=("a", "b")), gandiva=replace(RELIEF, introspective=False))[0] == {}


@pytest.mark.parametrize(("booked", "cpus"), [(6, 12), (8, 8)])
def test_it_asks_slurm_for_no_more_than_its_books_have_there(booked, cpus):
    """Three CPUs do for each of the other two, but Slurm starts nothing with what they lend."""
    lent = [replace(one, cpus=booked, placement=(Share("b", 1, booked, 8000),)) for one in full("b", 11, SATED, 2)]
    ((share,),) = relief(world(*full("a", 1), *lent, hosts=("a", "b")))[0].values()
    assert share.cpus == cpus


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoints": False},
        {"requeueable": False},
        {"progress": Progress(NOW, 640.0, 600.0)},
        {"profile": None},
        {"state": "yielded"},
    ],
)
def test_who_cannot_move_or_would_not_gain_enough_stays(change):
    jobs = [on(1, "a", 0, **{"profile": HUNGRY, **change}), *full("a", 2, SATED)[1:], *full("b", 11, SATED, 2)]
    busy = [replace(one, cpus=6) for one in jobs]
    assert relief(world(*busy, hosts=("a", "b")))[0] == {}


def test_limits_hold():
    jobs = [*full("a", 1), *full("b", 11), *full("c", 21, SATED, 2), *full("d", 31, SATED, 2)]
    snapshot = world(*jobs, hosts=tuple("abcd"))
    moved, decision = relief(snapshot)
    assert len(moved) > 1
    assert len(relief(snapshot, gandiva=replace(RELIEF, moves_per_round=1))[0]) == 1
    moved_s = tuple((number, NOW - 100.0) for number in (*range(1, 5), *range(11, 15)))
    lately = Memory(sharing=SharingMemory(moved_s=moved_s))
    assert relief(snapshot, lately)[0] == {}
    assert dict(after(snapshot, decision).sharing.moved_s).keys() == moved.keys()
    waiting = world(*jobs, held(99), hosts=tuple("abcd"))
    assert 99 not in relief(waiting)[0]
    assert relief(waiting)[0] == {}


def test_it_stays_on_its_type_of_gpu():
    jobs = [*full("a", 1), *full("b", 11, SATED, 2)]
    nodes = (*host("a", 2, tuple(jobs), gpu_type="a100"), *host("b", 2, tuple(jobs), gpu_type="v100"))
    assert relief(cluster(*jobs, nodes=nodes))[0] == {}


def test_it_leaves_no_host_to_defragmentation():
    """On an empty host the job would be the only one, and defragmentation would send it back."""
    jobs = full("a", 1)
    assert relief(world(*jobs, hosts=("a", "b")))[0].keys() == {1}
    assert relief(world(*jobs, hosts=("a", "b")), gandiva=replace(RELIEF, defrag=True))[0] == {}
    beside = [*jobs, *full("b", 11, SATED, 2)]
    assert relief(world(*beside, hosts=("a", "b")), gandiva=replace(RELIEF, defrag=True))[0].keys() == {1}


def test_a_fixed_point_is_reached():
    jobs = {one.key.id: one for one in [*full("a", 1), *full("b", 11, SATED, 2)]}
    memory = Memory()
    for _ in range(6):
        snapshot = world(*jobs.values(), hosts=("a", "b"))
        moved, decision = relief(snapshot, memory, replace(RELIEF, move_every_s=0.0))
        for number, (share,) in moved.items():
            taken = {gpu.index for one in jobs.values() if one.nodes == (share.node,) for gpu in one.lease.gpus}
            jobs[number] = on(number, share.node, min(set(range(4)) - taken), profile=jobs[number].profile)
        memory = after(snapshot, decision)
    assert moved == {}


# --- What always holds -----------------------------------------------------------------------------------------


KINDS = (HUNGRY, SATED, replace(HUNGRY, throughput=((0.3,), (0.8,), (1.0,), (1.1,), (1.15,))), None)


@st.composite
def clusters(draw):
    """Three hosts of two widths whose GPUs some jobs have, with CPUs that their users chose."""
    jobs, nodes, number = [], [], 0
    for name in "abc":
        here = []
        for index in range(draw(st.integers(0, 4))):
            number += 1
            cpus = draw(st.integers(1, 6))
            facts = {"cpus": cpus, "placement": (Share(name, 1, cpus, 8000),), "profile": draw(st.sampled_from(KINDS))}
            here.append(on(number, name, index, **facts))
        nodes += host(name, 2, tuple(here), cpus=draw(st.sampled_from((24, 24, 36))))
        jobs += here
    return cluster(*jobs, nodes=tuple(nodes))


def predicted(snapshot, decision):
    """Each job's speed once the decision is carried out, with what its books have there when it moves."""
    wanted = {action.job: action.shares[0] for action in decision.actions if isinstance(action, Tune | Migrate)}
    return {job.key: share_speed(job.profile, wanted.get(job.key, job.placement[0]), "") for job in snapshot.jobs}


@given(clusters())
def test_a_relief_lowers_nobody_below_its_floor_and_the_total_rises(snapshot):
    sharing = replace(SHARING, floor=False)
    without, with_it = (decided(snapshot, None, g, sharing, allocate=cadenza) for g in (NONE, RELIEF))
    moved = of(Migrate, with_it)
    assume(moved)
    before, now = predicted(snapshot, without), predicted(snapshot, with_it)
    fair = {node.name: node.cpus // node.gpus for node in snapshot.nodes}
    for job in snapshot.jobs:
        floor = share_speed(job.profile, Share("", 1, fair[job.nodes[0]], 25_000), "")
        assert now[job.key] >= min(before[job.key], floor) - 1e-9
    for action in moved:
        assert now[action.job] > before[action.job]
    assert sum(now.values()) > sum(before.values())


@given(clusters())
def test_under_a_floor_nobody_gets_slower_than_with_what_it_asked_for(snapshot):
    decision = decided(snapshot, None, RELIEF, FLOOR, allocate=cadenza)
    now = predicted(snapshot, decision)
    for job in snapshot.jobs:
        asked = share_speed(job.profile, Share("", 1, job.cpus, job.memory_mb), "")
        assert now[job.key] >= asked - 1e-9


@given(clusters(), st.randoms(use_true_random=False))
def test_the_order_of_jobs_and_nodes_changes_nothing(snapshot, random):
    jobs, nodes = list(snapshot.jobs), list(snapshot.nodes)
    random.shuffle(jobs)
    random.shuffle(nodes)
    turned = replace(snapshot, jobs=tuple(jobs), nodes=tuple(nodes))
    one, two = (decided(each, None, RELIEF, FLOOR, allocate=cadenza) for each in (snapshot, turned))
    assert record_codec.encode_decision(one) == record_codec.encode_decision(two)
