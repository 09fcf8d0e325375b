"""Repair of jobs whose processes contradict Slurm's word after a slurmd or slurmctld was killed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import NOW, cluster, job, key, lease, node
from test_timeslice import APPLY, decide

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import (
    DrainNode,
    Outcome,
    Place,
    Release,
    Requeue,
    Resume,
    Suspend,
    Unsuspend,
    Yield,
)  # fmt: skip
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import JobKey, Share
from cadenza.policies.core.move import Move, Requeued, Wanted
from cadenza.policies.guard import GuardSettings, guard
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import REQUEUE_HOLD, GandivaSettings
from cadenza.policies.sharing.turns.repair import ABSENT, MAX_REPAIRS, PROLOG_LOST, REQUEUE_FORGOTTEN
from cadenza.slurm_plugin.service.failover.release_round import settled

FROZEN = "node1: Slurm calls it running, and its processes are frozen"
RUNS = "node1: Slurm calls it suspended, and its processes run"
HOLDER = job(1, nodes=("node1-l1",), lease=lease("held", 0, held_s=70.0, vtime_s=70.0, shown="frozen", amiss=FROZEN))
PLACES = replace(APPLY, place=True)
WAITS = job(2, lease=lease("yielded", 0, vtime_s=10.0, shown="frozen"))
GUARD = GuardSettings(partitions=frozenset({"gpu"}), enforce=True)


@pytest.mark.parametrize("share", ["gandiva", "timeslice", "preemption"])
def test_every_way_to_share_repairs(share):
    stages = stages_of(share, APPLY, GandivaSettings(), allocates=False)
    decision = Pipeline(stages, APPLY).decide(cluster(HOLDER, WAITS), Memory())
    assert [one.repair for one in of_job(decision, 1) if isinstance(one, Suspend)] == [True]


def of_job(decision, number):
    return [action for action in decision.actions if getattr(action, "job", None) == key(number)]


def after(snapshot, memory):
    """Return a round's decision and the memory after it, with all that the guard lets out."""
    decision = decide(snapshot, memory, APPLY)
    left = [one.action for one in guard(decision.actions, snapshot, decision.memory, GUARD) if one.allowed]
    return decision, remember(decision.memory, left, snapshot)


def test_a_frozen_job_that_slurm_calls_running_is_suspended_and_resumed():
    """Slurm refuses to resume a job that it calls running; the suspend comes first, without a yield before it."""
    decision, memory = after(cluster(HOLDER, WAITS), Memory())
    assert [type(one) for one in of_job(decision, 1)] == [Suspend]
    assert of_job(decision, 1)[0].repair
    assert "frozen: a killed slurmd or slurmctld left that (repair 1 of 3)" in decision.reasons[key(1)]
    assert memory.repairs == {key(1): 1}
    held = replace(HOLDER, state="SUSPENDED", lease=replace(HOLDER.lease, amiss=""))
    decision, memory = after(cluster(held, WAITS), memory)
    assert Unsuspend in map(type, of_job(decision, 1))
    well = replace(HOLDER, lease=replace(HOLDER.lease, amiss="", shown="running"))
    _, memory = after(cluster(well, WAITS), memory)
    assert memory.repairs == {}


def test_a_job_that_has_yielded_stays_suspended_after_its_repair():
    young = replace(HOLDER, lease=lease("held", 0, held_s=7.0, vtime_s=7.0, shown="running"))
    forgotten = replace(WAITS, lease=replace(WAITS.lease, amiss=FROZEN))
    _, memory = after(cluster(young, forgotten), Memory())
    assert key(2) in memory.suspended
    decision, _ = after(cluster(young, replace(WAITS, state="SUSPENDED")), memory)
    assert of_job(decision, 2) == []


@pytest.mark.parametrize("ours", [{"suspended": frozenset({key(1)})}, {"resumed": {key(1): 0.0}}])
def test_a_suspend_of_ours_that_is_not_in_force_is_taken_back(ours):
    runs = replace(HOLDER, state="SUSPENDED", lease=replace(HOLDER.lease, shown="running", amiss=RUNS))
    decision, _ = after(cluster(runs, WAITS), Memory(**ours))
    assert [type(one) for one in of_job(decision, 1)] == [Unsuspend]
    assert of_job(decision, 1)[0].repair


