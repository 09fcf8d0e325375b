"""Placement: the steps of Gandiva's Algorithm 1, lanes as height, capacity, and order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Options
from cadenza.policies.sharing.pipeline import Pipeline
from cadenza.policies.sharing.placement.affinity import list_pending, place_pending
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.turns.reasons import explain

PLACES = SharingSettings(enforce=True, place=True, max_priority=10, partitions=frozenset({"gpu"}))


def waiting(number: int, gpus: int = 1, priority: int = 0, **facts):
    waits = {"state": "PENDING", "state_reason": "Resources"}
    return job(number, gpus=gpus, options=Options(priority=priority), **{**waits, **facts})


def running(number: int, gpus: int, *nodes: str, **facts):
    return job(number, gpus=gpus, nodes=nodes, num_nodes=len(nodes), **facts)


def lanes(name: str, *used: int, **facts):
    """A host whose lanes have this many GPUs in use."""
    return tuple(node(name, lane, gpus_used=count, **facts) for lane, count in enumerate(used))


def place(snapshot, memory, rules):
    """Decide with placement alone; Slurm's allocation is a floor, so jobs count with what they asked for."""
    stages = (list_pending, place_pending, explain)
    return Pipeline(stages, replace(rules, floor=True)).decide(snapshot, memory)


def placed(*jobs, nodes, memory=None, rules=PLACES, dead=()):
    found = place(cluster(*jobs, nodes=nodes, dead=dead), memory or Memory(), rules)
    return {action.job.id: action.nodes for action in found.actions}


def test_step_1_a_host_of_its_class_with_free_gpus_the_least_loaded():
    nodes = (*lanes("a", 0, 0), *lanes("b", 2, 0), *lanes("c", 1, 0))
    jobs = (running(1, 1, "b"), running(2, 1, "b"), running(3, 1, "c"))
    assert placed(*jobs, waiting(9), nodes=nodes) == {9: ("c",)}


def test_step_1_means_free_gpus_and_not_an_empty_server():
    """As printed, ceil(M / N) < 1 would send this job to the empty host."""
    nodes = (*lanes("a", 0, 0), *lanes("b", 3, 0))
    assert placed(*(running(n, 1, "b") for n in range(3)), waiting(9), nodes=nodes) == {9: ("b",)}


def test_step_2_a_host_without_a_class():
    nodes = (*lanes("a", 2, 0), *lanes("b", 0, 0))
    assert placed(running(1, 2, "a"), waiting(9), nodes=nodes) == {9: ("b",)}


def test_step_3_any_host_with_free_gpus():
    nodes = (*lanes("a", 2, 0), *lanes("b", 4, 0))
    jobs = (running(1, 2, "a"), *(running(n, 1, "b") for n in range(2, 6)))
    assert placed(*jobs, waiting(9), nodes=nodes) == {9: ("a",)}


def test_step_4_takes_turns_on_the_least_loaded_host_of_its_class():
    nodes = (*lanes("a", 4, 4), *lanes("b", 4, 0), *lanes("c", 4, 0))
    jobs = (running(1, 4, "a"), running(2, 4, "a-l1"), running(3, 4, "b"), running(4, 2, "c"))
    assert placed(*jobs, waiting(9, 4), nodes=nodes) == {9: ("b-l1",)}


def test_step_4_needs_jobs_that_can_take_turns():
    nodes = lanes("a", 4, 0)
    for there, rules in (
        (running(1, 4, "a", user="bob"), PLACES),
        (running(1, 4, "a", options=None), replace(PLACES, share_between_users=True)),
        (running(1, 4, "a", partition="cpu"), PLACES),
    ):
        assert placed(there, waiting(9, 4), nodes=nodes, rules=rules) == {}
    shared = replace(PLACES, share_between_users=True)
    assert placed(running(1, 4, "a", user="bob"), waiting(9, 4), nodes=nodes, rules=shared) == {9: ("a-l1",)}


@pytest.mark.parametrize(
    ("nodes", "stuck", "refusals", "goes"), [(1, 1, 2, 1), (1, 1, 3, 0), (1, 2, 3, 1), (2, 1, 2, 1), (2, 2, 3, 0)]
)
def test_step_4_leaves_out_the_gpus_of_a_job_that_cannot_be_stopped(nodes, stuck, refusals, goes):
    """Of each host jobs have GPUs 0 and 1, and 2 and 3; a newcomer would get the first two of a further lane."""
    hosts = (*lanes("a", 4, 0), *lanes("b", 4, 0))[: 2 * nodes]
    there = [
        running(number, 2, name, lease=lease("held", *gpus, hosts=(name,), refusals=refusals * (number == stuck)))
        for number, name, gpus in ((1, "a", (0, 1)), (2, "a", (2, 3)), (3, "b", (0, 1)), (4, "b", (2, 3)))[: 2 * nodes]
    ]
    assert len(placed(*there, waiting(9, 2 * nodes, num_nodes=nodes), nodes=hosts)) == goes


