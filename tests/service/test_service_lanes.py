"""Lanes on demand in the service: requests, the orders to agents, and the reasons of lanes that are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from service_rig import books, node
from test_service_loop import Rig, heard

from cadenza.policies.core.model import ClusterSnapshot, Host, Node
from cadenza.policies.guard import GuardOptions
from cadenza.sidecar.frames import TO_AGENT
from cadenza.sidecar.orders import Facts, LaneOrder
from cadenza.slurm_plugin.errors import RequestError
from cadenza.slurm_plugin.service import lanes_on_demand as lanes
from cadenza.slurm_plugin.service.agent_facts import facts_of
from cadenza.slurm_plugin.service.lanes_on_demand import LaneRequest
from cadenza.slurm_plugin.service.settings import PolicyTable, ServiceTable, Settings

FIRST = node("n1", gpu_type="a100", weight=5)
LANE = node("n1-l1", 1, dynamic=True)
ACTS = Settings(service=ServiceTable(mode="apply"), guard=GuardOptions(partitions=frozenset({"gpu"})))


def cluster(*nodes: Node, wanted: int = 1, **host: object) -> ClusterSnapshot:
    """Return one host with these nodes that is to have so many lanes."""
    one = Host("n1", agent_alive=True, memory_mb=128000, further_lanes=wanted)
    return replace(books(nodes=nodes or (FIRST,)), hosts=(replace(one, **host),))  # type: ignore[arg-type]


def wanted(asked: int | None, settings: Settings, *nodes: Node) -> int:
    snapshot = cluster(*nodes, wanted=0)
    return lanes.with_lanes(snapshot, {} if asked is None else {"n1": asked}, settings).hosts[0].further_lanes


def test_lanes_are_wanted_while_the_service_acts_and_as_many_as_were_asked_for() -> None:
    two = msgspec.structs.replace(ACTS, service=ServiceTable(mode="apply", lanes_on_demand=2))
    assert [wanted(asked, ACTS) for asked in (None, 0, 1)] == [0, 0, 1]
    assert [wanted(asked, two) for asked in (None, 0, 1)] == [2, 0, 1]
    observing = msgspec.structs.replace(two, service=ServiceTable(lanes_on_demand=2))
    alone = msgspec.structs.replace(two, policy=PolicyTable(share="none"))
    assert wanted(1, observing) == wanted(1, alone) == 0


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((FIRST, LANE), None),
        ((FIRST, replace(LANE, dynamic=False)), "slurm.conf has its lane n1-l1"),
        ((replace(FIRST, gpus=0),), "n1 has no GPUs"),
        ((replace(FIRST, partitions=("gpu", "short")),), "n1 is in short, and not in managed partitions only"),
        ((replace(FIRST, partitions=()),), "n1 is in no partition, and not in managed partitions only"),
        ((replace(LANE, dynamic=False),), "Slurm has no node on this host"),
    ],
)
def test_a_host_that_can_have_no_lanes_has_a_reason_and_gets_none(nodes: tuple[Node, ...], reason: str | None) -> None:
    assert lanes.refusal_reason(books(nodes=nodes), "n1", {"gpu"}) == reason
    assert wanted(1, ACTS, *nodes) == (0 if reason else 1)


def ordered(snapshot: ClusterSnapshot, *, opens: bool = True) -> dict[str, LaneOrder]:
    return {order.node: order for order in lanes.lane_orders(snapshot, snapshot.hosts[0], opens=opens)}


def test_the_order_has_the_hardware_of_lane_0() -> None:
    order = ordered(cluster())["n1-l1"]
    assert order.hardware == "Port=6831 CPUs=16 RealMemory=64000 Gres=gpu:a100:4 Feature=lane1 Weight=105"
    assert not order.known
    untyped = ordered(cluster(replace(FIRST, gpu_type=""), wanted=2))
    assert "Gres=gpu:4 " in untyped["n1-l2"].hardware


def test_a_lane_that_slurm_has_runs_on_until_it_is_removed_there() -> None:
    there = cluster(FIRST, LANE, wanted=0)
    assert [(name, one.known) for name, one in ordered(there).items()] == [("n1-l1", True)]
    assert ordered(cluster(FIRST, wanted=0)) == {}
    assert ordered(cluster(FIRST), opens=False) == {}, "nothing is opened under the kill switch"
    assert list(ordered(there, opens=False)) == ["n1-l1"]


@pytest.mark.parametrize(
    ("host_mb", "lane_mb"), [(128000, 64000), (100000, 36000), (79999, None), (64000, None), (16000, 64000), (0, None)]
)
def test_lanes_share_the_memory_of_their_host(host_mb: int, lane_mb: int | None) -> None:
    """A host with less than lane 0 claims is a test cluster's; the memory of one that was not heard is not known."""
    found = cluster(memory_mb=host_mb)
    assert [order.memory_mb for order in ordered(found).values()] == ([] if lane_mb is None else [lane_mb])
    reasons = list(lanes.missing_reasons(found, found.hosts[0]))
    assert (lane_mb is None) == any("RealMemory" in reason for reason in reasons)