def test_a_resume_that_slurmctld_forgot_is_repeated():
    """Slurm names the begin of the suspend: one from before our resume is our own, one after it is not."""
    frozen = replace(HOLDER, state="SUSPENDED", lease=lease("yielded", 0, shown="frozen"))
    _, memory = after(cluster(replace(frozen, suspended_s=NOW - 30)), Memory(suspended=frozenset({key(1)})))
    assert memory.resumed == {key(1): NOW}
    runs = replace(HOLDER, lease=lease("held", 0, shown="running"))
    _, memory = after(cluster(runs), memory)
    assert key(1) not in memory.suspended
    for suspended_s, ours in ((NOW - 30, True), (NOW + 5, False), (None, False)):
        forgot = cluster(replace(frozen, suspended_s=suspended_s))
        _, later = after(forgot, memory)
        assert (key(1) in later.suspended) == ours
        decision, _ = after(forgot, later)
        assert (Unsuspend in map(type, of_job(decision, 1))) == ours


def test_a_suspend_of_somebody_else_is_left_alone():
    runs = replace(HOLDER, state="SUSPENDED", lease=replace(HOLDER.lease, shown="running", amiss=RUNS))
    decision, _ = after(cluster(runs, WAITS), Memory())
    assert of_job(decision, 1) == []
    assert decision.reasons[key(1)] == f"left alone: {RUNS}"
    frozen = replace(runs, lease=replace(HOLDER.lease, amiss=""))
    assert of_job(after(cluster(frozen, WAITS), Memory(resumed={key(1): 0.0}))[0], 1) == []


def test_a_resume_of_ours_is_remembered_while_the_job_lives():
    suspended = replace(HOLDER, state="SUSPENDED", lease=replace(HOLDER.lease, amiss=""))
    _, memory = after(cluster(suspended, WAITS), Memory(suspended=frozenset({key(1)})))
    assert memory.resumed == {key(1): NOW}
    assert after(cluster(WAITS), memory)[1].resumed == {}


def test_after_the_last_repair_the_lane_is_closed_and_the_place_given_back():
    decision, _ = after(cluster(HOLDER, WAITS), Memory(repairs={key(1): MAX_REPAIRS}))
    assert [one for one in decision.actions if isinstance(one, DrainNode)] == [
        DrainNode("node1-l1", "cadenza: job 1 contradicts Slurm's word after 3 repairs")
    ]
    assert [type(one) for one in of_job(decision, 1)] == [Requeue]
    assert "gives its place back" in decision.reasons[key(1)]
    fixed = replace(HOLDER, requeueable=False)
    left = of_job(after(cluster(fixed, WAITS), Memory(repairs={key(1): MAX_REPAIRS}))[0], 1)
    assert not {Suspend, Requeue} & set(map(type, left))


def test_a_job_that_does_not_opt_in_is_not_repaired():
    unmanaged = replace(HOLDER, options=None)
    kinds = {Suspend, Unsuspend, Requeue, Yield, Resume}
    assert not kinds & {type(one) for one in of_job(after(cluster(unmanaged), Memory())[0], 1)}


def test_a_job_whose_prologs_end_was_never_reported_is_requeued():
    waits = job(1, lease=None, state_reason="Prolog", prolog_lost=True)
    decision, _ = after(cluster(waits), Memory())
    assert of_job(decision, 1) == [Requeue(key(1), False, PROLOG_LOST)]
    assert decision.reasons[key(1)] == PROLOG_LOST
    for other in (replace(waits, prolog_lost=False), replace(waits, requeueable=False), replace(waits, options=None)):
        assert of_job(after(cluster(other), Memory())[0], 1) == []


def test_a_move_by_hand_of_a_job_that_cannot_start_does_not_keep_its_requeue_back():
    """It waited for up to ten minutes until the job could be stopped, which it never can."""
    policy = build(
        "fifo", "none", "timeslice", PolicySettings(sharing=APPLY, partitions=APPLY.partitions, phased_moves=True)
    )
    asked = Move(key(1), (Share("node2", 1, 1, 1000),), "requested by hand", Wanted(NOW - 5), by_hand=True)
    waits = job(1, lease=None, state_reason="Prolog", prolog_lost=True)
    decision = policy.decide(cluster(waits), Memory(moves=(asked,)))
    assert of_job(decision, 1) == [Requeue(key(1), False, PROLOG_LOST)]
    assert "not moved: a killed slurmd" in decision.reasons[key(1)]


