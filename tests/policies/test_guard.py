"""Each rule of the guard, their order, and the actions that it must never let through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import cluster, job, key, lease, node

from cadenza.policies.core.actions import (
    DrainNode,
    OpenNode,
    Place,
    Release,
    Requeue,
    Resume,
    Suspend,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Options
from cadenza.policies.guard import GuardSettings, guard

APPLY = GuardSettings(enforce=True, partitions=frozenset({"gpu"}))
RUNS = job(1, lease=lease("held", 0, held_s=20.0))


def word(action, *jobs, rules=APPLY, memory=None, nodes=None) -> str:
    (judged,) = guard([action], cluster(*jobs, nodes=nodes), memory or Memory(), rules)
    assert judged.allowed == (not judged.reason)
    return judged.reason.partition(":")[0]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, ""),
        ({"enforce": False}, "observe-only"),
        ({"killed": True, "partitions": frozenset()}, "kill switch"),
        ({"partitions": frozenset()}, "allow-list"),
        ({"accounts": frozenset({"other"})}, "allow-list"),
        ({"qos": frozenset({"other"})}, "allow-list"),
        ({"users": frozenset({"bob"})}, "allow-list"),
        ({"users": frozenset({"ann", "bob"})}, ""),
        ({"max_actions_per_round": 0, "min_run_s": 99.0}, "rate limit"),
        ({"min_run_s": 99.0, "enforce": False}, "minimum run time"),
    ],
)
def test_the_first_rule_that_blocks_is_named(changes, rule):
    assert word(Yield(key(1), ""), RUNS, rules=replace(APPLY, **changes)) == rule


def test_only_jobs_that_opted_in():
    for facts in ({"options": None}, {"options": Options(share=False)}, {"unmanageable": "is a cron job"}):
        assert word(Suspend(key(1), ""), replace(RUNS, **facts)) == "opt-in"
    assert word(Suspend(key(8), ""), RUNS) == "scope"


def test_minimum_run_time_gives_way_to_priority_and_unmanaged_jobs():
    young = replace(RUNS, lease=lease("held", 0, held_s=1.0))
    assert word(Yield(key(1), ""), young) == "minimum run time"
    assert word(Resume(key(1), ""), young) == ""
    higher = job(2, options=Options(priority=1), lease=lease("yielded", 0))
    unmanaged = job(2, options=None, lease=lease("waiting", 0, exclusive=True))
    for other in (higher, unmanaged):
        assert word(Yield(key(1), ""), young, other) == ""
        elsewhere = replace(other, lease=replace(other.lease, gpus=lease("waiting", 3).gpus))
        assert word(Yield(key(1), ""), young, elsewhere) == "minimum run time"


def test_what_undoes_our_own_doing_passes_all_but_the_kill_switch():
    shut = replace(APPLY, enforce=False, partitions=frozenset(), max_actions_per_round=0)
    asleep = job(1, state="SUSPENDED", options=None)
    held = job(2, state="PENDING", slurm_priority=0, held_at_restart=True)
    ours = Memory(suspended=frozenset({key(1)}))
    assert word(Unsuspend(key(1), ""), asleep, memory=ours, rules=shut) == ""
    assert word(Release(key(2), ""), held, rules=shut) == ""
    assert word(DrainNode("node1-l1", ""), rules=shut) == ""
    assert word(Unsuspend(key(1), ""), asleep, rules=shut) == "allow-list"
    assert word(Release(key(2), ""), held, memory=Memory(placed=frozenset({key(2)}))) == ""
    assert word(DrainNode("node1-l1", ""), rules=replace(shut, killed=True)) == "kill switch"


def test_nodes_are_opened_only_where_the_drain_is_ours_and_lane_0_never():
    ours = node(lane=1, drained=True, drain_reason="cadenza: observe-only")
    theirs = node(lane=2, drained=True, drain_reason="fan")
    nodes = (node(), ours, theirs)
    assert word(OpenNode("node1-l1", ""), nodes=nodes) == ""
    assert word(OpenNode("node1-l2", ""), nodes=nodes) == "scope"
    assert word(OpenNode("node1", ""), nodes=nodes) == "scope"
    assert word(DrainNode("node1", ""), nodes=nodes) == "scope"
    assert word(OpenNode("node9", ""), nodes=nodes) == "scope"
    assert word(OpenNode("node1-l1", ""), nodes=nodes, rules=replace(APPLY, enforce=False)) == "observe-only"


def test_a_drain_of_slurms_own_at_a_restart_is_undone_in_managed_partitions_only():
    slurms = node(drained=True, drain_reason="Prolog error", drained_at_restart=True)
    opens = OpenNode("node1", "", drain="Prolog error")
    assert word(opens, nodes=(slurms,)) == ""
    assert word(opens, nodes=(replace(slurms, partitions=("gpu", "short")),)) == "scope"
    assert word(opens, nodes=(replace(slurms, drained_at_restart=False),)) == "scope"
    assert word(opens, nodes=(slurms,), rules=replace(APPLY, enforce=False)) == "observe-only"
    assert word(DrainNode("node1", ""), nodes=(slurms,)) == "scope"


def test_the_rate_limit_counts_what_would_leave():
    jobs = [replace(RUNS, key=key(n)) for n in range(5)]
    actions = [Yield(found.key, "") for found in jobs]
    actions.insert(0, Yield(key(99), ""))
    for enforce in (True, False):
        rules = replace(APPLY, max_actions_per_round=2, enforce=enforce)
        judged = guard(actions, cluster(*jobs), Memory(), rules)
        assert [item.reason.startswith("rate limit") for item in judged] == [0, 0, 0, 1, 1, 1]


def action_for(target):
    kinds = (Yield, Resume, Suspend, Unsuspend, Release)
    return st.one_of(
        *(st.just(kind(target, "why")) for kind in kinds),
        st.just(Requeue(target, hold=False, reason="why")),
        st.just(Place(target, ("node1",), "why")),
    )


cases = st.lists(
    st.tuples(
        st.sampled_from(("gpu", "cpu")),
        st.sampled_from((None, Options(), Options(share=False))),
        st.sampled_from(("", "is a cron job")),
        st.sampled_from(("RUNNING", "PENDING", "SUSPENDED")),
        st.booleans(),
        st.booleans(),
        st.integers(0, 6).flatmap(lambda n: action_for(key(n))),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=100, deadline=None)
@given(cases, st.booleans())
def test_no_action_leaves_for_a_job_that_is_not_managed(rows, enforce):
    jobs = [
        job(n, partition=part, options=opts, unmanageable=bad, state=state, slurm_priority=0, held_at_restart=ours)
        for n, (part, opts, bad, state, _, ours, _) in enumerate(rows)
    ]
    memory = Memory(suspended=frozenset(key(n) for n, row in enumerate(rows) if row[4]))
    by_key = {found.key: found for found in jobs}
    for item in guard([row[6] for row in rows], cluster(*jobs), memory, replace(APPLY, enforce=enforce)):
        if not item.allowed:
            assert item.reason
            continue
        found = by_key[item.action.job]
        ours = isinstance(item.action, Unsuspend) and found.key in memory.suspended
        ours |= isinstance(item.action, Release) and found.held and found.held_at_restart
        assert ours or (enforce and found.opted_in and found.partition == "gpu")
