"""Decisions of the live sharing policy: turns, Slurm's books, lanes, giving back, and the reasons."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.core.actions import (
    DrainNode,
    OpenNode,
    Release,
    Requeue,
    Resume,
    SetFactor,
    Suspend,
    Unsuspend,
    Yield,
)  # fmt: skip
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Host, JobKey, Options
from cadenza.policies.guard import GuardSettings, guard
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.sharing.turns.slurm_sync import release_plan

some = settings(max_examples=30, deadline=None)
APPLY = SharingSettings(enforce=True, partitions=frozenset({"gpu"}), max_priority=10)
HOLDER = job(1, lease=lease("held", 0, held_s=70.0, vtime_s=70.0))
YIELDED = job(2, nodes=("node1-l1",), lease=lease("yielded", 0, vtime_s=10.0))


def decide(snapshot, memory, settings):
    """Decide as the service does by default: time slices, and every job keeps what it asked for."""
    stages = stages_of("timeslice", settings, GandivaSettings(), allocates=False)
    return Pipeline(stages, replace(settings, floor=True)).decide(snapshot, memory)


def acts(snapshot, memory=None, settings=APPLY):
    """Return (kind, job or node) of every action."""
    found = decide(snapshot, memory or Memory(), settings).actions
    return [(type(a), a.node if isinstance(a, DrainNode | OpenNode) else a.job) for a in found]


def test_a_slice_that_is_over_ends_in_a_yield_and_a_resume():
    assert acts(cluster(HOLDER, YIELDED)) == [(Yield, key(1)), (Resume, key(2))]


def test_a_suspended_job_is_resumed_in_slurm_before_it_gets_its_lease():
    snapshot = cluster(HOLDER, replace(YIELDED, state="SUSPENDED"))
    found = acts(snapshot, Memory(suspended=frozenset({key(2)})))
    assert found == [(Unsuspend, key(2)), (Yield, key(1)), (Resume, key(2))]


@pytest.mark.parametrize(
    "facts",
    [
        {"user": "bob"},
        {"lease": lease("yielded", 0, vtime_s=10.0, ready=False)},
        {"lease": lease("waiting", 0, vtime_s=10.0)},
    ],
    ids=["another user", "does not obey", "never had its lease"],
)
def test_a_job_whose_word_is_not_enough_stays_suspended_until_its_gpus_are_free(facts):
    """Slurm's resume would let it compute on the GPU together with the holder, which still has to yield."""
    asleep, ours = replace(YIELDED, state="SUSPENDED", **facts), Memory(suspended=frozenset({key(2)}))
    assert acts(cluster(HOLDER, asleep), ours) == [(Yield, key(1)), (Resume, key(2))]
    stopping = replace(HOLDER, lease=replace(HOLDER.lease, state="stopping"))
    assert acts(cluster(stopping, asleep), ours) == [(Resume, key(2))]
    left = replace(HOLDER, lease=replace(HOLDER.lease, state="yielded"))
    assert acts(cluster(left, asleep), ours) == [(Unsuspend, key(2)), (Resume, key(2)), (Suspend, key(1))]


def test_a_suspended_gang_of_another_user_is_resumed_once_both_hosts_are_free():
    """No yield waits for Slurm's resume, and a holder that has yielded is suspended before the other one has."""
    both, ours = ("node1", "node2"), Memory(suspended=frozenset({key(3)}))
    lanes = (node(), node("node2"), node(lane=1), node("node2", 1))
    gang = job(
        3, user="bob", state="SUSPENDED", num_nodes=2, nodes=both, lease=lease("yielded", 0, hosts=both, vtime_s=1.0)
    )
    held = [
        job(n, nodes=(f"{host}-l1",), lease=lease("held", 0, hosts=(host,), held_s=70.0, vtime_s=70.0))
        for n, host in ((1, "node1"), (2, "node2"))
    ]
    left = [replace(one, lease=replace(one.lease, state="yielded", held_s=0.0)) for one in held]
    assert acts(cluster(gang, *held, nodes=lanes), ours) == [(Yield, key(1)), (Yield, key(2)), (Resume, key(3))]
    stopping = replace(held[1], lease=replace(held[1].lease, state="stopping"))
    assert acts(cluster(gang, left[0], stopping, nodes=lanes), ours) == [(Resume, key(3)), (Suspend, key(1))]
    free = [(Unsuspend, key(3)), (Resume, key(3)), (Suspend, key(1)), (Suspend, key(2))]
    assert acts(cluster(gang, *left, nodes=lanes), ours) == free