TERMINATED = job(1, state="OTHER", nodes=(), lease=None, terminated_s=NOW)


@pytest.mark.parametrize("share", ["gandiva", "timeslice", "preemption", "none"])
@pytest.mark.parametrize(("place", "hold"), [(True, True), (False, False)])
def test_a_requeue_that_slurmctld_took_for_a_failure_is_ordered_again(share, place, hold):
    sharing = replace(APPLY, place=place)
    policy = build(
        "fifo", "none", share, PolicySettings(sharing=sharing, partitions=APPLY.partitions, phased_moves=True)
    )
    running = cluster(job(1))
    memory = remember(Memory(), (Requeue(key(1), hold=hold, reason="makes room"),), running)
    for tries in range(MAX_REPAIRS):
        decision = policy.decide(cluster(TERMINATED), memory)
        assert of_job(decision, 1) == [Requeue(key(1), hold, REQUEUE_FORGOTTEN, repair=True)]
        assert f"{tries} of 3 repairs tried" in decision.reasons[key(1)]
        judged = guard(decision.actions, cluster(TERMINATED), decision.memory, GUARD)
        assert [one.allowed for one in judged if one.action in decision.actions[:1]] == [True]
        memory = remember(decision.memory, decision.actions, cluster(TERMINATED))
    assert of_job(policy.decide(cluster(TERMINATED), memory), 1) == [], "it is not tried for ever"


def test_a_failure_is_left_alone_where_our_record_does_not_explain_it():
    def orders(failed, requeued):
        policy = build("fifo", "none", "timeslice", PolicySettings(sharing=APPLY, partitions=APPLY.partitions))
        return of_job(policy.decide(cluster(failed), Memory(requeued=requeued)), 1)

    assert orders(TERMINATED, {key(1): NOW - 5})
    assert orders(TERMINATED, {key(1): NOW + 0.9}), "Slurm's times are whole seconds"
    assert not orders(TERMINATED, {})
    assert not orders(TERMINATED, {JobKey(1, 1): NOW - 5}), "another incarnation was requeued"
    assert not orders(TERMINATED, {key(1): NOW + 2}), "it ended before the order"
    assert not orders(TERMINATED, {key(1): NOW - 3600})
    assert not orders(replace(TERMINATED, options=None), {key(1): NOW - 5})
    assert not orders(replace(TERMINATED, terminated_s=None), {key(1): NOW - 5}), "it is only ending"


def test_a_move_goes_on_after_its_requeue_was_forgotten_and_ordered_again():
    policy = build(
        "fifo", "none", "timeslice", PolicySettings(sharing=PLACES, partitions=PLACES.partitions, phased_moves=True)
    )
    move = Move(key(1), (Share("node2", 1, 2, 1000),), "by hand", Requeued(NOW - 5, NOW - 9, ("node1",)))
    memory = Memory(moves=(move,), requeued={key(1): NOW - 5}, held={JobKey(1, 1): NOW - 5})
    decision = policy.decide(cluster(TERMINATED), memory)
    assert of_job(decision, 1) == [Requeue(key(1), True, REQUEUE_FORGOTTEN, repair=True)]
    memory = remember(decision.memory, decision.actions, cluster(TERMINATED))
    held = replace(job(1, state="PENDING", slurm_priority=0, state_reason=REQUEUE_HOLD), key=JobKey(1, 1), nodes=())
    placed = policy.decide(cluster(held, nodes=(node("node1"), node("node2"))), memory)
    assert [action.nodes for action in placed.actions if isinstance(action, Place)] == [("node2",)]


