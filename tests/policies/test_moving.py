"""Moves round by round: what a placement carries, who can be moved at all, and checkpoints before preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import NOW, cluster, job, key, lease

from cadenza.policies.actions import Migrate, Place, Release, Requeue
from cadenza.policies.decision import Decision, Memory, Move
from cadenza.policies.model import JobKey, Share
from cadenza.policies.moving import acted, advance, moving

KEEPS = lease("held", 0, checkpoints=True)
THERE = (Share("node2", 1, 6, 9000),)
NEXT = JobKey(1, 1)


def deciding(*actions):
    """A policy that always wants these actions."""
    return moving(lambda _, memory: Decision(actions, memory))


def round_of(decide, found, memory):
    """One round: its decision, and the memory once its actions have left."""
    decision = decide(found, memory)
    moves = acted(decision.memory.moves, decision.actions, found.time_s)
    return decision, replace(decision.memory, moves=moves)


def held(**facts):
    return replace(job(1, state="PENDING", slurm_priority=0, **facts), key=NEXT)


def test_a_job_that_can_save_does_so_before_it_is_requeued():
    preempts = deciding(Requeue(key(1), hold=True, reason="makes room"))
    first, memory = round_of(preempts, cluster(job(1, lease=KEEPS)), Memory())
    assert first.actions == (Migrate(key(1), (), "makes room"),)
    waits, memory = round_of(preempts, cluster(job(1, lease=replace(KEEPS, state="stopping"))), memory)
    assert waits.actions == ()
    assert waits.reasons[key(1)] == "makes way: its checkpoint is being saved"
    saved = replace(KEEPS, state="stopping", saved=True)
    then, memory = round_of(preempts, cluster(job(1, lease=saved)), memory)
    assert then.actions == (Requeue(key(1), hold=True, reason="makes way: makes room"),)
    place = Place(NEXT, ("node2",), "its turn again", shares=THERE)
    last, memory = round_of(deciding(place), cluster(held()), memory)
    assert last.actions == (place,), "once it is held it is the policy's again"
    assert memory.moves[0].outcome == "was requeued with a checkpoint: makes room"
    quiet, _ = round_of(deciding(), cluster(replace(held(), slurm_priority=1)), memory)
    assert quiet.actions == ()


@pytest.mark.parametrize(
    ("found", "hold"),
    [
        (lease("held", 0), True),
        (replace(KEEPS, ready=False), True),
        (replace(KEEPS, state="waiting"), True),
        (KEEPS, False),
        (None, True),
    ],
    ids=["keeps none", "cannot be stopped", "does not run", "not into a hold", "no agent"],
)
def test_any_other_is_requeued_at_once(found, hold):
    requeue = Requeue(key(1), hold=hold, reason="makes room")
    assert deciding(requeue)(cluster(job(1, lease=found)), Memory()).actions == (requeue,)


def test_a_checkpoint_that_fails_does_not_keep_a_job_from_being_preempted():
    requeue = Requeue(key(1), hold=True, reason="makes room")
    _, memory = round_of(deciding(requeue), cluster(job(1, lease=KEEPS)), Memory())
    later = replace(cluster(job(1, lease=KEEPS)), time_s=NOW + 30)
    failed, memory = round_of(deciding(requeue), later, memory)
    assert memory.moves[0].phase == "over"
    assert requeue in (*failed.actions, *deciding(requeue)(later, memory).actions)


@pytest.mark.parametrize(
    ("facts", "shares"),
    [
        ({}, THERE),
        ({"by_hand": True}, ()),
        ({"by_hand": True, "resize": True}, THERE),
        ({"shares": (Share("node2", 1, 0, 0),)}, ()),
    ],
    ids=["policy", "by hand", "by hand with a size", "as asked"],
)
def test_a_migrated_job_gets_the_cpus_and_memory_of_its_new_place(facts, shares):
    move = Move(key(1), **{"shares": THERE, "reason": "r", "since_s": NOW, "phase": "requeued", **facts})
    place = advance(move, cluster(held()), Memory()).action
    assert isinstance(place, Place)
    assert (place.nodes, place.shares, place.resize) == (("node2",), shares, move.resize)


def test_a_policy_sees_that_a_job_without_its_gpus_cannot_save():
    seen = []

    def decide(snapshot, memory):
        seen.append([one.lease.checkpoints for one in snapshot.jobs])
        return Decision((), memory)

    moving(decide)(cluster(job(1, lease=KEEPS), job(2, lease=replace(KEEPS, state="yielded"))), Memory())
    assert seen == [[True, False]]


def test_a_requeued_job_that_its_owner_changed_is_let_go():
    move = Move(key(1), (), "makes room", NOW, phase="requeued")
    step = advance(move, cluster(held(required_nodes=("node3",))), Memory())
    assert isinstance(step.action, Release)
