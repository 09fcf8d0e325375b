"""Slurm's resume of a job that we suspended waits for its GPUs, whatever the resume is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease, node
from test_timeslice import APPLY, snapshots

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Migrate, Requeue, Suspend, Unsuspend
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Share
from cadenza.policies.core.move import Move, Ordered

SHARED = replace(APPLY, share_between_users=True)
OURS = Memory(suspended=frozenset({key(2)}))
AWAY = lease("yielded", 0, vtime_s=90.0, checkpoints=True, saves_away=True)
HOLDER = job(1, user="ann", lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
FROZEN = job(2, user="bob", state="SUSPENDED", nodes=("node1-l1",), lease=AWAY)
LANES = (node(), node(lane=1))
DRAINED = (node(drained=True, drain_reason="fan"), node(lane=1))
THERE = (Share("node2", 1, 6, 9000),)
SAVES = replace(OURS, moves=(Move(key(2), THERE, "r", Ordered(NOW)),))


def decide(snapshot, memory=OURS, share="timeslice", rules=SHARED):
    """Decide as the service does, moves included."""
    shared = PolicySettings(sharing=rules, partitions=rules.partitions, phased_moves=True)
    return build("fifo", "none", share, shared).decide(snapshot, memory)


def acts(snapshot, memory=OURS, rules=SHARED):
    kinds = (Unsuspend, Suspend, Requeue)
    found = decide(snapshot, memory, rules=rules).actions
    return [(type(one), one.job) for one in found if isinstance(one, kinds)]


@pytest.mark.parametrize(
    ("facts", "lanes", "memory", "reason"),
    [
        ({}, DRAINED, OURS, "its host is drained"),
        ({"lease": replace(AWAY, lost="node1: restore failed")}, LANES, OURS, "it gives its place back"),
        ({"options": None}, LANES, OURS, "left alone"),
        ({"lease": AWAY}, LANES, SAVES, "to save a checkpoint"),
    ],
    ids=["drained", "gives back", "opted out", "moves"],
)
def test_a_job_whose_word_is_not_enough_is_not_resumed_while_another_one_has_its_gpus(facts, lanes, memory, reason):
    frozen, away = replace(FROZEN, **facts), replace(HOLDER, lease=lease("yielded", 0, vtime_s=99.0))
    assert (Unsuspend, key(2)) not in acts(cluster(HOLDER, frozen, nodes=lanes), memory)
    comes_first = replace(away, options=replace(away.options, priority=1))
    assert (Unsuspend, key(2)) not in acts(cluster(comes_first, frozen, nodes=lanes), memory), "the other one is next"
    assert (Unsuspend, key(2)) in acts(cluster(frozen, nodes=lanes), memory), "its GPUs are free"
    trusted = decide(cluster(HOLDER, replace(frozen, user="ann"), nodes=lanes), memory).actions
    assert [reason in one.reason for one in trusted if isinstance(one, Unsuspend)] == [True]


def test_a_job_that_no_agent_knows_is_not_resumed_while_another_one_runs_on_its_host():
    """A service and an agent that were killed at once: the service starts first, and knows no lease of that host."""
    unknown, runs = replace(FROZEN, lease=None), replace(HOLDER, lease=None)
    assert (Unsuspend, key(2)) not in acts(cluster(runs, unknown, nodes=LANES))
    assert (Unsuspend, key(2)) not in acts(cluster(HOLDER, unknown, nodes=LANES))
    assert (Unsuspend, key(2)) in acts(cluster(unknown, nodes=LANES)), "nobody else is there"
    first = replace(unknown, key=key(1), nodes=("node1",))
    both = Memory(suspended=frozenset({key(1), key(2)}))
    assert acts(cluster(first, unknown, nodes=LANES), both) == [(Unsuspend, key(1))], "one after the other"


def test_a_job_that_was_suspended_before_its_step_came_to_its_second_host_is_resumed_in_its_turn():
    """Its script goes on then, and the step waits for its lease there; others run beside it, on other GPUs."""
    nodes = ("node1-l1", "node2-l1")
    gang = replace(FROZEN, num_nodes=2, nodes=nodes, lease=lease("waiting", 0, ready=False, waited_s=9.0))
    beside = job(1, user="ann", nodes=("node2",), lease=lease("held", 1, hosts=("node2",), held_s=3.0))
    lanes = (*LANES, node("node2"), node("node2", lane=1))
    assert (Unsuspend, key(2)) in acts(cluster(gang, beside, nodes=lanes))
    there = replace(beside, lease=lease("held", 0, hosts=("node2",), held_s=3.0, ready=False))
    assert (Unsuspend, key(2)) not in acts(cluster(gang, there, nodes=lanes)), "the lowest GPU is to be its own there"
    for trained in ({"state": "yielded"}, {"step": 40}):
        known = replace(gang, lease=replace(gang.lease, **trained))
        assert (Unsuspend, key(2)) not in acts(cluster(known, beside, nodes=lanes)), "it may have processes there"


def test_a_frozen_job_that_has_the_lease_is_resumed_where_a_gang_waits_for_it():
    """An agent that was killed may give the lease to a job in the moment in which the service suspends it."""
    asleep = replace(FROZEN, lease=lease("held", 0, ready=False))
    half = replace(lease("held", 0, hosts=("node1", "node2"), ready=False, held_s=7.0), waiting_on=("node1",))
    gang = job(1, user="ann", num_nodes=2, nodes=("node1", "node2"), lease=half)
    lanes = (*LANES, node("node2"), node("node2", lane=1))
    assert (Unsuspend, key(2)) in acts(cluster(gang, asleep, nodes=lanes)), "none but this job can use its GPU"
    there = replace(gang, lease=replace(half, waiting_on=("node2",)))
    assert (Unsuspend, key(2)) not in acts(cluster(there, asleep, nodes=lanes)), "the gang has this GPU"


def test_a_suspended_job_wakes_up_before_it_gives_its_place_back_where_its_gpus_are_free():
    """Slurm would bring it back held. Where others have its GPUs Slurm kills it frozen, and we release that hold."""
    stuck = replace(HOLDER, user="bob", lease=lease("held", 0, ready=False))
    waiting = replace(FROZEN, lease=lease("waiting", 0))
    assert acts(cluster(stuck, waiting)) == [(Requeue, key(2))]
    lost = replace(waiting, lease=replace(AWAY, lost="node1: restore failed"))
    assert acts(cluster(lost)) == [(Unsuspend, key(2))]
    trusted = replace(lost, lease=replace(lost.lease, ready=True))
    assert acts(cluster(stuck, trusted)) == [(Unsuspend, key(2))]


def test_only_where_its_word_is_enough_a_job_stays_awake_on_a_drained_host():
    awake = replace(FROZEN, state="RUNNING")
    assert acts(cluster(HOLDER, awake, nodes=DRAINED), Memory()) == [(Suspend, key(2))]
    assert acts(cluster(HOLDER, replace(awake, user="ann"), nodes=DRAINED), Memory()) == []


def test_a_job_whose_word_is_not_enough_moves_in_its_turn_only():
    """It could compute on its GPUs while it is awake to save its checkpoint."""
    lanes = (*LANES, node("node2"))
    tied = replace(HOLDER, lease=replace(HOLDER.lease, ready=False))
    found = decide(cluster(tied, replace(FROZEN, user="ann"), nodes=lanes), share="gandiva").actions
    assert {(Migrate, key(2)), (Unsuspend, key(2))} <= {(type(one), getattr(one, "job", None)) for one in found}
    found = decide(cluster(tied, FROZEN, nodes=lanes), share="gandiva").actions
    assert not [one for one in found if isinstance(one, Migrate | Unsuspend)]


@settings(max_examples=150, deadline=None)
@given(snapshots(), st.sampled_from(("timeslice", "gandiva", "preemption")), st.booleans(), st.data())
def test_nothing_resumes_a_job_whose_word_is_not_enough_while_others_have_its_gpus(case, share, users, data):
    away = [one.key for one in case[0].jobs if one.lease is not None and one.lease.state in ("waiting", "yielded")]
    frozen = tuple(replace(one, state="SUSPENDED") if one.key in away else one for one in case[0].jobs)
    snapshot, memory = replace(case[0], jobs=frozen), Memory(suspended=frozenset(away))
    moved = data.draw(st.lists(st.sampled_from(snapshot.jobs), unique=True, max_size=2)) if snapshot.jobs else []
    memory = replace(memory, moves=tuple(Move(one.key, THERE, "r", Ordered(NOW)) for one in moved))
    rules = replace(SHARED, share_between_users=users)
    for action in decide(snapshot, memory, share, rules).actions:
        if isinstance(action, Unsuspend):
            woken = snapshot.by_key[action.job]
            gpus = set(woken.lease.gpus) if woken.lease is not None and woken.partition == "gpu" else set()
            holders = [
                one
                for one in snapshot.jobs
                if one.key != woken.key and one.lease is not None and one.lease.state in ("held", "stopping")
                if not gpus.isdisjoint(one.lease.gpus)
            ]
            obeys = woken.lease is not None and woken.lease.state == "yielded" and woken.lease.ready
            assert all(obeys and one.user == woken.user for one in holders)