def test_our_record_of_a_requeue_outlives_its_success_for_a_while():
    """A slurmctld that is killed may show the old incarnation again although its successor was seen."""
    memory = remember(Memory(), (Requeue(key(1), hold=True, reason=""),), cluster(job(1)))
    successor = cluster(replace(job(1, state="PENDING", slurm_priority=0), key=JobKey(1, 1)))
    assert remember(memory, (), successor).requeued == {key(1): NOW}
    assert remember(memory, (), replace(successor, time_s=NOW + 3600)).requeued == {}
    assert remember(memory, (), cluster()).requeued == {}


def test_a_requeue_that_never_left_leaves_the_record_of_the_one_before():
    before = Memory(requeued={key(1): 5.0}, held={JobKey(1, 1): 5.0})
    requeue = Requeue(key(1), hold=True, reason="", repair=True)
    memory = remember(before, (requeue,), cluster(TERMINATED))
    kept = settled(memory, before, [(requeue, Outcome(ok=False, left=False))])
    assert (kept.requeued, kept.held) == (before.requeued, before.held)
    assert settled(memory, Memory(), [(requeue, Outcome(ok=False, left=False))]).requeued == {}
    assert settled(memory, before, [(requeue, Outcome(ok=False))]).requeued == {key(1): NOW}, "it may have happened"


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_job_on_its_way_whose_requeue_slurmctld_forgot_is_requeued_once_its_processes_are_gone(state):
    """It forgot that the job had been resumed to save, too: the job is suspended, and its hosts have no step of it."""
    move = Move(key(1), (), "makes way", Requeued(NOW, NOW))
    memory, orders = Memory(moves=(move,), suspended={key(1)}), []
    settings = PolicySettings(sharing=PLACES, partitions=PLACES.partitions, phased_moves=True)
    for seconds in range(0, 40, 2):
        found = replace(cluster(job(1, state=state, lease=None, absent=True)), time_s=NOW + seconds)
        decision = build("levels", "none", "preemption", settings).decide(found, memory)
        memory = decision.memory
        orders += of_job(decision, 1)
    assert set(orders) == {Requeue(key(1), False, ABSENT)}


def test_a_job_on_its_way_whose_start_slurmctld_forgot_is_released_again():
    """It shows the job in the queue with the restart from before the start, in the hold that it had then."""
    move = Move(key(1), (), "makes way", Requeued(NOW, NOW))
    queued = replace(job(1, state="PENDING", slurm_priority=0, lease=None), nodes=())
    memory, orders = Memory(moves=(move,), held={key(1): NOW}), []
    settings = PolicySettings(sharing=PLACES, partitions=PLACES.partitions, phased_moves=True)
    for seconds in range(0, 10, 2):
        found = replace(cluster(queued), time_s=NOW + seconds)
        decision = build("levels", "none", "preemption", settings).decide(found, memory)
        memory = decision.memory
        orders += [(seconds, type(action)) for action in of_job(decision, 1)]
    assert orders[:1] == [(6, Release)]


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_job_whose_end_slurmctld_forgot_is_requeued(state):
    ended = job(1, state=state, lease=None, absent=True)
    decision, _ = after(cluster(ended), Memory())
    assert of_job(decision, 1) == [Requeue(key(1), False, ABSENT)]
    assert "forgot its end" in decision.reasons[key(1)]
    for other in (
        replace(ended, absent=False),
        replace(ended, requeueable=False),
        replace(ended, options=None),
        replace(ended, state="OTHER"),
    ):
        assert not any(isinstance(action, Requeue) for action in after(cluster(other), Memory())[0].actions)


def test_a_job_whose_resume_and_end_slurmctld_forgot_does_not_stay_in_the_hold_of_its_requeue():
    """The suspend is no more on our record: the job had been resumed, and was seen to end."""
    ended = cluster(job(1, state="SUSPENDED", lease=None, absent=True))
    memory, orders = Memory(), []
    held = replace(job(1, state="PENDING", slurm_priority=0, lease=None), key=JobKey(1, 1), state_reason="JobHeldAdmin")
    for seconds in range(0, 20, 2):
        found = ended if seconds == 0 else cluster(replace(held, nodes=()))
        decision, memory = after(replace(found, time_s=NOW + seconds), memory)
        orders += [(action.job, type(action)) for action in decision.actions if isinstance(action, Requeue | Release)]
    assert orders[0] == (key(1), Requeue)
    assert (JobKey(1, 1), Release) in orders
