"""Budgets of peers: what one user's processes take is neither root's nor another user's."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from agent_rig import Agent, Talker, until
from host_rig import HostInMemory, Time
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.handlers import job_side
from cadenza.sidecar.agent.ipc import budgets, peers, transport
from cadenza.sidecar.agent.ipc.budgets import FileBudget, PacketBudgets
from cadenza.sidecar.agent.ipc.peers import Peers
from cadenza.sidecar.agent.ipc.processes import Peer
from cadenza.sidecar.agent.ipc.transport import Listener, Session
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.log_filter import LINES_A_MINUTE, ForeignText

ROOT, USER, OTHER = 0, 1000, 1001
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing the uid needs root")
FLOOD = Path(__file__).with_name("flooding_peer.py")

# --- packets -----------------------------------------------------------------------------------------------------


@given(gaps=st.lists(st.floats(0, 0.1), min_size=1, max_size=200), size=st.integers(1, wire.MAX_PACKET))
def test_a_source_never_gets_more_than_its_rate_and_its_burst(gaps: list[float], size: int) -> None:
    budget, now, taken = PacketBudgets(), 5.0, 0
    for gap in gaps:
        now += gap
        while budget.may_send("source", now):
            budget.charge("source", size, now)
            taken += 1
    assert taken <= budgets.PACKETS_AT_ONCE + budgets.PACKETS_S * sum(gaps) + 1
    assert (taken - 1) * size <= budgets.BYTES_AT_ONCE + budgets.BYTES_S * sum(gaps)
    assert budget.may_send("another", now)


def test_sources_that_fell_silent_are_forgotten() -> None:
    budget = PacketBudgets()
    for source in range(3 * budgets.KEPT_SOURCES):
        budget.charge(source, 1, float(source))
    assert len(budget._buckets) <= budgets.KEPT_SOURCES


class Rig:
    """Peers on a real socket, whose users are chosen, and whose clock moves by hand."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uid = USER
        monkeypatch.setattr(transport, "peer_of", lambda _: Peer(os.getpid(), self.uid))
        self.time, self.heard, self.ends = Time(), [], list[Session]()
        self.clients: list[Talker] = []
        self.peers = Peers(
            Listener(path), zmq.Poller(), self.time, frozenset({ROOT}), self._hear, self.ends.append
        )  # fmt: skip

    def _hear(self, session: Session, packet: bytes) -> None:
        self.heard.append((session.peer.uid, wire.decode(packet)["type"]))

    def connect(self, uid: int) -> Talker:
        self.uid = uid
        self.clients.append(Talker(self.peers.listener.path))
        self.serve()
        return self.clients[-1]

    def serve(self) -> int:
        """Make a pass; return the number of ready descriptors."""
        ready = [one for one, _ in self.peers.poller.poll(0)]
        self.peers.serve(ready)
        return len(ready)

    def uids(self) -> list[int]:
        return [session.peer.uid for session in self.peers.listener.sessions.values()]

    def close(self) -> None:
        self.peers.listener.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path / "agent.sock", monkeypatch)
    yield made
    made.close()


def test_root_is_heard_before_users_that_came_first(rig: Rig) -> None:
    users = [rig.connect(USER) for _ in range(5)]
    root = rig.connect(ROOT)
    for client in (*users, root):
        for _ in range(3):
            client.send("detach")
    rig.serve()
    assert rig.heard[:3] == [(ROOT, "detach")] * 3
    assert len(rig.heard) == 18


def test_a_pass_reads_so_many_packets_of_users_and_each_user_gets_its_turn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "USER_PACKETS_PER_TURN", 4)
    monkeypatch.setattr(peers, "PACKETS_PER_TURN", 4)
    for client in [rig.connect(uid) for uid in (USER, OTHER)]:
        for _ in range(8):
            client.send("detach")
    rig.serve()
    rig.serve()
    assert sorted({uid for uid, _ in rig.heard}) == [USER, OTHER]
    assert len(rig.heard) == 8


