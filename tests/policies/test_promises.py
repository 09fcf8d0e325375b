"""Pins of ours on jobs of Slurm's queue: kept while Slurm can start them there, else placed anew or ended.

No job is held: Slurm's limits, licenses, dependencies and requeues by others end what we wanted of a job.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from gandiva_rig import NOW, SHARING, held, host, key, of, on
from hypothesis import given
from hypothesis import strategies as st
from snapshots import cluster, job

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Place, Release, Requeue
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import LONG_END_S, ClusterSnapshot, Job, JobKey, Share
from cadenza.policies.core.move import Move, Over, Placed
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.state.pending import NOT_PLACED, REQUEUED, our_pins
from cadenza.policies.sharing.state.site_limits import Limits

RESERVED = "ReqNodeNotAvail, May be reserved for other job"
SHARES = ("gandiva", "timeslice")


def decide(snapshot: ClusterSnapshot, share: str, memory: Memory | None = None) -> Decision:
    settings = PolicySettings(frozenset({"gpu"}), sharing=replace(SHARING, floor=True), phased_moves=True)
    return build("fifo", "none", share, settings).decide(snapshot, memory or Memory())


def placed(number: int, *nodes: str, gpus: int = 1, **facts) -> Job:
    """A job that we have placed on these nodes, and that Slurm has still to start."""
    waits = {"required_nodes": nodes, "state_reason": "Resources"}
    return held(number, gpus, **{**waits, **facts})


def ending(number: int, where: str, gpus: int) -> Job:
    facts = {"gpus": gpus, "cpus": 6 * gpus, "memory_mb": 8000 * gpus}
    share = Share(where, gpus, 6 * gpus, 8000 * gpus)
    return job(number, state="OTHER", nodes=(where,), placement=(share,), lease=None, **facts)


def goals(decision: Decision) -> dict[int, tuple[str, ...]]:
    return {action.job.id: action.nodes for action in of(Place, decision)}


def unpinned(decision: Decision) -> dict[int, str]:
    assert all(action.unpin for action in of(Release, decision))
    return {action.job.id: action.reason for action in of(Release, decision)}


def changed(nodes, name: str, **facts):
    return tuple(replace(node, **facts) if node.name == name else node for node in nodes)


BROKEN = ({"up": False}, {"ending_s": LONG_END_S})


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("facts", BROKEN)
def test_a_lane_that_takes_no_jobs_gets_none_and_those_placed_there_are_placed_anew(share, facts):
    """The host's other lane goes on; without another place the pin ends, and its reason names the lane."""
    waits, memory = placed(1, "a-l1"), Memory(placed=frozenset({key(1)}))
    lanes = changed(host("a"), "a-l1", **facts)
    found = decide(cluster(waits, nodes=lanes), share, memory)
    assert goals(found) == {1: ("a",)}
    assert f"a-l1, where it was placed, {lanes[1].closed_reason}" in found.reasons[key(1)]
    assert goals(decide(cluster(waits, nodes=host("a")), share, memory)) == {}
    neither = tuple(replace(lane, **facts) for lane in lanes)
    stays = decide(cluster(waits, held(2), nodes=neither), share, memory)
    assert goals(stays) == {}
    assert unpinned(stays) == {1: f"a-l1, where it was placed, {neither[1].closed_reason}, so Slurm chooses its nodes"}
    assert "a-l1, where it was placed" in stays.reasons[key(1)]


@pytest.mark.parametrize("share", SHARES)
def test_only_our_own_placements_are_placed_anew(share):
    """A pin that we do not remember may be its owner's; a hold since then is; and a dependency is waited for."""
    lanes, memory = changed(host("a"), "a-l1", up=False), Memory(placed=frozenset({key(1)}))
    theirs = placed(1, "a-l1")
    assert goals(decide(cluster(theirs, nodes=lanes), share)) == {}
    assert goals(decide(cluster(replace(theirs, slurm_priority=0), nodes=lanes), share, memory)) == {}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("reason", [RESERVED, "Resources"])
def test_a_placed_job_keeps_its_gpus_while_an_earlier_one_ends_there(share, reason):
    """Its lane is full in Slurm's books until then; a job that comes later gets them on no lane."""
    leaves = ending(1, "a", 4)
    waits = placed(2, "a", gpus=4, state_reason=reason)
    ours = Memory(placed=frozenset({key(2)}))
    found = decide(cluster(leaves, waits, held(3, 4), nodes=host("a", lanes=1, jobs=(leaves,))), share, ours)
    assert goals(found) == unpinned(found) == {}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "facts",
    [
        *({"state_reason": reason} for reason in ("AssocGrpGRES", "QOSMaxGRESPerUser", "Licenses", "Dependency")),
        {"state_reason": "JobArrayTaskLimit"},
        {"state_reason": "BeginTime", "eligible_s": NOW + 86_400.0},
    ],
)
def test_a_pin_ends_when_slurm_says_that_its_job_waits_for_something_else(share, facts):
    """Its owner's dependency or start time may be days away, an account may stay at its limit for good."""
    ours, one = Memory(placed=frozenset({key(1)})), {"user": "bob", "account": "other"}
    waits = placed(1, "a", gpus=4, **facts, **one)
    found = decide(cluster(waits, held(2, 4), nodes=host("a", lanes=1)), share, ours)
    assert goals(found) == {2: ("a",)}, "it has no claim on its nodes"
    assert unpinned(found) == {1: f"waits in Slurm ({facts['state_reason']}), so it has no claim on a any more"}
    assert found.reasons[key(1)] == unpinned(found)[1]
    assert unpinned(decide(cluster(waits, nodes=host("a")), share)) == {}, "the pin may be its owner's"


