"""Lanes on demand in the policies: which are drained, removed and opened, and the jobs that wait for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import NOW, cluster, job, key, lease, node

from cadenza.policies.core.actions import DrainNode, OpenNode, Release, RemoveNode, WeighNode
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Host, Progress
from cadenza.policies.guard import GuardSettings, guard
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.sharing.turns.lanes import lane_actions

APPLY = SharingSettings(enforce=True, partitions=frozenset({"gpu"}), max_priority=10)
OBSERVE = replace(APPLY, enforce=False)
RULES = GuardSettings(partitions=frozenset({"gpu"}), enforce=True)
LANE = node(lane=1, dynamic=True)
HAD = Progress(at_s=NOW, attained_s=200.0)
SHUT = replace(LANE, drained=True, drain_reason="cadenza: the lane is not wanted any more")


def acts(*jobs, lane=LANE, lanes=0, memory=None, settings=APPLY, killed=False):
    """Return (kind, subject) of the actions that leave where the host is to have so many further lanes."""
    found, memory = cluster(*jobs, nodes=(node(), lane)), memory or Memory()
    found = replace(found, hosts=tuple(replace(host, further_lanes=lanes) for host in found.hosts))
    stages = stages_of("timeslice", settings, GandivaSettings(), allocates=False)
    decision = Pipeline(stages, replace(settings, floor=True)).decide(found, memory)
    rules = GuardSettings(partitions=frozenset({"gpu"}), enforce=settings.enforce, killed=killed)
    leave = [one.action for one in guard(decision.actions, found, memory, rules) if one.allowed]
    return [(type(action), getattr(action, "node", None) or action.job) for action in leave]


@pytest.mark.parametrize("settings", [APPLY, OBSERVE])
def test_a_lane_that_is_not_wanted_is_drained_and_then_removed(settings):
    assert acts(settings=settings) == [(DrainNode, "node1-l1")]
    assert acts(lane=SHUT, settings=settings) == [(RemoveNode, "node1-l1")]
    assert acts(lane=SHUT, settings=settings, killed=True) == []


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "OTHER"])
def test_a_lane_with_a_job_of_any_state_stays(state):
    assert acts(job(1, state=state, nodes=("node1-l1",)), lane=SHUT) == []


def test_a_lane_stays_for_a_job_that_was_placed_there_and_has_not_started():
    placed = job(1, state="PENDING", required_nodes=("node1-l1",), options=None)
    assert acts(placed, lane=SHUT, memory=Memory(placed=frozenset({key(1)}))) == []
    assert acts(placed, lane=SHUT) == [(RemoveNode, "node1-l1")], "its owner's own wish does not keep the lane"


def test_a_lane_that_is_wanted_stays_and_opens_again():
    assert acts(lanes=1) == []
    assert acts(lane=SHUT, lanes=1) == [(OpenNode, "node1-l1")]
    assert acts(lane=node(lane=2, dynamic=True), lanes=1) == [(DrainNode, "node1-l2")]


def test_a_lane_of_slurm_conf_is_never_removed():
    static = replace(SHUT, dynamic=False)
    assert acts(lane=static, settings=OBSERVE) == acts(lane=node(lane=1)) == []
    found, rules = cluster(nodes=(node(), static)), GuardSettings(enforce=True, partitions=frozenset({"gpu"}))
    (judged,) = guard([RemoveNode("node1-l1", "r")], found, Memory(), rules)
    assert not judged.allowed


def test_the_memory_forgets_the_drain_of_a_removed_lane():
    memory = Memory(drained=frozenset({"node1-l1"}))
    after = remember(memory, [RemoveNode("node1-l1", "r")], cluster(nodes=(node(), SHUT)))
    assert after.drained == frozenset()


WAITS = job(1, state="PENDING", slurm_priority=0, state_reason="BadConstraints", required_nodes=("node1-l1",))


def test_a_job_that_needs_a_lane_is_released_once_it_is_there_again():
    by_feature = replace(WAITS, required_nodes=(), barred=frozenset({"node1"}))
    for waiting in (WAITS, by_feature):
        assert acts(waiting, lanes=1) == [(Release, key(1))]
        assert acts(waiting, lane=SHUT, lanes=1) == [(OpenNode, "node1-l1")], "the lane is shut yet"
        assert acts(waiting, lane=node("node2"), lanes=1) == [], "the lane is not there yet"


@pytest.mark.parametrize(
    "change",
    [
        {"state_reason": "JobHeldUser"},
        {"required_nodes": ("node1-l1", "node2-l1")},
        {"required_nodes": ()},
        {"barred": frozenset({"node1-l1"})},
    ],
)
def test_a_job_that_slurm_or_its_owner_holds_for_another_reason_stays_held(change):
    """Among them: one of two lanes is there; lane 0 would do, so that the cause is another one; it may not have it."""
    assert acts(replace(WAITS, **change), lanes=1) == []


def test_a_lane_over_jobs_that_have_had_more_weighs_less():
    """Slurm starts the next job there: those of the lowest level keep their GPUs longest."""
    lanes = tuple(
        node(name, lane, dynamic=True, weight=1 + 100 * lane) for name in ("node2", "node1") for lane in (1, 2)
    )
    wanted = tuple(Host(name, agent_alive=True, further_lanes=2) for name in ("node1", "node2"))
    long = job(1, gpus=4, progress=HAD, lease=lease("held", 0, 1, 2, 3))
    short = job(2, nodes=("node2",), progress=HAD, lease=lease("held", 0, hosts=("node2",)))
    found = replace(cluster(long, short, nodes=(node(), node("node2"), *lanes)), hosts=wanted)
    actions = [one for one in lane_actions(found, Memory(), APPLY) if isinstance(one, WeighNode)]
    weights = {one.node: one.weight for one in actions}
    assert weights["node1-l1"] < weights["node2-l1"] < weights["node1-l2"] < weights["node2-l2"]
    assert "level 1 of attained GPU time" in actions[-1].reason
    assert [guard([one], found, Memory(), RULES)[0].allowed for one in actions] == [True] * 4
    # Lanes that have their weights, those of slurm.conf, those without jobs beside them, and observe-only: none.
    stay = tuple(replace(lane, weight=weights[lane.name]) for lane in lanes)
    assert not lane_actions(replace(found, nodes=(*found.nodes[:2], *stay)), Memory(), APPLY)
    static = tuple(replace(lane, dynamic=False) for lane in lanes)
    for other in (replace(found, nodes=(*found.nodes[:2], *static)), replace(found, jobs=())):
        assert not [one for one in lane_actions(other, Memory(), APPLY) if isinstance(one, WeighNode)]
    assert not [one for one in lane_actions(found, Memory(), OBSERVE) if isinstance(one, WeighNode)]


def test_only_a_lane_on_demand_is_weighed():
    for name in ("node1", "node1-l1", "gone"):
        action = WeighNode(name, 5, "")
        found = cluster(nodes=(node(), node(lane=1)))
        assert guard([action], found, Memory(), RULES)[0].reason.startswith("scope")


@pytest.mark.parametrize("settings", [APPLY, OBSERVE])
def test_lanes_of_another_services_hosts_are_left_to_that_one(settings):
    """Two services, each with partitions of its own, see all nodes of one Slurm."""
    theirs = (node("node2", partitions=("other",)), node("node2", 1, partitions=("other",)))
    on_demand = replace(theirs[1], name="node2-l2", lane=2, dynamic=True)
    found = cluster(nodes=(*theirs, on_demand), dead=("node2",))
    assert not lane_actions(found, Memory(), settings)
    shut = tuple(replace(one, drained=True, drain_reason="cadenza: observe-only") for one in found.nodes)
    assert not lane_actions(replace(found, nodes=shut), Memory(), settings)


def test_lanes_of_unmanaged_hosts_are_closed_where_their_agent_reports_here_or_nothing_is_managed():
    found = cluster(nodes=(node(partitions=("other",)), node(lane=1, partitions=("other",))), dead=("node1",))
    known = replace(found, hosts=(Host("node1", agent_alive=False, agent_version="0.1.0"),))
    nothing = replace(OBSERVE, partitions=frozenset())
    for seen, settings in ((known, APPLY), (cluster(nodes=found.nodes), APPLY), (found, nothing)):
        (drain,) = lane_actions(seen, Memory(), settings)
        assert isinstance(drain, DrainNode)