def test_a_pass_takes_so_much_time_for_packets_of_users(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(session: Session, _: bytes) -> None:
        rig.heard.append((session.peer.uid, "slow"))
        rig.time.passed += peers.USER_S_PER_TURN + 0.01

    monkeypatch.setattr(rig.peers, "handle", slow)
    monkeypatch.setattr(peers, "PACKETS_PER_TURN", 1)
    for client in [rig.connect(uid) for uid in (USER, OTHER, ROOT, ROOT)]:
        client.send("detach")
    rig.serve()
    assert [uid for uid, _ in rig.heard[:2]] == [ROOT, ROOT]
    assert len(rig.heard) == 3
    rig.serve()
    assert len(rig.heard) == 4


def test_a_peer_beyond_its_budget_is_read_again_later_and_wakes_the_loop_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "PACKETS_AT_ONCE", 3.0)
    client, other = rig.connect(USER), rig.connect(OTHER)
    for _ in range(8):
        client.send("detach")
    rig.serve()
    assert len(rig.heard) == 3
    assert rig.serve() == 0
    other.send("detach")
    rig.serve()
    assert rig.heard[-1][0] == OTHER
    rig.time.passed += 1.0
    rig.peers.tick()
    rig.serve()
    assert rig.heard.count((USER, "detach")) == 6
    client.close()
    rig.peers.lose(next(iter(rig.peers.listener.sessions.values())))
    rig.time.passed += 1.0
    rig.peers.tick()
    assert rig.uids() == [OTHER]


# --- connections -------------------------------------------------------------------------------------------------


def test_one_users_connections_end_where_the_next_users_begin(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.peers.listener.files = FileBudget(1000)
    monkeypatch.setattr(FileBudget, "is_reserved", lambda *_: False)
    monkeypatch.setattr(budgets, "MIN_CONNECTIONS", 3)
    monkeypatch.setattr(budgets, "FILES_PER_PEER", 1000)
    for uid in (USER,) * 5 + (OTHER,) * 2 + (ROOT,) * 6:
        rig.connect(uid)
    assert sorted(rig.uids()) == [ROOT] * 6 + [USER] * 3 + [OTHER] * 2
    assert rig.peers.refused == {USER: 2}
    assert rig.clients[4].sock.recv(1) == b"", "the connection was closed"


def test_a_users_connection_that_does_not_attach_ends_and_roots_does_not(rig: Rig) -> None:
    for uid in (USER, OTHER, ROOT):
        rig.connect(uid)
    next(session for session in rig.peers.listener.sessions.values() if session.peer.uid == OTHER).joined = True
    rig.time.passed += peers.ATTACH_S + 0.1
    rig.peers.tick()
    assert rig.uids() == [OTHER, ROOT]
    assert [session.peer.uid for session in rig.ends] == [USER]


@given(limit=st.integers(32, 2**20))
def test_descriptors_are_divided_between_users_and_root(limit: int) -> None:
    budget = FileBudget(limit)
    users = sum(not budget.is_reserved(descriptor) for descriptor in (0, limit - budget.reserve - 1, limit - 1))
    assert users == 2
    assert budget.reserve >= 10
    assert budget.per_user * budgets.FILES_PER_PEER <= max(limit, 12)


def test_a_job_has_as_many_ranks_as_it_may_and_the_refused_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "belongs", lambda *_: True)
    for module in (membership, job_side):
        monkeypatch.setattr(module, "start_ticks", lambda _: 1)
    monkeypatch.setattr(job_side, "MIN_RANKS", 3)
    host = HostInMemory(tmp_path)
    host.register(1, [0])
    host.register(2, [1], cpus=5.0)
    said = {job: [host.attach(job, pid) for pid in range(10 * job, 10 * job + 7)] for job in (1, 2)}
    report = host.run_once()
    assert [lease.ranks for lease in report.leases] == [3, 5]
    assert "as many as it may" in host.said(said[1][3])[0]["error"]
    assert not host.host.supervisor.faults


def test_attaches_do_not_look_at_all_jobs_of_the_host_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "belongs", lambda *_: True)
    for module in (membership, job_side):
        monkeypatch.setattr(module, "start_ticks", lambda _: 1)
    host, turns = HostInMemory(tmp_path), []
    for job in range(1, 21):
        host.register(job, [0])
    host.run_once()
    real = host.arbiter.settle
    monkeypatch.setattr(host.arbiter, "settle", lambda: (turns.append(1), real()))
    for _ in range(30):
        host.attach(20, 200)
    assert host.of(20).state == "waiting"
    assert len(turns) <= 2