@pytest.mark.parametrize("share", SHARES)
def test_a_pinned_job_that_may_start_in_a_moment_keeps_its_claim(share):
    soon, ours = placed(1, "a", gpus=4, state_reason="BeginTime", eligible_s=NOW + 1.0), Memory(placed={key(1)})
    found = decide(cluster(soon, held(2, 4), nodes=host("a", lanes=1)), share, ours)
    assert goals(found) == unpinned(found) == {}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("gone", ["placed", "departed"])
def test_a_pin_ends_with_its_incarnation(share, gone):
    """Slurm keeps the nodes of a job that it requeues, as from a host that was lost, or that its owner requeues."""
    first = Memory(placed={key(1)}) if gone == "placed" else Memory(departed={key(1): NOW - 5})
    again = replace(placed(1, "b", gpus=4), key=JobKey(1, 1))
    found = decide(cluster(again, held(2, 4), nodes=(*host("a", lanes=1), *host("b", lanes=1))), share, first)
    assert unpinned(found) == {1: REQUEUED}
    assert 1 not in goals(found), "in the next round"
    theirs = Memory(placed={JobKey(1, 2)})
    assert unpinned(decide(cluster(again, nodes=host("b")), share, theirs)) == {}


def test_a_move_sees_to_its_own_pin():
    again = replace(placed(1, "b", gpus=1), key=JobKey(1, 1))
    share = Share("b", 1, 6, 8000)
    for phase in (Placed(NOW, NOW), Over(NOW, "went to b")):
        move = Move(key(1), (share,), "idle GPUs", phase)
        found = our_pins(cluster(again), Memory(placed={JobKey(1, 1)}, moves=(move,)))
        assert found == [], phase
    made_way = Move(key(1), (), "makes room", Over(NOW, "was requeued"))
    assert our_pins(cluster(again), Memory(placed={key(1)}, moves=(made_way,))) == [again], "that had no goal"


@pytest.mark.parametrize("share", SHARES)
def test_pins_end_where_the_service_chooses_no_nodes_any_more(share):
    waits, ours = placed(1, "a", gpus=4), Memory(placed={key(1)})
    settings = PolicySettings(frozenset({"gpu"}), sharing=replace(SHARING, floor=True, place=False))
    found = build("fifo", "none", share, settings).decide(cluster(waits, nodes=host("a")), ours)
    assert unpinned(found) == {1: NOT_PLACED}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("reason", "like", "other"),
    [
        ("AssocGrpGRES", {"account": "lab"}, {"account": "lab2"}),
        ("QOSGrpGRES", {"account": "x", "qos": "normal"}, {"qos": "high"}),
        ("QOSMaxGRESPerUser", {"account": "x"}, {"user": "bob"}),
        ("MaxGRESPerAccount", {"user": "bob"}, {"account": "lab2"}),
        ("AssocMaxJobsLimit", {}, {"user": "bob"}),
    ],
)
def test_who_is_at_a_limit_gets_no_further_placement(share, reason, like, other):
    """Slurm says Priority of jobs that it has not looked at yet, also of those that it would not start."""
    limited = held(1, 1, state_reason=reason)
    next_one, free = held(2, 4, state_reason="Priority", **like), held(3, 4, state_reason="Priority", **other)
    found = decide(cluster(limited, next_one, nodes=host("a")), share)
    assert goals(found) == {}
    assert found.reasons[key(2)] == f"waits in Slurm: a job before it has met a limit ({reason})"
    assert goals(decide(cluster(limited, free, nodes=host("a")), share)) == {3: ("a",)}
    looked_at = replace(next_one, state_reason="Resources")
    assert goals(decide(cluster(limited, looked_at, nodes=host("a")), share)) == {2: ("a",)}, "Slurm would start it"


@pytest.mark.parametrize("reason", ["QOSMaxGRESPerJob", "AssocMaxWallDurationPerJobLimit", "QOSMinGRES", "Dependency"])
def test_a_limit_on_one_job_binds_no_other(reason):
    limits = Limits([held(1, state_reason=reason)])
    assert not limits.reason(held(2, state_reason="Priority"))


@pytest.mark.parametrize("reason", ["Licenses", "JobArrayTaskLimit"])
def test_jobs_of_one_name_ask_for_the_same_licenses(reason):
    limits = Limits([held(1, state_reason=reason, name="train")])
    assert limits.reason(held(2, state_reason="Priority", name="train"))
    assert not limits.reason(held(3, state_reason="Priority", name="test"))


