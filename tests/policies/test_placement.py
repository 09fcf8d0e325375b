"""Held admission: the steps of Gandiva's Algorithm 1, lanes as height, capacity, and order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import NOW, cluster, job, key, node

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Options
from cadenza.policies.sharing.pipeline import Pipeline
from cadenza.policies.sharing.placement.affinity import list_pending, place_pending
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.turns.slurm_sync import explain

HELD = SharingSettings(enforce=True, admission="held", max_priority=10, partitions=frozenset({"gpu"}))


def held(number: int, gpus: int = 1, priority: int = 0, **facts):
    waits = {"state": "PENDING", "slurm_priority": 0, "held_by_plugin": True}
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


def placed(*jobs, nodes, memory=None, rules=HELD, dead=()):
    found = place(cluster(*jobs, nodes=nodes, dead=dead), memory or Memory(), rules)
    return {action.job.id: action.nodes for action in found.actions}


def test_step_1_a_host_of_its_class_with_free_gpus_the_least_loaded():
    nodes = (*lanes("a", 0, 0), *lanes("b", 2, 0), *lanes("c", 1, 0))
    jobs = (running(1, 1, "b"), running(2, 1, "b"), running(3, 1, "c"))
    assert placed(*jobs, held(9), nodes=nodes) == {9: ("c",)}


def test_step_1_means_free_gpus_and_not_an_empty_server():
    """As printed, ceil(M / N) < 1 would send this job to the empty host."""
    nodes = (*lanes("a", 0, 0), *lanes("b", 3, 0))
    assert placed(*(running(n, 1, "b") for n in range(3)), held(9), nodes=nodes) == {9: ("b",)}


def test_step_2_a_host_without_a_class():
    nodes = (*lanes("a", 2, 0), *lanes("b", 0, 0))
    assert placed(running(1, 2, "a"), held(9), nodes=nodes) == {9: ("b",)}


def test_step_3_any_host_with_free_gpus():
    nodes = (*lanes("a", 2, 0), *lanes("b", 4, 0))
    jobs = (running(1, 2, "a"), *(running(n, 1, "b") for n in range(2, 6)))
    assert placed(*jobs, held(9), nodes=nodes) == {9: ("a",)}


def test_step_4_takes_turns_on_the_least_loaded_host_of_its_class():
    nodes = (*lanes("a", 4, 4), *lanes("b", 4, 0), *lanes("c", 4, 0))
    jobs = (running(1, 4, "a"), running(2, 4, "a-l1"), running(3, 4, "b"), running(4, 2, "c"))
    assert placed(*jobs, held(9, 4), nodes=nodes) == {9: ("b-l1",)}


def test_step_4_needs_jobs_that_can_take_turns():
    nodes = lanes("a", 4, 0)
    for there, rules in (
        (running(1, 4, "a", user="bob"), HELD),
        (running(1, 4, "a", options=None), replace(HELD, share_between_users=True)),
        (running(1, 4, "a", partition="cpu"), HELD),
    ):
        assert placed(there, held(9, 4), nodes=nodes, rules=rules) == {}
    shared = replace(HELD, share_between_users=True)
    assert placed(running(1, 4, "a", user="bob"), held(9, 4), nodes=nodes, rules=shared) == {9: ("a-l1",)}


def test_else_it_stays_queued_with_a_reason():
    found = place(cluster(running(1, 4, "a"), held(9, 4), nodes=lanes("a", 4, 4)), Memory(), HELD)
    assert found.actions == ()
    assert found.reasons[key(9)].startswith("stays queued: 0 of 1 hosts have 4 free GPUs")


def test_a_job_that_free_gpus_are_no_use_to_hears_what_it_lacks():
    short = place(cluster(held(9), nodes=lanes("a", 0, 0, memory_used_mb=95_000)), Memory(), HELD)
    assert short.reasons[key(9)].startswith(
        "stays queued: 0 of 1 hosts have 1 free GPUs and room for it "
        "(a host has GPUs for it, but too little free memory in its lanes), and too few"
    )


def test_a_job_of_several_nodes_gets_one_lane():
    nodes = (*lanes("a", 0, 0), *lanes("b", 0, 0))
    assert placed(held(9, 8, num_nodes=2), nodes=nodes) == {9: ("a", "b")}
    full = (*lanes("a", 4, 0), *lanes("b", 4, 0))
    there = running(1, 8, "a", "b")
    assert placed(there, held(9, 8, num_nodes=2), nodes=full) == {9: ("a-l1", "b-l1")}
    uneven = (*lanes("a", 4, 4, 0), *lanes("b", 4, 0, 4))
    assert placed(there, held(9, 8, num_nodes=2), nodes=uneven) == {}


def test_each_job_sees_those_placed_before_it():
    nodes = lanes("a", 0, 0)
    first, second, urgent = held(7, 4, submit_s=NOW - 5), held(8, 4), held(9, 4, priority=1)
    found = placed(first, second, urgent, nodes=nodes)
    assert found == {9: ("a",), 8: ("a-l1",)}


def test_cpus_memory_drains_and_dead_agents_count():
    assert placed(held(9, cpus=25), nodes=lanes("a", 0, 0)) == {}
    assert placed(held(9), nodes=lanes("a", 0, 0, memory_used_mb=95_000)) == {}
    assert placed(held(9), nodes=lanes("a", 0, 0, drained=True)) == {}
    assert placed(held(9), nodes=lanes("a", 0, 0, up=False)) == {}
    assert placed(held(9), nodes=lanes("a", 0, 0), dead=("a",)) == {}


def test_a_hold_after_our_release_is_its_owners():
    nodes = lanes("a", 0, 0)
    later = replace(held(9), held_by_plugin=False)
    assert placed(later, nodes=nodes, memory=Memory(placed=frozenset({key(9)}))) == {}
    assert placed(held(9), nodes=nodes, rules=replace(HELD, admission="native")) == {}
    assert placed(held(9), nodes=nodes, rules=replace(HELD, enforce=False)) == {}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.integers(1, 2), st.integers(0, 2)), max_size=12),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_lanes_are_never_overfilled_and_the_order_changes_nothing(asks, depth, shuffler):
    nodes = tuple(lane for name in "abc" for lane in lanes(name, *[0] * depth))
    jobs = [held(n, g * count, num_nodes=count, priority=p) for n, (g, count, p) in enumerate(asks)]
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
