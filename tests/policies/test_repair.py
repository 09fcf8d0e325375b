"""Repair of jobs whose processes contradict Slurm's word after a slurmd or slurmctld was killed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import NOW, cluster, job, key, lease
from test_timeslice import APPLY, decide

from cadenza.policies.core.actions import DrainNode, Requeue, Resume, Suspend, Unsuspend, Yield
from cadenza.policies.core.decision import Memory
from cadenza.policies.guard import GuardSettings, guard
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import GandivaSettings
from cadenza.policies.sharing.turns.repair import ABSENT, MAX_REPAIRS, PROLOG_LOST

FROZEN = "node1: Slurm calls it running, and its processes are frozen"
RUNS = "node1: Slurm calls it suspended, and its processes run"
HOLDER = job(1, nodes=("node1-l1",), lease=lease("held", 0, held_s=70.0, vtime_s=70.0, shown="frozen", amiss=FROZEN))
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
