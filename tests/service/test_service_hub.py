"""The agents' link over real CURVE sockets: who may speak, what is heard, what is sent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from service_rig import books, eventually, job, lease, make_keys, peer, report

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import (
    VERSION,
    CommitOrder,
    Facts,
    JobFacts,
    LeaseLog,
    ResumeOrder,
    Steps,
    StopAt,
    Switched,
    YieldOrder,
)
from cadenza.slurm_plugin.errors import HubError
from cadenza.slurm_plugin.service.agents import curve_keys
from cadenza.slurm_plugin.service.agents import hub as hub_module
from cadenza.slurm_plugin.service.agents.agent_registry import Event
from cadenza.slurm_plugin.service.agents.hub import FactSheet, Hub, HubSettings

HEARTBEAT_S, ALIVE_S = 0.2, 0.6
A = JobKey(1, 0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def hub(keys: Path) -> Iterator[Hub]:
    link = Hub(HubSettings("tcp://127.0.0.1:*", keys, HEARTBEAT_S, ALIVE_S, 5.0), SystemClock())
    link.start()
    yield link
    link.close()


def alive(hub: Hub) -> set[str]:
    return {host for host, agent in hub.agents().items() if agent.alive}


def told(hub: Hub, host: str = "n1", *jobs: int) -> None:
    """Give the hub the facts of a round, by which Slurm has these jobs on a host."""
    facts = tuple(JobFacts(number, 0, managed=True, weight=1.0, priority=0, user="ada", hosts=1) for number in jobs)
    sheet = {host: Facts(VERSION, facts, 60.0, share_between_users=False, enforce=True)}
    hub.send_facts(FactSheet(sheet, SystemClock().now(), valid_s=60.0))


def test_report_event_and_silence(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as agent:
        agent.report(lease(1))
        assert hub.wait(3.0)
        assert hub.agents()["n1"].report.leases[0].job == 1
        told(hub, "n1", 1)
        agent.send(Switched(VERSION, "n1", 1, 0, "yield", 1.0, 0.1, 0.1, 0.2, 5))
        agent.send(LeaseLog(VERSION, "n1", 1, 0, (0,), 1.0, 2.0))
        found: list[object] = []
        eventually(lambda: found.extend(hub.drain()) or len(found) == 4)
        assert [type(one) for one in found] == [Event, Event, Switched, LeaseLog]
    eventually(lambda: "n1" not in alive(hub))
    eventually(lambda: any(isinstance(one, Event) and one.kind == "agent-down" for one in hub.drain()))


def test_the_record_has_a_hosts_word_only_on_jobs_that_slurm_has_there(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as agent, peer(hub.address, "n2", keys) as foreign:
        agent.report(lease(1))
        foreign.report(lease(1, lost="it says so"))
        eventually(lambda: alive(hub) == {"n1", "n2"})
        told(hub, "n1", 1)
        foreign.send(Switched(VERSION, "n2", 1, 0, "lost", 1.0, 0.1, 0.1, 0.2, 5))
        foreign.send(LeaseLog(VERSION, "n2", 1, 0, (0,), 1.0, 2.0))
        agent.send(LeaseLog(VERSION, "n1", 1, 0, (0,), 1.0, 2.0))
        found: list[object] = []
        eventually(lambda: found.extend(hub.drain()) or any(isinstance(one, LeaseLog) for one in found))
        assert {one.host for one in found if one.job == 1} == {"n1"}


def test_a_host_may_speak_of_jobs_that_ended_while_the_service_was_away(hub: Hub, keys: Path) -> None:
    hub.recall(books(job(1)))
    with peer(hub.address, "n1", keys) as agent, peer(hub.address, "n2", keys) as foreign:
        agent.report()
        foreign.report()
        eventually(lambda: alive(hub) == {"n1", "n2"})
        foreign.send(LeaseLog(VERSION, "n2", 1, 0, (0,), 1.0, 2.0))
        agent.send(LeaseLog(VERSION, "n1", 1, 0, (0,), 1.0, 2.0))
        found: list[object] = []
        eventually(lambda: found.extend(hub.drain()) or any(isinstance(one, LeaseLog) for one in found))
        assert {one.host for one in found if one.job == 1} == {"n1"}


def test_orders_reach_the_host_and_unknown_hosts_are_named(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as agent:
        agent.report(lease(1))
        eventually(lambda: "n1" in alive(hub))
        assert hub.yield_job(A, ("n1",)).ok
        assert agent.receive(YieldOrder) == YieldOrder(VERSION, 1, 0, 5.0)
        assert hub.resume_job(A, ("n1",)).ok
        assert agent.receive(ResumeOrder) == ResumeOrder(VERSION, 1, 0)
        outcome = hub.resume_job(A, ("n1", "n7"))
        assert not outcome.ok
        assert "n7: its agent is not connected" in outcome.error


def test_multi_node_stop(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as one, peer(hub.address, "n2", keys) as two:
        for agent in (one, two):
            agent.report(lease(1, hosts=2))
        eventually(lambda: alive(hub) == {"n1", "n2"})
        assert hub.yield_job(A, ("n1", "n2")).ok
        for agent, highest in ((one, 4), (two, 5)):
            agent.receive(YieldOrder)
            agent.send(Steps(VERSION, agent.host, 1, 0, highest, arrived=False))
        for agent in (one, two):
            stop = agent.receive(StopAt)
            assert isinstance(stop, StopAt)
            agent.send(Steps(VERSION, agent.host, 1, 0, stop.step, arrived=True))
        for agent in (one, two):
            agent.receive(CommitOrder)


def test_facts_are_repeated_while_they_are_good(hub: Hub, keys: Path) -> None:
    job = JobFacts(1, 0, managed=True, weight=1.0, priority=0, user="ada", hosts=1)
    facts = Facts(VERSION, (job,), 60.0, share_between_users=False, enforce=True)
    with peer(hub.address, "n1", keys) as agent:
        agent.report(lease(1), lease(2))
        eventually(lambda: "n1" in alive(hub))
        told_s = SystemClock().now()
        hub.send_facts(FactSheet({"n1": facts, "n9": facts}, told_s, valid_s=3 * HEARTBEAT_S))
        got = agent.receive(Facts)
        assert isinstance(got, Facts)
        assert [one.job for one in got.jobs] == [1, 2], "a job younger than the snapshot is not forgotten"
        hub.mark_suspended(A, suspended=True)
        marked = agent.receive(Facts)
        assert isinstance(marked, Facts)
        assert marked.jobs[0].suspended
        agent.receive(Facts)
        eventually(lambda: SystemClock().now() > told_s + 4 * HEARTBEAT_S)
        while agent.pending():
            agent.receive(Facts)
        with pytest.raises(AssertionError, match="no Facts"):
            agent.receive(Facts, 2.5 * HEARTBEAT_S)


def test_wrong_key_is_refused(hub: Hub, keys: Path, tmp_path: Path) -> None:
    stranger = make_keys(tmp_path / "stranger")
    (stranger / "service.key").write_bytes((keys / "service.key").read_bytes())
    with peer(hub.address, "n1", stranger) as agent, peer(hub.address, "n2", keys) as friend:
        agent.report(lease(1))
        friend.report()
        eventually(lambda: "n2" in alive(hub))
        assert "n1" not in hub.agents()


def test_key_of_one_host_speaks_for_that_host_only(hub: Hub, keys: Path) -> None:
    """The thief connects with the name of a host whose agent is there: neither its reports nor its orders change."""
    with peer(hub.address, "n1", keys) as owner:
        owner.report(lease(1))
        eventually(lambda: alive(hub) == {"n1"})
        with peer(hub.address, "n1", keys, pair="n2") as thief:
            thief._socket.disconnect(hub.address)
            thief._socket.setsockopt(zmq.IDENTITY, b"n1")
            thief._socket.connect(hub.address)
            thief.report(lease(9))
            eventually(lambda: hub.refused["key"] == 1)
            assert hub.resume_job(A, ("n1",)).ok
            owner.receive(ResumeOrder)
            assert not thief.pending()
        assert [one.job for one in hub.agents()["n1"].report.leases] == [1]


def test_a_replaced_key_works_until_the_agent_has_come_with_the_new_one(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as before:
        curve_keys.make_keys(keys, ("n1",), rotate=True)
        hub.reload_keys()
        before.report()
        eventually(lambda: alive(hub) == {"n1"})
        with peer(hub.address, "n1", keys) as after:
            after.report(lease(1))
            eventually(lambda: len(hub.agents()["n1"].report.leases) == 1)
            before.report(lease(2))
            eventually(lambda: hub.refused["key"] == 1)
            assert hub.resume_job(A, ("n1",)).ok
            after.receive(ResumeOrder)
            assert not (keys / "agents" / "n1.key.old").exists()


def test_bad_frames_are_counted_and_survived(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as agent:
        agent.send(b"not json")
        agent.send(b"\xff")
        agent.send(b'{"type":"Switched","v":1,"host":"n1","job":1,"restart":0,"kind":"yield","at_s":1e300,"bytes":0}')
        agent.send(b'{"type":"Surprise","v":1}')
        agent.send(report("n1", version=99))
        agent.send(report("n2"))
        agent._socket.send_multipart([b"two", b"frames"])
        agent.report()
        eventually(lambda: "n1" in alive(hub))
        assert hub.refused == {"format": 4, "version": 1, "key": 1, "shape": 1}


def test_an_agent_of_another_wire_version_is_told_ours_and_named_until_it_speaks_it(hub: Hub, keys: Path) -> None:
    theirs = {"v": VERSION + 1, "kind": "a report in another form"}
    with peer(hub.address, "n1", keys) as agent:
        agent.report()
        eventually(lambda: alive(hub) == {"n1"})
        hub.drain()
        for _ in range(2):
            agent.send(msgspec.json.encode(theirs))
        eventually(lambda: hub.refused["version"] == 2)
        refused = hub.agents()["n1"]
        assert (refused.alive, refused.refused) == (False, "speaks wire version 2, the service 1")
        events = [one for one in hub.drain() if isinstance(one, Event)]
        assert [(one.kind, one.detail) for one in events] == [("agent-down", refused.refused)]
        while b"OtherVersion" not in (answer := agent._socket.recv()):
            pass
        assert msgspec.json.decode(answer)["v"] == VERSION
        agent.report()
        eventually(lambda: alive(hub) == {"n1"})
        assert hub.agents()["n1"].refused == ""
    with peer(hub.address, "n2", keys) as stranger:
        stranger.send(msgspec.json.encode(theirs))
        eventually(lambda: hub.agents().get("n2"))
        assert hub.agents()["n2"].refused == refused.refused


def test_a_bad_row_costs_that_row(hub: Hub, keys: Path) -> None:
    rows = [msgspec.to_builtins(lease(number)) for number in (1, 2, 3)]
    rows[1]["restart"] = 2**63
    frame = {**msgspec.to_builtins(report("n1")), "leases": rows}
    with peer(hub.address, "n1", keys) as agent:
        agent.send(msgspec.json.encode(frame))
        eventually(lambda: "n1" in alive(hub))
        assert [one.job for one in hub.agents()["n1"].report.leases] == [1, 3]
        assert hub.refused == {"row": 1}


def test_connections_that_show_no_key_are_closed(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would use up the files of the service: after libzmq's own half minute it would have thousands."""
    monkeypatch.setattr(hub_module, "HANDSHAKE_MS", 200)
    hub = Hub(HubSettings("tcp://127.0.0.1:*", keys), SystemClock())
    hub.start()
    host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=5.0) for _ in range(20)]
    try:
        for link in silent:
            while link.recv(1000):  # the greeting, then the end
                pass
        with peer(hub.address, "n1", keys) as agent:
            agent.report()
            eventually(lambda: "n1" in hub.agents())
    finally:
        for link in silent:
            link.close()
        hub.close()