def test_else_it_stays_queued_with_a_reason():
    found = place(cluster(running(1, 4, "a"), waiting(9, 4), nodes=lanes("a", 4, 4)), Memory(), PLACES)
    assert found.actions == ()
    assert found.reasons[key(9)].startswith("stays queued: 0 of 1 hosts have 4 free GPUs")


def test_a_job_that_free_gpus_are_no_use_to_hears_what_it_lacks():
    short = place(cluster(waiting(9), nodes=lanes("a", 0, 0, memory_used_mb=95_000)), Memory(), PLACES)
    assert short.reasons[key(9)].startswith(
        "stays queued: 0 of 1 hosts have 1 free GPUs and room for it "
        "(a host has GPUs for it, but too little free memory in its lanes), and too few"
    )


def test_a_job_of_several_nodes_gets_one_lane():
    nodes = (*lanes("a", 0, 0), *lanes("b", 0, 0))
    assert placed(waiting(9, 8, num_nodes=2), nodes=nodes) == {9: ("a", "b")}
    full = (*lanes("a", 4, 0), *lanes("b", 4, 0))
    there = running(1, 8, "a", "b")
    assert placed(there, waiting(9, 8, num_nodes=2), nodes=full) == {9: ("a-l1", "b-l1")}
    uneven = (*lanes("a", 4, 4, 0), *lanes("b", 4, 0, 4))
    assert placed(there, waiting(9, 8, num_nodes=2), nodes=uneven) == {}


def test_each_job_sees_those_placed_before_it():
    nodes = lanes("a", 0, 0)
    first, second, urgent = waiting(7, 4, submit_s=NOW - 5), waiting(8, 4), waiting(9, 4, priority=1)
    found = placed(first, second, urgent, nodes=nodes)
    assert found == {9: ("a",), 8: ("a-l1",)}


def test_cpus_memory_drains_and_dead_agents_count():
    assert placed(waiting(9, cpus=25), nodes=lanes("a", 0, 0)) == {}
    assert placed(waiting(9), nodes=lanes("a", 0, 0, memory_used_mb=95_000)) == {}
    assert placed(waiting(9), nodes=lanes("a", 0, 0, drained=True)) == {}
    assert placed(waiting(9), nodes=lanes("a", 0, 0, up=False)) == {}
    assert placed(waiting(9), nodes=lanes("a", 0, 0), dead=("a",)) == {}


def test_only_jobs_that_lack_free_resources_are_placed():
    nodes = lanes("a", 0, 0)
    assert placed(waiting(9, slurm_priority=0, state_reason="JobHeldUser"), nodes=nodes) == {}
    for reason in ("Dependency", "BeginTime", "Licenses", "AssocGrpGRES", "ReqNodeNotAvail"):
        assert placed(waiting(9, state_reason=reason), nodes=nodes) == {}
    for reason in ("", "None", "Priority", "Resources"):
        assert placed(waiting(9, state_reason=reason), nodes=nodes) == {9: ("a",)}
    assert placed(waiting(9), nodes=nodes, rules=replace(PLACES, place=False)) == {}
    assert placed(waiting(9), nodes=nodes, rules=replace(PLACES, enforce=False)) == {}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.integers(1, 2), st.integers(0, 2)), max_size=12),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_lanes_are_never_overfilled_and_the_order_changes_nothing(asks, depth, shuffler):
    nodes = tuple(lane for name in "abc" for lane in lanes(name, *[0] * depth))
    jobs = [waiting(n, g * count, num_nodes=count, priority=p) for n, (g, count, p) in enumerate(asks)]
    found = placed(*jobs, nodes=nodes)
    used = dict.fromkeys((lane.name for lane in nodes), 0)
    for number, where in found.items():
        share = jobs[number].gpus // jobs[number].num_nodes
        assert len({name.split("-")[-1] if "-" in name else "l0" for name in where}) == 1
        for name in where:
            used[name] += share
    assert all(count <= 4 for count in used.values())
    shuffler.shuffle(jobs)
    assert placed(*jobs, nodes=nodes) == found