@pytest.mark.parametrize("share", SHARES)
def test_a_job_whose_owner_names_nodes_is_left_to_slurm(share):
    theirs = held(1, 1, required_nodes=("a",))
    found = decide(cluster(theirs, nodes=host("a")), share)
    assert goals(found) == unpinned(found) == {}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_job_is_placed_anew_once_slurm_has_given_its_place_to_another(share, state):
    """Slurm starts jobs of its queue by itself, and may start another one there first."""
    other, memory = on(1, "a", 0, 1, state=state), Memory(placed=frozenset({key(2)}))
    lanes = (*host("a", lanes=1, jobs=(other,)), *host("b", lanes=1))
    crowded = placed(2, "a", gpus=4)
    assert goals(decide(cluster(other, crowded, nodes=lanes), share, memory)) == {2: ("b",)}
    assert goals(decide(cluster(other, placed(2, "a", gpus=2), nodes=lanes), share, memory)) == {}, "it has room"
    assert goals(decide(cluster(other, crowded, nodes=lanes), share)) == {}, "the pin may be its owner's"
    there = decide(cluster(other, crowded, nodes=lanes[:1]), share, memory)
    assert "a, where it was placed, has been given to other jobs" in there.reasons[key(2)]


def test_a_pinned_job_of_two_hosts_keeps_no_gpus_of_one_while_the_other_takes_no_jobs():
    """A job that Slurm requeues from a lost host has the pins of its last start, which may be its owner's."""
    waits = placed(1, "a", "b", gpus=8, num_nodes=2, state_reason="ReqNodeNotAvail, UnavailableNodes:a")
    waits = replace(waits, key=JobKey(1, 1))
    lost = (*changed(host("a"), "a", up=False), *host("b"))
    ours = Memory(placed={JobKey(1, 1)})
    assert goals(decide(cluster(waits, held(2, 4), nodes=lost), "gandiva", ours)) == {2: ("b",)}
    both = (*host("a", lanes=1), *host("b", lanes=1))
    assert goals(decide(cluster(waits, held(2, 4), nodes=both), "gandiva", ours)) == {}


@st.composite
def clusters(draw) -> ClusterSnapshot:
    """Hosts of 4 GPUs with running jobs on lane 0, and held jobs that wait."""
    jobs: list[Job] = []
    nodes = []
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        sizes = draw(st.sampled_from(((), (1,), (2,), (1, 2), (4,), (2, 2))))
        first, there = 0, []
        for gpus in sizes:
            indices = range(first, first + gpus)
            there.append(on(len(jobs) + len(there) + 1, name, *indices, checkpoints=draw(st.booleans())))
            first += gpus
        jobs += there
        nodes += host(name, jobs=tuple(there))
    sizes = draw(st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=1, max_size=7))
    users = st.sampled_from(("ann", "bob"))
    jobs += [
        held(50 + number, gpus, user=draw(users), submit_s=NOW - draw(st.integers(0, 900)))
        for number, gpus in enumerate(sizes)
    ]
    return cluster(*jobs, nodes=tuple(nodes))


def started(snapshot: ClusterSnapshot, decision: Decision, reason: str) -> ClusterSnapshot:
    """Slurm's record once a round's actions have left: pinned, or not any more, and not yet started."""
    pins = goals(decision) | dict.fromkeys(unpinned(decision), ())
    jobs = (
        replace(one, required_nodes=pins[one.key.id], state_reason=reason) if one.key.id in pins else one
        for one in snapshot.jobs
    )
    return replace(snapshot, jobs=tuple(jobs))


@given(
    snapshot=clusters(),
    share=st.sampled_from(SHARES),
    reasons=st.lists(st.sampled_from(("", "Resources", "Priority", RESERVED, "AssocGrpGRES")), min_size=3, max_size=3),
)
def test_no_lane_is_promised_twice_and_no_job_is_held(snapshot, share, reasons):
    """Whatever Slurm says of the jobs that were pinned, over three rounds."""
    memory = Memory()
    for reason in reasons:
        decision = decide(snapshot, share, memory)
        assert not any(isinstance(action, Requeue) and action.hold for action in decision.actions)
        memory = remember(decision.memory, decision.actions, snapshot)
        snapshot = started(snapshot, decision, reason)
        pinned: Counter[str] = Counter()
        for one in snapshot.jobs:
            for name in one.required_nodes if one.state == "PENDING" else ():
                pinned[name] += one.gpus
        for node in snapshot.nodes:
            assert node.gpus_used + pinned[node.name] <= node.gpus, "a lane has its jobs' GPUs once"
    stuck = {one.key for one in snapshot.jobs if one.required_nodes and one.state_reason == "AssocGrpGRES"}
    ended = {action.job for action in decide(snapshot, share, memory).actions if isinstance(action, Release)}
    assert stuck <= ended