def test_with_full_memory_a_lane_has_that_of_lane_0_and_the_agent_guards_it() -> None:
    full = msgspec.structs.replace(ACTS, service=ServiceTable(mode="apply", lanes_on_demand=1, lanes_memory="full"))
    found = lanes.with_lanes(cluster(memory_mb=64000, wanted=0), {}, full)
    assert [order.memory_mb for order in ordered(found).values()] == [64000]
    assert not any("RealMemory" in reason for reason in lanes.missing_reasons(found, found.hosts[0]))
    observing = msgspec.structs.replace(full, service=ServiceTable(lanes_memory="full"))
    known = [facts_of(found, settings, frozenset())["n1"].memory_mb for settings in (full, observing, ACTS)]
    assert known == [64000, 0, 0]


def test_an_order_that_the_agent_could_not_read_costs_its_lane_only() -> None:
    assert ordered(cluster(replace(FIRST, name="n 1"), replace(LANE, name="n 1-l1"))) == {}


@pytest.mark.parametrize(
    "change",
    [{"first": "../n1"}, {"first": "n1 x"}, {"gpu_type": "a b"}, {"lane": 9}, {"port": 0}, {"gpus": 65}, {"cpus": 0}],
)
def test_the_agent_refuses_a_hostile_order(change: dict[str, object]) -> None:
    facts = Facts(1, (), 1.0, share_between_users=False, enforce=True, lanes=tuple(ordered(cluster()).values()))
    frame = json.loads(msgspec.json.encode(facts))
    assert TO_AGENT.decode(json.dumps(frame).encode())[0] == facts
    frame["lanes"][0] |= change
    with pytest.raises(msgspec.ValidationError):
        TO_AGENT.decode(json.dumps(frame).encode())


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (cluster(FIRST, LANE), None),
        (cluster(), "n1-l1 yet; if this lasts, slurm.conf needs a higher MaxNodeCount"),
        (cluster(agent_alive=False), "the agent of n1 is not alive"),
        (cluster(lane_faults=("n1-l1: it cannot be opened: no slurm.conf",)), "n1-l1: it cannot be opened"),
        (cluster(FIRST, replace(LANE, partitions=())), "needs a NodeSet with its feature lane1"),
        (cluster(wanted=0), None),
    ],
)
def test_a_lane_that_is_not_there_has_one_reason(snapshot: ClusterSnapshot, words: str | None) -> None:
    reasons = list(lanes.missing_reasons(snapshot, snapshot.hosts[0]))
    assert len(reasons) == (words is not None)
    assert all(words is not None and words in reason for reason in reasons)


def test_requests_are_files_that_a_damaged_one_does_not_hide(tmp_path: Path) -> None:
    store = tmp_path / "cadenza.db"
    with pytest.raises(RequestError, match="only root and cadenzad"):
        lanes.write(store, LaneRequest("n1", 1))
    assert lanes.requests(store) == {}
    lanes.folder(store).mkdir()
    for count in (2, 0):
        lanes.write(store, LaneRequest("n1", count))
    lanes.write(store, LaneRequest("n2", 1))
    (lanes.folder(store) / "n3.json").write_text('{"host":"n3","lanes":99}')
    assert lanes.requests(store) == {"n1": 0, "n2": 1}


def test_a_round_orders_the_lanes_of_a_request_and_removes_them_after_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        agent = rig.agent()
        rig.slurm.write(books(nodes=(node("n1", memory_mb=32000),)))
        lanes.write(rig.store.path, LaneRequest("n1", 1))
        heard(rig, agent)
        assert rig.loop.round()
        (order,) = agent.receive(Facts).lanes  # type: ignore[union-attr]
        assert order.node == "n1-l1"
        rig.slurm.write(books(nodes=(node("n1", memory_mb=32000), LANE)))
        lanes.write(rig.store.path, LaneRequest("n1", 0))
        assert rig.loop.round()
        assert rig.loop.round()
        assert rig.slurm.actions() == ["DrainNode n1-l1", "RemoveNode n1-l1"]
        assert rig.loop.round()
        while agent.receive(Facts).lanes:  # type: ignore[union-attr]
            pass
        with rig.reader() as reader:
            assert {row.kind: row.verified for row in reader.actions()}["RemoveNode"] == "verified"
    finally:
        for peer in rig.peers:
            peer.close()
        rig.close()
