"""Jobs that have started without their lease: they take no turn and block no GPU until they ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gandiva_rig import NOTHING, SHARING, host, on
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Migrate, Resume, Suspend, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import Job, Options, Progress
from cadenza.policies.sharing.turns.reasons import NOT_ASKED

ORDERS = {"preemption": "levels", "timeslice": "fifo", "gandiva": "fifo"}
LANES = 4


def decide(share: str, *jobs: Job, nodes, **facts) -> Decision:
    sharing = replace(SHARING, suspend=True, min_run_s=1.0, **facts)
    turns_only = PolicySettings(frozenset({"gpu"}), sharing=sharing, gandiva=NOTHING, phased_moves=True)
    built = build(ORDERS[share], "none", share, turns_only)
    return built.decide(cluster(*jobs, nodes=nodes), Memory())


def unasked(number: int, *gpus: int, lane: int, **facts) -> Job:
    """A job that Slurm started long ago, and whose agent reports it late."""
    one = on(number, "a", *gpus, state="waiting", lane=lane, options=Options(late=True), start_s=NOW - 1000.0, **facts)
    return replace(one, lease=replace(one.lease, late=True, ready=False, waited_s=1000.0))


def turns(decision: Decision) -> set:
    return {(type(action), action.job) for action in decision.actions if isinstance(action, Yield | Resume | Suspend)}


@st.composite
def hosts(draw) -> tuple[tuple[Job, ...], Job]:
    """Draw jobs on the lanes of a host, one of which holds or waits on each, and a late job on the last lane."""
    found = []
    free = {0, 1, 2, 3}
    for lane in range(draw(st.integers(0, LANES - 1))):
        gpus = draw(st.sets(st.integers(0, 3), min_size=1))
        state = draw(st.sampled_from(["held", "yielded", "waiting"] if gpus <= free else ["yielded", "waiting"]))
        free -= gpus if state == "held" else set()
        times = {"held_s": draw(st.sampled_from([5.0, 500.0])) if state == "held" else 0.0}
        times["vtime_s"] = draw(st.sampled_from([0.0, 100.0, 900.0]))
        times["waited_s"] = 0.0 if state == "held" else draw(st.sampled_from([3.0, 300.0]))
        found.append(on(lane + 1, "a", *gpus, state=state, lane=lane, checkpoints=False, start_s=NOW - 1000.0, **times))
    return tuple(found), unasked(9, *draw(st.sets(st.integers(0, 3), min_size=1)), lane=LANES - 1)


@pytest.mark.parametrize("share", ORDERS)
@settings(max_examples=40)
@given(drawn=hosts(), between=st.booleans())
def test_a_job_that_has_not_asked_changes_no_turn_of_others_and_has_none(share, drawn, between):
    others, late = drawn
    nodes = host("a", lanes=LANES, jobs=(*others, late))
    alone = decide(share, *others, nodes=nodes, share_between_users=between)
    found = decide(share, *others, late, nodes=nodes, share_between_users=between)
    assert turns(found) == turns(alone)
    assert found.reasons[late.key].startswith(NOT_ASKED)


@pytest.mark.parametrize("share", ORDERS)
def test_once_it_asks_it_has_its_turn(share):
    holder = on(1, "a", 0, 1, held_s=500.0, vtime_s=500.0)
    late = unasked(2, 0, lane=1)
    asked = replace(late, lease=replace(late.lease, late=False, waited_s=1.0))
    nodes = host("a", jobs=(holder, late))
    assert not turns(decide(share, holder, late, nodes=nodes))
    long = replace(holder, progress=Progress(NOW, 90000.0, 5000.0, attained_s=5000.0, running=True))
    young = replace(asked, progress=Progress(NOW, 7200.0))
    found = turns(decide(share, long, young, nodes=nodes))
    assert found & {(Yield, key(1)), (Resume, key(2))}, "the other one makes way, or moves"


@pytest.mark.parametrize("late", [True, False])
def test_a_job_keeps_its_gpus_until_the_one_that_slurm_started_there_asks(late):
    """Before an agent knows a job, its start makes no other yield either."""
    long = replace(on(1, "a", 0, 1, 2, 3), progress=Progress(NOW, 90000.0, 5000.0, attained_s=5000.0, running=True))
    options = Options(late=late, checkpoints=True)
    size = {"gpus": 2, "cpus": 2, "memory_mb": 1000, "options": options, "submit_s": NOW}
    started = job(2, **size, nodes=("a-l1",), lease=None, start_s=NOW, progress=Progress(NOW))
    assert (Yield, key(1)) not in turns(decide("preemption", long, started, nodes=host("a", jobs=(long,))))


def test_why_names_the_process_that_was_seen_early():
    early = on(1, "a", 0, options=Options(late=True))
    early = replace(early, lease=replace(early.lease, early="a: pid 7 used GPU 0 before the job had asked"))
    reason = decide("preemption", early, nodes=host("a", jobs=(early,))).reasons[key(1)]
    assert "; a: pid 7 used GPU 0 before the job had asked: it waits at the start from now on" in reason


def test_a_late_job_of_several_nodes_waits_at_the_start():
    wide = job(1, options=Options(late=True), num_nodes=2, lease=None)
    assert not wide.starts_unleased
    assert replace(wide, num_nodes=1).starts_unleased


def test_a_holder_that_does_not_stop_keeps_its_place_from_a_job_that_has_not_asked():
    stuck = on(1, "a", 0, lane=1, held_s=9000.0)
    stuck = replace(stuck, lease=replace(stuck.lease, refusals=99))
    late = unasked(2, 0, lane=0)
    asked = replace(late, lease=replace(late.lease, late=False))
    nodes = host("a", jobs=(stuck, late))
    given_up = [
        [action.job for action in decide("timeslice", stuck, other, nodes=nodes).actions if isinstance(action, Migrate)]
        for other in (late, asked)
    ]
    assert given_up == [[], [key(1)]]