def test_without_a_descriptor_an_attach_is_refused_and_the_job_is_not_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "belongs", lambda *_: True)
    host = HostInMemory(tmp_path)
    host.register(1, [0])
    host.jobs.files = FileBudget(3)
    refused = host.attach(1, os.getpid())
    host.run_once()
    assert "no file for its page" in host.said(refused)[0]["error"]
    host.jobs.files = FileBudget(10**6)
    host.attach(1, os.getpid())
    assert [lease.ranks for lease in host.run_once().leases] == [1]


# --- the log -----------------------------------------------------------------------------------------------------


def record(*arguments: Any, at: float = 0.0, **more: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": " ".join(["%s"] * len(arguments)), "args": arguments, **more})
    made.created = at
    return made


def test_what_a_job_says_is_one_line_in_the_log() -> None:
    line = record(JobKey(1, 0), "no room\nI cadenza: registered JOBID=9\x1b[2J", ValueError("a\nb"), 5)
    assert ForeignText().filter(line)
    assert line.getMessage() == "1 no room I cadenza: registered JOBID=9\ufffd[2J a b 5"


def test_no_line_of_a_traceback_looks_like_a_line_of_the_log() -> None:
    def fail() -> None:
        raise ValueError("no\nI cadenza: registered JOBID=9\x1b[2J")

    try:
        fail()
    except ValueError:
        line = record("it failed", exc_info=sys.exc_info())
    assert ForeignText().filter(line)
    first, *rest = logging.Formatter("%(message)s").format(line).split("\n")
    assert first == "it failed"
    assert all(one.startswith("  ") and one.isprintable() for one in rest)


def test_a_job_or_user_has_its_lines_a_minute_and_the_next_line_counts_the_missing() -> None:
    lines = ForeignText()
    for source in ((JobKey(1, 0),), (JobKey(2, 0),), ()):
        kept = [lines.filter(record(*source, "x", uid=7, at=0.1 * number)) for number in range(2 * LINES_A_MINUTE)]
        assert kept.count(True) == LINES_A_MINUTE
    assert all(lines.filter(record("the agent's own", at=1.0)) for _ in range(2 * LINES_A_MINUTE))
    later = record(JobKey(1, 0), "x", at=61.0)
    assert lines.filter(later)
    assert later.getMessage() == f"1 x ({LINES_A_MINUTE} more lines about this in the minute before)"


def test_connections_that_a_user_drops_count_as_the_users_lines(caplog: pytest.LogCaptureFixture) -> None:
    closed = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    closed.close()
    outbox, lines = transport.Outbox(), ForeignText()
    with caplog.at_level(logging.INFO):
        for _ in range(2 * LINES_A_MINUTE):
            outbox.post(Session(closed, Peer(7, USER)), "error", error="x")
        outbox.flush()
    assert [lines.filter(line) for line in caplog.records].count(True) == LINES_A_MINUTE


# --- a real agent ------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.slow
@pytest.mark.parametrize("files", [64, 4096])
def test_root_is_answered_while_a_user_holds_a_thousand_connections_and_floods(files: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        agent = Agent(Path(made))
        agent.up(files)
        command = [sys.executable, str(FLOOD), str(agent.socket), str(NOBODY)]
        flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "1000 connections\n"
            until(lambda: agent.log().count(f"uid={NOBODY}") >= LINES_A_MINUTE, "the flood in the log")
            took, end, job = [], time.monotonic() + 1.5, 0
            while time.monotonic() < end:
                job += 1
                began, root = time.monotonic(), Talker(agent.socket)
                assert root.start(job, [job % 512])["state"] == "granted"
                took.append(time.monotonic() - began)
                root.send("end", job=job)
                root.close()
            assert max(took) < 0.5, took
            assert len(took) > 10
            foreign = [line for line in agent.log().splitlines() if f"uid={NOBODY}" in line]
            assert len(foreign) <= LINES_A_MINUTE
        finally:
            flood.kill()
            flood.wait()
            agent.close()
        assert "left alone" not in agent.log()
        assert agent.process is not None
        assert agent.process.returncode == 0