def test_a_job_that_has_yielded_is_suspended_in_slurm():
    young = replace(HOLDER, lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    assert acts(cluster(young, YIELDED)) == [(Suspend, key(2))]
    assert acts(cluster(young, YIELDED), settings=replace(APPLY, suspend=False)) == []


def test_a_job_whose_state_goes_to_a_disk_runs_for_that_without_a_turn():
    young = replace(HOLDER, lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    saving = replace(YIELDED, lease=replace(YIELDED.lease, saving=True))
    assert acts(cluster(young, saving)) == []
    asleep, ours = replace(saving, state="SUSPENDED"), Memory(suspended=frozenset({key(2)}))
    assert acts(cluster(young, asleep), ours) == [(Unsuspend, key(2))]


def test_a_job_that_was_just_launched_is_not_suspended():
    young = replace(HOLDER, lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    waiting = replace(YIELDED, lease=lease("waiting", 0, ready=False, vtime_s=20.0))
    assert acts(cluster(young, waiting)) == [(Suspend, key(2))]
    assert acts(cluster(young, replace(waiting, start_s=NOW - 1))) == []


def test_the_suspend_of_an_owner_or_admin_is_left_alone():
    snapshot = cluster(HOLDER, replace(YIELDED, state="SUSPENDED"))
    decision = decide(snapshot, Memory(), APPLY)
    assert decision.actions == ()
    assert decision.reasons[key(2)] == "left alone: suspended by its owner or an admin"


def test_a_gang_that_has_half_of_its_gpus_gets_the_rest():
    """Its agents gave it what was free; the holder on the other host refused to stop the first time."""
    both = ("node1", "node2")
    half = job(3, num_nodes=2, nodes=both, lease=lease("held", 0, hosts=both, held_s=9.0, ready=False))
    holder = job(4, nodes=("node2-l1",), lease=lease("held", 0, hosts=("node2",), held_s=90.0))
    lanes = (node(), node("node2"), node("node2", 1))
    assert acts(cluster(half, holder, nodes=lanes)) == [(Yield, key(4))]
    above = replace(holder, options=Options(priority=1))
    assert acts(cluster(half, above, nodes=lanes)) == []


def test_two_gangs_that_begin_on_different_hosts_do_not_take_each_others_gpus():
    """Slurm begins a job's script on any of its nodes, and no step of it has come to the other host yet."""
    lanes = (node(), node("node2"), node("node1", 1), node("node2", 1))
    new = {"gpus": 2, "num_nodes": 2, "start_s": NOW - 1}
    first = job(1, **new, nodes=("node1", "node2"), lease=lease("waiting", 0, hosts=("node1",), ready=False))
    second = job(2, **new, nodes=("node1-l1", "node2-l1"), lease=lease("waiting", 0, hosts=("node2",), ready=False))
    assert acts(cluster(first, second, nodes=lanes)) == [(Resume, key(1))]
    half = replace(first, lease=replace(first.lease, state="held"))
    assert acts(cluster(half, second, nodes=lanes)) == []
    small = job(3, nodes=("node2-l1",), start_s=NOW - 1, lease=lease("waiting", 1, hosts=("node2",), ready=False))
    assert acts(cluster(first, small, nodes=lanes)) == [(Resume, key(1)), (Resume, key(3))]


def test_a_job_that_is_ending_still_has_its_gpus():
    assert acts(cluster(replace(HOLDER, state="OTHER"), YIELDED)) == [(Suspend, key(2))]


def test_a_job_that_somebody_froze_on_its_gpus_is_not_asked_to_stop():
    assert acts(cluster(replace(HOLDER, state="SUSPENDED"), YIELDED)) == [(Suspend, key(2))]


def test_our_suspends_are_undone_when_nobody_would():
    asleep = replace(YIELDED, state="SUSPENDED")
    young = replace(HOLDER, lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    ours = Memory(suspended=frozenset({key(2)}))
    assert (Unsuspend, key(2)) not in acts(cluster(young, asleep), ours)
    for snapshot, rules in (
        (cluster(young, asleep), replace(APPLY, enforce=False)),
        (cluster(young, asleep), replace(APPLY, suspend=False)),
        (cluster(young, asleep), replace(APPLY, partitions=frozenset({"other"}))),
        (cluster(replace(asleep, lease=None)), APPLY),
        (cluster(young, replace(asleep, options=None)), APPLY),
        (cluster(young, asleep, nodes=(node(drained=True, drain_reason="fan"), node(lane=1))), APPLY),
    ):
        assert (Unsuspend, key(2)) in acts(snapshot, ours, rules)


def test_before_maintenance_nothing_is_suspended_and_turns_go_on():
    young = replace(HOLDER, lease=lease("held", 0, held_s=7.0, vtime_s=7.0))
    leaving = (node(drained=True, drain_reason="fan"), node(lane=1))
    assert acts(cluster(young, YIELDED, nodes=leaving)) == [(DrainNode, "node1-l1")]
    found = acts(cluster(HOLDER, YIELDED, nodes=leaving))
    assert found == [(DrainNode, "node1-l1"), (Yield, key(1)), (Resume, key(2))]


def test_a_waiting_job_gives_its_place_back_behind_one_that_cannot_stop():
    stuck = replace(HOLDER, lease=lease("held", 0, held_s=700.0, ready=False, why_not_ready="never attached"))
    waiting = replace(YIELDED, lease=lease("waiting", 0))
    decision = decide(cluster(stuck, waiting), Memory(), APPLY)
    assert [type(a) for a in decision.actions] == [Requeue]
    assert decision.actions[0].reason == "gives its place back after 800 s: job 1 cannot be stopped"
    assert decision.reasons[key(1)].endswith("cannot be stopped: never attached")
    for other in (
        replace(waiting, requeueable=False),
        replace(waiting, nodes=("node1",)),
        replace(waiting, start_s=NOW - 10),
        YIELDED,
    ):
        assert (Requeue, key(2)) not in acts(cluster(stuck, other))
    assert (Requeue, key(2)) not in acts(cluster(HOLDER, waiting))


def test_a_job_that_its_agent_lost_is_requeued_wherever_it_is():
    lost = replace(HOLDER, lease=lease("held", 0, held_s=9.0, ready=False, lost="node1: restore failed"))
    decision = decide(cluster(lost), Memory(), APPLY)
    requeue = Requeue(key(1), hold=False, reason="cannot go on, is requeued: node1: restore failed")
    assert decision.actions == (requeue,)
    rules = GuardSettings(enforce=True, partitions=frozenset({"gpu"}))
    assert guard(decision.actions, cluster(lost), Memory(), rules)[0].allowed
    suspended = replace(lost, state="SUSPENDED")
    assert acts(cluster(suspended), Memory(suspended=frozenset({key(1)}))) == [(Unsuspend, key(1))]
    stays = decide(cluster(replace(lost, requeueable=False)), Memory(), APPLY)
    assert stays.actions == ()
    told = "; cannot go on, not requeueable: cancel it and submit it again: node1: restore failed"
    assert stays.reasons[key(1)].endswith(told)


def test_one_that_cannot_be_stopped_makes_way_for_an_unmanaged_job_by_a_requeue():
    stuck = replace(YIELDED, lease=lease("held", 0, ready=False))
    plain = job(3, options=None, lease=replace(lease("waiting", 0, ready=False, exclusive=True), waited_s=11.0))
    decision = decide(cluster(stuck, plain), Memory(), APPLY)
    assert [(type(a), a.job) for a in decision.actions] == [(Requeue, key(2))]
    assert decision.actions[0].reason == "cannot be stopped and is in the way of job 3, which did not opt in"
    patient = replace(plain, lease=replace(plain.lease, waited_s=9.0))
    assert acts(cluster(stuck, patient)) == []
    assert acts(cluster(replace(stuck, nodes=("node1",)), plain)) == []


def test_one_that_cannot_be_stopped_on_a_further_lane_gives_its_place_back():
    """A job that detaches, or never attaches, has its GPUs no longer than the longest wait while another one waits.

    One that has just started may only not have attached yet: placed anew, it would be requeued again and again.
    """
    stuck = replace(HOLDER, nodes=("node1-l1",), lease=replace(HOLDER.lease, ready=False, held_s=601.0))
    starts = replace(stuck, lease=replace(stuck.lease, held_s=599.0))
    late = replace(YIELDED, nodes=("node1",), lease=replace(YIELDED.lease, waited_s=601.0))
    ours = Memory(suspended=frozenset({key(2)}))
    for waiting, memory in (
        (late, Memory()),
        (replace(late, lease=replace(late.lease, state="waiting")), Memory()),
        (replace(late, state="SUSPENDED"), ours),
        (replace(late, nodes=("node1-l2",)), Memory()),
    ):
        requeues = [a for a in decide(cluster(stuck, waiting), memory, APPLY).actions if isinstance(a, Requeue)]
        assert [(one.job, one.reason) for one in requeues] == [
            (key(1), "gives its place back: it cannot be stopped, and job 2 waited")
        ]
    for held, waiting in (
        (stuck, replace(late, lease=replace(late.lease, waited_s=599.0))),
        (stuck, replace(late, state="SUSPENDED")),
        (stuck, replace(late, lease=replace(lease("yielded", 1), waited_s=601.0))),
        (replace(stuck, nodes=("node1",)), late),
        (replace(stuck, requeueable=False), late),
        (starts, late),
        (HOLDER, late),
    ):
        assert (Requeue, key(1)) not in acts(cluster(held, waiting))


def test_only_lane_0_is_for_one_job_alone():
    """Job 2 has opted out while it waits on a further lane: it takes no turn from job 1, which keeps its own."""
    out = replace(YIELDED, options=Options(share=False), lease=lease("yielded", 0, vtime_s=10.0, exclusive=True))
    assert acts(cluster(HOLDER, out)) == []
    lane0 = replace(out, nodes=("node1",))
    assert acts(cluster(replace(HOLDER, nodes=("node1-l1",)), lane0)) == [(Yield, key(1))]


def test_a_later_job_on_a_further_lane_does_not_prolong_the_wait_of_an_unmanaged_one():
    queued = job(3, options=None, state="PENDING", state_reason="Resources", submit_s=YIELDED.submit_s - 1)
    assert (Yield, key(1)) in acts(cluster(HOLDER, YIELDED))
    assert (Yield, key(1)) not in acts(cluster(HOLDER, YIELDED, queued))
    for harmless in (
        replace(queued, submit_s=YIELDED.submit_s + 1),
        replace(queued, submit_s=YIELDED.submit_s),  # its id says that it came later
        replace(queued, state_reason="Dependency"),
        replace(queued, state_reason="Priority"),  # others are before it in Slurm's own order
        replace(queued, state_reason="", submit_s=NOW - 3000),
        replace(queued, gpus=5),  # no node has as many
        replace(queued, gpus=8, num_nodes=2),
        replace(queued, partition="other"),
        replace(queued, gpus=0),
    ):
        assert (Yield, key(1)) in acts(cluster(HOLDER, YIELDED, harmless))
    fresh = replace(YIELDED, lease=lease("held", 0, held_s=20.0))
    waiting = replace(HOLDER, lease=lease("yielded", 0))
    assert (Yield, key(2)) in acts(cluster(waiting, fresh, queued))
    assert (Yield, key(2)) not in acts(cluster(waiting, fresh))


QUEUED = st.builds(
    lambda number, age_s, **facts: job(number, options=None, state="PENDING", submit_s=NOW - age_s, **facts),
    st.integers(3, 6),
    st.sampled_from([100, 901, 5000, 90_000]),
    user=st.sampled_from(["eve", "ann"]),
    state_reason=st.sampled_from(["", "Resources", "Priority", "Dependency"]),
    gpus=st.sampled_from([1, 1, 4, 5, 64]),
    num_nodes=st.sampled_from([1, 1, 2, 40]),
    partition=st.sampled_from(["gpu", "gpu", "other"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(QUEUED, min_size=1, max_size=4, unique_by=lambda one: one.key), st.integers(0, 4))
def test_jobs_that_only_wait_take_no_turns(waiting, held):
    """Job 2 of ann waits on a further lane; eve has ``held`` of four GPUs, and jobs wait that Slurm will not start."""
    slots = job(7, user="eve", options=None, gpus=held, nodes=("node2",)) if held else job(8, partition="other")
    nodes = (node(), node(lane=1), node("node2"))
    usual = acts(cluster(HOLDER, YIELDED, slots, nodes=nodes))
    assert (Yield, key(1)) in usual
    harmless = [
        one for one in waiting
        if one.state_reason != "Resources" or one.partition == "other" or not 0 < NOW - one.submit_s < 86_400
        or -(-one.gpus // one.num_nodes) > 4 or one.num_nodes > 2 or (one.user == "eve" and held == 4)
    ]  # fmt: skip
    assert acts(cluster(HOLDER, YIELDED, slots, *harmless, nodes=nodes)) == usual


def test_a_user_with_their_part_of_the_gpus_takes_turns_from_their_own_jobs_only():
    queued = job(3, user="eve", options=None, state="PENDING", state_reason="Resources", submit_s=NOW - 901)
    running = job(4, user="eve", options=None, gpus=2, nodes=("node1",))
    assert (Yield, key(1)) not in acts(cluster(HOLDER, YIELDED, queued))
    assert (Yield, key(1)) in acts(cluster(HOLDER, YIELDED, queued, running))
    own = replace(YIELDED, user="eve")
    assert (Yield, key(1)) not in acts(
        cluster(HOLDER, own, queued, running), settings=replace(APPLY, share_between_users=True)
    )


def test_a_user_cannot_ask_for_more_priority_than_the_admin_allows():
    eager = replace(YIELDED, options=Options(priority=7))
    fresh = replace(HOLDER, lease=lease("held", 0, held_s=20.0))
    assert (Yield, key(1)) in acts(cluster(fresh, eager))
    assert (Yield, key(1)) not in acts(cluster(fresh, eager), settings=replace(APPLY, max_priority=0))


def test_a_job_that_slurm_requeued_out_of_our_suspend_is_released():
    """As when its host is lost: Slurm brings a suspended job back held."""
    back = job(1, state="PENDING", slurm_priority=0, state_reason="JobHeldAdmin")
    back = replace(back, key=JobKey(1, 1))
    ours = Memory(suspended=frozenset({key(1)}))
    assert acts(cluster(back), ours) == [(Release, JobKey(1, 1))]
    assert guard(decide(cluster(back), ours, APPLY).actions, cluster(back), ours, GuardSettings())[0].allowed
    assert acts(cluster(back)) == []
    assert acts(cluster(replace(back, state_reason="JobHeldUser")), ours) == []
    completing = replace(back, state="OTHER", state_reason="None")
    assert remember(ours, (), cluster(completing)).suspended == ours.suspended
    assert remember(ours, (), cluster(back)).suspended == ours.suspended
    assert remember(ours, (), cluster(replace(back, slurm_priority=1))).suspended == frozenset()


def test_unmanaged_jobs_are_never_acted_on():
    plain = job(3, options=None, lease=lease("waiting", 0, ready=False, exclusive=True))
    found = acts(cluster(HOLDER, YIELDED, plain))
    assert found == [(Yield, key(1)), (Suspend, key(2))]
    held = job(3, options=None, lease=lease("held", 0, exclusive=True))
    assert acts(cluster(YIELDED, held)) == [(Suspend, key(2))]


def test_observe_only_shuts_every_further_lane_whoever_opened_it():
    observe = replace(APPLY, enforce=False)
    nodes = (node(), node(lane=1), node(lane=2, drained=True, drain_reason="admin"), node("node2", lane=1))
    assert acts(cluster(nodes=nodes), settings=observe) == [(DrainNode, "node1-l1"), (DrainNode, "node2-l1")]


def test_only_our_own_drains_are_opened():
    nodes = tuple(
        node(lane=lane, drained=True, drain_reason=reason)
        for lane, reason in ((1, "cadenza: observe-only"), (2, "broken fan"), (3, ""))
    )
    memory = Memory(drained=frozenset({"node1-l3"}))
    assert acts(cluster(nodes=(node(), *nodes)), memory) == [(OpenNode, "node1-l1"), (OpenNode, "node1-l3")]


def test_what_slurm_drained_at_a_restart_of_its_own_is_opened_on_any_lane_once_no_job_ends_there():
    slurms = {"drained": True, "drain_reason": "Duplicate jobid", "drained_at_restart": True}
    nodes = (node(**slurms), node(lane=1, **slurms))
    opened = [(OpenNode, "node1"), (OpenNode, "node1-l1")]
    assert acts(cluster(nodes=nodes)) == opened
    assert acts(cluster(job(1, state="OTHER"), nodes=nodes)) == opened[1:]
    assert acts(cluster(nodes=nodes), settings=replace(APPLY, enforce=False)) == []
    assert acts(cluster(nodes=nodes, dead=("node1",))) == opened[:1]
    elsewhere = tuple(replace(one, partitions=("gpu", "short")) for one in nodes)
    assert acts(cluster(nodes=elsewhere)) == []
    assert acts(cluster(nodes=tuple(replace(one, drained_at_restart=False) for one in nodes))) == []


def test_lanes_stay_shut_without_a_safe_host():
    ours = node(lane=1, drained=True, drain_reason="cadenza: observe-only")
    assert acts(cluster(nodes=(node(), ours), dead=("node1",))) == []
    assert acts(cluster(nodes=(node(partitions=("gpu", "short")), ours))) == []
    assert acts(cluster(nodes=(node(drained=True), ours))) == []
    assert acts(cluster(nodes=(node(), node(lane=1)), dead=("node1",))) == [(DrainNode, "node1-l1")]
    (drain,) = decide(cluster(nodes=(node(), node(lane=1)), dead=("node1",)), Memory(), APPLY).actions
    assert drain.reason == "cadenza: the agent of node1 is not alive"


@pytest.mark.parametrize("enforce", [True, False])
def test_lanes_of_another_services_hosts_are_left_to_that_one(enforce):
    """Two services, each with partitions of its own, see all nodes of one Slurm."""
    theirs = (node("node2", partitions=("other",)), node("node2", 1, partitions=("other",)))
    found, ours = cluster(nodes=theirs, dead=("node2",)), replace(APPLY, enforce=enforce)
    assert acts(found, settings=ours) == []
    shut = tuple(replace(one, drained=True, drain_reason="cadenza: observe-only") for one in theirs)
    assert acts(replace(found, nodes=shut), settings=ours) == []


def test_lanes_of_unmanaged_hosts_are_closed_where_their_agent_reports_here_or_nothing_is_managed():
    found = cluster(nodes=(node(partitions=("other",)), node(lane=1, partitions=("other",))), dead=("node1",))
    known = replace(found, hosts=(Host("node1", agent_alive=False, agent_version="0.1.0"),))
    nothing = replace(APPLY, enforce=False, partitions=frozenset())
    for seen, rules in ((known, APPLY), (cluster(nodes=found.nodes), APPLY), (found, nothing)):
        assert acts(seen, settings=rules) == [(DrainNode, "node1-l1")]


@pytest.mark.parametrize("place", [False, True])
def test_a_hold_of_ours_ends_and_any_other_stands(place):
    """A requeue of ours into a hold is a move's: without one it is over."""
    settings = replace(APPLY, place=place)
    held = job(4, state="PENDING", slurm_priority=0, state_reason="JobHeldAdmin")
    ours = Memory(held={key(4): NOW})
    assert acts(cluster(held), ours, settings) == [(Release, key(4))]
    assert acts(cluster(replace(held, partition="cpu")), ours, settings) == [(Release, key(4))]
    assert acts(cluster(held), ours, replace(settings, enforce=False)) == [(DrainNode, "node1-l1"), (Release, key(4))]
    assert acts(cluster(held), Memory(placed=frozenset({key(4)})), settings) == []
    assert acts(cluster(held), settings=settings) == []


def test_what_is_undone_are_our_suspends_holds_pins_and_factors():
    pinned = job(1, state="PENDING", required_nodes=("node1",), state_reason="Resources")
    theirs = job(2, state="PENDING", required_nodes=("node1",), state_reason="Resources")
    running, held = job(3), job(4, state="PENDING", slurm_priority=0, state_reason="JobHeldAdmin")
    memory = Memory(placed={key(1)}, held={key(4): NOW}, factors={2: -500, 3: -7, 9: -1})
    undo = [Release(key(4), "off"), Release(key(1), "off", unpin=True)]
    found = cluster(pinned, theirs, running, held)
    assert list(release_plan(found, memory, "off")) == undo
    factors = [SetFactor(key(2), 0, "off"), SetFactor(key(3), 0, "off")]
    assert list(release_plan(found, memory, "off", everything=True)) == undo + factors


def test_every_job_that_opted_in_has_a_reason():
    snapshot = cluster(
        HOLDER,
        YIELDED,
        job(3, state="PENDING", state_reason="Resources"),
        job(4, unmanageable="a heterogeneous job"),
        job(5, partition="cpu"),
        job(6, options=Options(share=False)),
        job(7),
        job(8, state="PENDING", slurm_priority=0),
        job(9, options=None),
        job(10, state="OTHER"),
        job(11, starting=True),
    )
    reasons = decide(snapshot, Memory(), APPLY).reasons
    assert reasons[key(1)] == ("makes way on node1:gpu0 for job 2: its 60 s slice is over (takes turns with job 2)")
    assert {number.id: why for number, why in reasons.items() if number.id > 2} == {
        3: "waits in Slurm's queue (Resources)",
        4: "left alone: a heterogeneous job",
        5: "left alone: partition cpu is not among Cadenza's partitions",
        6: "left alone: the job does not share (share=false)",
        7: "no agent knows the job, so it runs as without Cadenza",
        8: "left alone: held by its owner or an admin",
        10: "no agent knows the job, so it runs as without Cadenza",
        11: "its nodes are not ready yet: Slurm starts it then (CONFIGURING)",
    }


@st.composite
def snapshots(draw: st.DrawFn):
    jobs, used = [], set()
    for number in range(draw(st.integers(0, 8))):
        gang = draw(st.sets(st.integers(0, 3), min_size=1))
        hosts = draw(st.sampled_from((("node1",), ("node2",), ("node1", "node2"))))
        taken = {(host, index) for host in hosts for index in gang}
        holding = draw(st.booleans()) and not taken & used
        used |= taken if holding else set()
        state = draw(st.sampled_from(("held", "stopping") if holding else ("waiting", "yielded")))
        facts = lease(
            state,
            *gang,
            hosts=hosts,
            vtime_s=draw(st.floats(0, 200)),
            held_s=draw(st.floats(0, 100)) if holding else 0.0,
            ready=draw(st.booleans()),
            exclusive=draw(st.integers(0, 4)) == 0,
        )
        jobs.append(
            job(
                number,
                user=draw(st.sampled_from(("ann", "bob"))),
                partition=draw(st.sampled_from(("gpu", "gpu", "cpu"))),
                state=draw(st.sampled_from(("RUNNING", "SUSPENDED", "PENDING"))),
                options=draw(st.sampled_from((None, Options(), Options(priority=1)))),
                lease=draw(st.sampled_from((facts, facts, None))),
                nodes=tuple(f"{host}{draw(st.sampled_from(('', '-l1')))}" for host in hosts),
            )
        )
    lanes = tuple(
        node(name, lane, drained=draw(st.booleans()), drain_reason=draw(st.sampled_from(("", "cadenza: x"))))
        for name in ("node1", "node2")
        for lane in (0, 1)
    )
    ours = draw(st.sets(st.sampled_from([found.key for found in jobs]))) if jobs else set()
    return cluster(*jobs, nodes=lanes, dead=draw(st.sampled_from(((), ("node2",))))), Memory(suspended=frozenset(ours))


@some
@given(snapshots(), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_decisions_do_not_depend_on_the_order_and_are_the_same_again(case, enforce, share, shuffler):
    snapshot, memory = case
    settings = replace(APPLY, enforce=enforce, share_between_users=share)
    jobs, nodes = list(snapshot.jobs), list(snapshot.nodes)
    shuffler.shuffle(jobs)
    shuffler.shuffle(nodes)
    mixed = replace(snapshot, jobs=tuple(jobs), nodes=tuple(nodes))
    assert decide(snapshot, memory, settings) == decide(snapshot, memory, settings)
    assert decide(mixed, memory, settings) == decide(snapshot, memory, settings)


@some
@given(snapshots())
def test_nothing_is_decided_about_jobs_that_are_not_managed(case):
    snapshot, memory = case
    for action in decide(snapshot, memory, APPLY).actions:
        if isinstance(action, Yield | Resume | Suspend | Requeue):
            found = snapshot.job(action.job)
            assert found is not None
            assert APPLY.manages(found)
            ours = isinstance(action, Yield | Resume | Requeue) and found.key in memory.suspended
            assert found.state == "RUNNING" or ours
        if isinstance(action, Unsuspend):
            assert action.job in memory.suspended


@some
@given(snapshots())
def test_at_most_one_action_of_a_kind_for_each_job(case):
    snapshot, memory = case
    found = acts(snapshot, memory)
    assert len(found) == len(set(found))
    for number in {target for kind, target in found if kind is Suspend}:
        assert not {(Resume, number), (Unsuspend, number), (Requeue, number), (Yield, number)} & set(found)


def test_a_decision_about_a_large_cluster_takes_milliseconds():
    maker = random.Random(7)  # noqa: S311 - a reproducible snapshot
    hosts = [f"node{n}" for n in range(64)]
    jobs = [
        job(n, nodes=(host,), lease=lease("yielded", *range(maker.randrange(1, 4)), hosts=(host,)))
        for n, host in enumerate(hosts * 4)
    ]
    lanes = tuple(node(host, lane) for host in hosts for lane in (0, 1))
    decision = decide(cluster(*jobs, nodes=lanes), Memory(), APPLY)
    assert sum(isinstance(action, Resume) for action in decision.actions) >= 64


def test_a_job_on_a_further_lane_that_refuses_each_stop_gives_its_place_back():
    holder = replace(HOLDER, nodes=("node1-l1",), lease=replace(HOLDER.lease, refusals=2))
    assert (Requeue, key(1)) not in acts(cluster(holder, YIELDED))
    refusing = replace(holder, lease=replace(holder.lease, refusals=3))
    requeues = [a for a in decide(cluster(refusing, YIELDED), Memory(), APPLY).actions if isinstance(a, Requeue)]
    assert [(one.job, one.reason) for one in requeues] == [
        (key(1), "gives its place back: it did not stop 3 times, and job 2 waited")
    ]
    assert (Requeue, key(1)) not in acts(cluster(refusing)), "no other job waits"
    assert (Requeue, key(1)) not in acts(cluster(replace(refusing, nodes=("node1",)), YIELDED))


@pytest.mark.parametrize(("refusals", "gpus", "drained"), [(2, (1,), 0), (3, (1,), 1), (3, (0,), 0)])
def test_no_job_starts_over_one_that_cannot_be_stopped(refusals, gpus, drained):
    """Slurm could give its GPU to the next job on a further lane, unless a job there has it already."""
    holder = replace(HOLDER, lease=replace(HOLDER.lease, refusals=refusals))
    other = replace(YIELDED, nodes=("node1-l1",), lease=lease("waiting", *gpus))
    found = acts(cluster(holder, other, nodes=(node(), node(lane=1))))
    assert (DrainNode, "node1-l1") in found if drained else (DrainNode, "node1-l1") not in found


def test_a_gpu_that_a_process_has_without_a_lease_is_named_and_its_host_gets_no_more_sharers():
    snapshot = cluster(HOLDER, YIELDED)
    taken = "pid 7 of no job that is known uses GPU 0 without a lease"
    snapshot = replace(snapshot, hosts=(replace(snapshot.hosts[0], taken=(taken,)),))
    decision = decide(snapshot, Memory(), APPLY)
    assert DrainNode("node1-l1", f"cadenza: {taken}") in decision.actions
    assert decision.reasons[key(2)].endswith(taken)
    assert taken not in decision.reasons[key(1)]


def test_a_job_without_room_on_its_gpu_leaves_the_turn_to_the_one_that_keeps_the_memory_and_says_so():
    full = "node1: GPU 0 has 18 MB free of the 28 MB that the job needs: pid 7 of job 1 has 43 MB"
    keeper, waits = (
        replace(HOLDER, lease=lease("yielded", 0, vtime_s=70.0)),
        replace(YIELDED, lease=replace(YIELDED.lease, no_room=full)),
    )
    assert (Resume, key(1)) in acts(cluster(keeper, waits))
    assert decide(cluster(keeper, waits), Memory(), APPLY).reasons[key(2)].endswith(full)
    assert (Resume, key(2)) in acts(cluster(keeper, YIELDED))
