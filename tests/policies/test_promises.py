"""Places that jobs were promised: kept while Slurm can start them there, else placed anew, and never given twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from gandiva_rig import NOW, SHARING, held, host, key, of, on
from hypothesis import given
from hypothesis import strategies as st
from snapshots import cluster, job

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Place
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import LONG_END_S, ClusterSnapshot, Job, JobKey, Share

RESERVED = "ReqNodeNotAvail, May be reserved for other job"
SHARES = ("preemption", "gandiva", "timeslice")


def decide(snapshot: ClusterSnapshot, share: str, memory: Memory | None = None) -> Decision:
    order = "levels" if share == "preemption" else "fifo"
    settings = PolicySettings(frozenset({"gpu"}), sharing=replace(SHARING, floor=True), phased_moves=True)
    return build(order, "none", share, settings).decide(snapshot, memory or Memory())


def placed(number: int, *nodes: str, gpus: int = 1, **facts) -> Job:
    """A job that we have placed on these nodes, and that Slurm has still to start."""
    waits = {"slurm_priority": 1, "held_by_plugin": False, "required_nodes": nodes, "state_reason": "Resources"}
    return held(number, gpus, **{**waits, **facts})


def ending(number: int, where: str, gpus: int) -> Job:
    facts = {"gpus": gpus, "cpus": 6 * gpus, "memory_mb": 8000 * gpus}
    share = Share(where, gpus, 6 * gpus, 8000 * gpus)
    return job(number, state="OTHER", nodes=(where,), placement=(share,), lease=None, **facts)


def goals(decision: Decision) -> dict[int, tuple[str, ...]]:
    return {action.job.id: action.nodes for action in of(Place, decision)}


def changed(nodes, name: str, **facts):
    return tuple(replace(node, **facts) if node.name == name else node for node in nodes)


BROKEN = ({"up": False}, {"ending_s": LONG_END_S})


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("facts", BROKEN)
def test_a_lane_that_takes_no_jobs_gets_none_and_those_placed_there_are_placed_anew(share, facts):
    """The host's other lane goes on; without another place the job stays pinned, and its reason names the lane."""
    waits, memory = placed(1, "a-l1"), Memory(placed=frozenset({key(1)}))
    lanes = changed(host("a"), "a-l1", **facts)
    found = decide(cluster(waits, nodes=lanes), share, memory)
    assert goals(found) == {1: ("a",)}
    assert f"a-l1, where it was placed, {lanes[1].closed_reason}" in found.reasons[key(1)]
    assert goals(decide(cluster(waits, nodes=host("a")), share, memory)) == {}
    neither = tuple(replace(lane, **facts) for lane in lanes)
    stays = decide(cluster(waits, held(2), nodes=neither), share, memory)
    assert goals(stays) == {}
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
    for memory in (ours, Memory()) if reason == RESERVED else (ours,):
        found = decide(cluster(leaves, waits, held(3, 4), nodes=host("a", lanes=1, jobs=(leaves,))), share, memory)
        assert goals(found) == {}
        lanes = host("a", jobs=(leaves,))
        if share == "preemption":
            assert goals(decide(cluster(leaves, waits, held(3, 4), nodes=lanes), share, memory)) == {}
            done = decide(cluster(waits, held(3, 4), nodes=host("a")), share, memory)
            assert goals(done) == {}


def test_a_pinned_job_that_waits_for_something_else_has_no_claim():
    """Its owner's dependency or start time may be days away."""
    for facts in ({"state_reason": "Dependency"}, {"state_reason": "BeginTime", "eligible_s": NOW + 86_400.0}):
        waits = placed(1, "a", gpus=4, **facts)
        assert goals(decide(cluster(waits, held(2, 4), nodes=host("a")), "preemption")) == {2: ("a",)}
    soon = placed(1, "a", gpus=4, state_reason="BeginTime", eligible_s=NOW + 1.0)
    assert goals(decide(cluster(soon, held(2, 4), nodes=host("a")), "preemption")) == {}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_job_is_placed_anew_once_slurm_has_given_its_place_to_a_job_that_was_not_held(share, state):
    """A job that was submitted while the service was away is in Slurm's own queue, and may be first there."""
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
    assert goals(decide(cluster(waits, held(2, 4), nodes=lost), "preemption")) == {2: ("b",)}
    assert goals(decide(cluster(waits, held(2, 4), nodes=(*host("a"), *host("b"))), "preemption")) == {}


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
    """Slurm's record once the placements have left: released and pinned, not yet started."""
    pins = goals(decision)
    facts = {"slurm_priority": 1, "held_by_plugin": False, "state_reason": reason}
    jobs = (
        replace(one, required_nodes=pins[one.key.id], **facts) if one.key.id in pins else one for one in snapshot.jobs
    )
    return replace(snapshot, jobs=tuple(jobs))


@given(snapshot=clusters(), reason=st.sampled_from(("", "Resources", "Priority", RESERVED, "BeginTime")))
def test_a_service_that_lost_its_memory_promises_nothing_twice(snapshot, reason):
    """Slurm's books and required nodes say what is promised: after three rounds, each with an empty memory."""
    again = snapshot
    for _ in range(3):
        again = started(again, decide(again, "preemption"), reason)
    pinned: Counter[str] = Counter()
    promised: Counter[str] = Counter()
    for one in again.jobs:
        for name in one.required_nodes if one.state == "PENDING" else ():
            pinned[name] += one.gpus
            promised[name.removesuffix("-l1")] += one.gpus
    for node in again.nodes:
        assert node.gpus_used + pinned[node.name] <= node.gpus, "a lane has its jobs' GPUs once"
        assert promised[node.host] <= node.gpus, "a GPU is promised to one job that has not started"