def test_a_restarted_agent_takes_its_name_over(hub: Hub, keys: Path) -> None:
    with peer(hub.address, "n1", keys) as old:
        old.report()
        eventually(lambda: "n1" in alive(hub))
        with peer(hub.address, "n1", keys) as new:
            new.report(lease(1))
            eventually(lambda: len(hub.agents()["n1"].report.leases) == 1)
            assert hub.resume_job(A, ("n1",)).ok
            new.receive(ResumeOrder)


def test_missing_keys_and_taken_address_are_named(tmp_path: Path, hub: Hub, keys: Path) -> None:
    with pytest.raises(HubError, match="cadenza keygen"):
        Hub(HubSettings("tcp://127.0.0.1:*", tmp_path), SystemClock()).start()
    with pytest.raises(HubError, match="bind"):
        Hub(HubSettings(hub.address, keys), SystemClock()).start()


def test_a_frame_of_very_many_bad_rows_is_refused_whole_and_logged_once(
    hub: Hub, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Millions of rows would take the link's thread seconds and a gigabyte."""
    start = msgspec.json.encode(report("n1")).split(b'"leases":')[0] + b'"leases":['
    with peer(hub.address, "n1", keys) as agent:
        for rows in (2**19, 2**16, 2**14):
            agent.send(start + b"1," * rows + b"1]}")
        eventually(lambda: "n1" in alive(hub))
        assert hub.refused == {"format": 2, "row": 2**14 + 1}
    assert sum("refused" in line.getMessage() for line in caplog.records) == 2


def test_a_host_that_floods_has_a_budget_of_its_own(hub: Hub, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "BYTES_AT_ONCE", 50.0 * hub_module.FRAME_BYTES)
    monkeypatch.setattr(hub_module, "RECORDS_AT_ONCE", 5.0)
    monkeypatch.setattr(hub_module, "RECORDS_S", 0.0)
    with peer(hub.address, "n1", keys) as flooding, peer(hub.address, "n2", keys) as honest:
        flooding.report(lease(1))
        eventually(lambda: "n1" in alive(hub))
        told(hub, "n1", 1)
        for _ in range(20):
            flooding.send(LeaseLog(VERSION, "n1", 1, 0, (0,), 1.0, 2.0))
        eventually(lambda: hub.refused["record"] >= 15)
        assert sum(isinstance(one, LeaseLog) for one in hub.drain()) == 4
        for _ in range(3000):
            flooding.send(b"x" * 1000)
        eventually(lambda: hub.refused["budget"] > 0)
        honest.report(lease(2))
        eventually(lambda: "n2" in alive(hub))
        eventually(lambda: flooding.report() or "n1" in alive(hub))  # its budget grows again
