"""The loop over Slurm's books and real agents' links: rounds, early ones, faults, reload, pace."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace

import pytest
from msgspec import structs
from service_rig import (
    FileSlurm,
    Peer,
    books,
    eventually,
    job,
    lease,
    make_keys,
    node,
    report,
    write_config,
)

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    Outcome,
    Release,
    Requeue,
    SetFactor,
    Suspend,
    Unsuspend,
)
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Host, JobKey
from cadenza.policies.sharing.state.settings import REQUEUE_HOLD
from cadenza.policies.sharing.turns.slurm_sync import release_plan
from cadenza.sidecar.agent_settings import ExpertTable
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import CancelOrder, Facts, ResumeOrder, YieldOrder
from cadenza.sidecar.sd_notify import notify
from cadenza.slurm_plugin.service import loop as service_loop
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.agents.hub import Hub
from cadenza.slurm_plugin.service.failover import controllers
from cadenza.slurm_plugin.service.failover.controllers import Controllers, standby_reason
from cadenza.slurm_plugin.service.failover.release_round import adopted, settled, taken_over
from cadenza.slurm_plugin.service.failover.watchdog import stand_in
from cadenza.slurm_plugin.service.loop import Loop, Parts, early_s, pause_s
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, hub_settings, load_settings
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.record_codec import decode_snapshot, encode_snapshot, pack, unpack
from cadenza.slurm_plugin.service.store.writer import SqliteStore

A, B = JobKey(1, 0), JobKey(2, 0)
TWO = (job(1), job(2, "n1-l1"))


class Rig:
    """One loop with everything real but Slurm, whose books are a file."""

    def __init__(self, folder: Path, **service: object) -> None:
        if not (folder / "keys").exists():
            make_keys(folder / "keys")
        self.folder = folder
        self.config = write_config(folder, **service)
        settings = load_settings(self.config)
        self.slurm = FileSlurm(folder / "books.json")
        self.slurm.write(books(*TWO))
        clock = SystemClock()
        self.hub = Hub(hub_settings(settings), clock)
        self.hub.start()
        self.store = SqliteStore(Path(settings.service.store), clock)
        self.loop = Loop(settings, Parts(self.slurm, self.hub, self.store), clock, Random(1))  # noqa: S311
        self.peers: list[Peer] = []

    def close(self) -> None:
        self.hub.close()
        self.store.close()

    def agent(self) -> Peer:
        found = Peer(self.hub.address, "n1", self.folder / "keys")
        self.peers.append(found)
        return found

    def reader(self) -> StoreReader:
        return StoreReader(self.store.path)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)
    yield found
    for one in found.peers:
        one.close()
    found.close()


@contextmanager
def running(loop: Loop, reload: Callable[[], object] | None = None) -> Iterator[None]:
    thread = Thread(target=loop.run, args=(reload, lambda: None))
    thread.start()
    try:
        yield
    finally:
        loop.stop = True
        thread.join()


def heard(rig: Rig, agent: Peer, *leases: object) -> None:
    before = rig.hub.agents().get("n1")
    agent.report(*leases)  # type: ignore[arg-type]
    eventually(lambda: (now := rig.hub.agents().get("n1")) and (not before or now.report != before.report))


def test_a_turn_from_yield_to_suspend_to_resume(rig: Rig) -> None:
    agent = rig.agent()
    heard(rig, agent, lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
    assert rig.loop.round()
    assert agent.receive(YieldOrder).job == 1  # type: ignore[union-attr]
    agent.receive(Facts)
    heard(rig, agent, lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=0.1))
    assert rig.loop.round()
    assert rig.slurm.actions() == ["Suspend 1"]
    assert rig.store.memory().suspended == {A}
    facts = [order for order in _drain(agent) if isinstance(order, Facts)]
    assert [one.suspended for one in facts[-1].jobs] == [True, False]
    heard(rig, agent, lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=50.0, vtime_s=150.0))
    assert rig.loop.round()
    assert rig.slurm.actions() == ["Suspend 1", "Unsuspend 1"]
    assert agent.receive(ResumeOrder).job == 1  # type: ignore[union-attr]
    assert rig.store.memory().suspended == frozenset()
    with rig.reader() as reader:
        verified = {(row.kind, row.job): row.verified for row in reader.actions()}
        assert verified["Yield", 1] == verified["Suspend", 1] == "verified"
        assert "job 2" in reader.job_record(1).reason


def _drain(agent: Peer) -> list[object]:
    with pytest.raises(AssertionError, match="no CancelOrder"):
        agent.receive(CancelOrder, 0.1)
    return list(agent.orders)


# --- two controllers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pings", "before", "after"),
    [
        ([("ctl", True), ("ctl2", True)], "x", ""),
        ([("ctl", False), ("ctl2", True)], "", "stands by: slurmctld of ctl2 is in control"),
        ([("ctl2", True), ("ctl", True)], "", "stands by: slurmctld of ctl2 is in control"),
        ([("ctl", False), ("ctl2", False)], "as before", "as before"),
    ],
)
def test_the_service_acts_where_slurmctld_is_in_control(pings: list[tuple[str, bool]], before: str, after: str) -> None:
    assert standby_reason("ctl", pings, before) == after


@pytest.mark.parametrize(
    ("names", "asked", "reason"),
    [(("ctl",), 1, ""), (("one", "two"), 1, ""), (("ctl2", "ctl"), 2, "stands by: slurmctld of ctl2 is in control")],
)
def test_slurm_is_asked_again_only_where_it_has_a_second_controller_here(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], asked: int, reason: str
) -> None:
    calls = []

    def answer(*words: str) -> bytes:
        calls.append(words)
        return json.dumps({"pings": [{"hostname": name, "responding": True} for name in names]}).encode()

    monkeypatch.setattr(controllers, "json_answer", answer)
    here = Controllers("ctl.site")
    assert [here.standby_reason() for _ in range(2)] == [reason] * 2
    assert len(calls) == asked
    monkeypatch.setattr(controllers, "json_answer", lambda *_words: b"no JSON")
    assert here.standby_reason() == reason, "without an answer it stays as it was"


def test_a_service_in_standby_is_silent_and_takes_over_with_what_the_other_has_left(rig: Rig) -> None:
    agent = rig.agent()
    heard(rig, agent, lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
    assert rig.loop.round()
    agent.receive(Facts)
    reason = ["stands by: slurmctld of ctl2 is in control"]
    rig.loop.standby_reason = lambda: reason[0]
    # 1. The other service acts: this one says nothing, and does not undo the other's suspend and move as it ends.
    theirs = (
        job(1, state="SUSPENDED"),
        job(3, "n1-l1", state="PENDING", slurm_priority=0, state_reason=REQUEUE_HOLD, submit_s=SystemClock().now()),
        job(4, "n1-l1", state="PENDING", slurm_priority=0, state_reason=REQUEUE_HOLD),
        job(2, "n1-l1"),
    )
    rig.slurm.write(books(*theirs))
    heard(rig, agent, lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=0.1))
    with running(rig.loop):
        eventually(lambda: not rig.loop.acting)
        said = _drain(agent)
        assert not agent.pending()
        assert rig.loop.illness() == "" or reason[0] in rig.loop.illness()
        assert rig.slurm.actions() == []
        # 2. Its host is lost: what it has suspended is resumed in turn, and its move's job is released.
        reason[0] = ""
        agent.orders.clear()
        heard(rig, agent, lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=50.0, vtime_s=150.0))
        eventually(lambda: {"Unsuspend 1", "Release 3"} <= set(rig.slurm.actions()))
        agent.receive(Facts)
    assert "Release 4" not in rig.slurm.actions(), "an older hold is its holder's"
    assert said


def test_a_service_with_an_old_store_takes_over_suspends_that_are_newer(tmp_path: Path) -> None:
    """A restored store does not have them, and nobody else would undo them."""
    first = Rig(tmp_path)
    assert first.loop.round()
    first.close()
    with sqlite3.connect(first.store.path) as link:
        row = link.execute("SELECT snapshot FROM rounds").fetchone()
        old = replace(decode_snapshot(unpack(row[0])), time_s=1000.0)
        link.execute("UPDATE rounds SET snapshot = ?", (pack(encode_snapshot(old)),))
    rig = Rig(tmp_path)
    try:
        rig.slurm.write(books(job(1, state="SUSPENDED"), job(2, "n1-l1")))
        heard(rig, rig.agent(), lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=50.0, vtime_s=150.0))
        assert rig.loop.round()
        assert "Unsuspend 1" in rig.slurm.actions()
    finally:
        for one in rig.peers:
            one.close()
        rig.close()


def test_a_service_in_standby_undoes_its_suspends_where_agents_hear_no_other(rig: Rig) -> None:
    agent = rig.agent()
    heard(rig, agent, lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=0.1))
    assert rig.loop.round()
    assert rig.slurm.actions() == ["Suspend 1"]
    rig.loop.standby_reason = lambda: "stands by: slurmctld of ctl2 is in control"
    with running(rig.loop):
        eventually(lambda: not rig.loop.acting)
        for rotating in (False, True):
            agent.send(structs.replace(report("n1", lease(1, "yielded"), lease(2, "held")), rotating=rotating))
            eventually(lambda rotating=rotating: rig.hub.agents()["n1"].report.rotating == rotating)
            assert rig.slurm.actions() == ["Suspend 1"]
            rig.loop._good_s = -1e9
            eventually(lambda: rig.loop._good_s > -1e9)
        eventually(lambda: rig.slurm.actions() == ["Suspend 1", "Unsuspend 1"])


def test_observe_only_sends_nothing_and_records_what_it_would(tmp_path: Path) -> None:
    rig = Rig(tmp_path, mode="observe")
    try:
        agent = rig.agent()
        heard(rig, agent, lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
        assert rig.loop.round()
        assert rig.slurm.actions() == ["DrainNode n1-l1"], "the further lane is kept shut"
        facts = agent.receive(Facts)
        assert isinstance(facts, Facts)
        assert not facts.enforce
        with rig.reader() as reader:
            yields = [row for row in reader.actions() if row.kind == "Yield"]
            assert [(row.allowed, row.ok) for row in yields] == [(False, None)]
            assert "observe" in yields[0].rule
    finally:
        for one in rig.peers:
            one.close()
        rig.close()


def test_kill_switch_stops_everything_at_the_next_round_and_the_log_says_so(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    agent = rig.agent()
    heard(rig, agent, lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
    (rig.folder / "STOP").touch()
    assert rig.loop.round()
    assert rig.loop.round()
    with rig.reader() as reader:
        assert not any(row.allowed for row in reader.actions())
    (rig.folder / "STOP").unlink()
    assert rig.loop.round()
    said = [record.getMessage() for record in caplog.records if "kill switch" in record.getMessage()]
    switch = rig.loop.settings.expert.kill_switch
    assert said == [
        f"the kill switch {switch} is set: no action leaves", f"the kill switch {switch} is gone: actions leave again"
    ]  # fmt: skip


def test_the_kill_switch_stops_a_round_in_its_middle_and_each_action_is_a_beat(rig: Rig) -> None:
    both = job(1, state="SUSPENDED"), job(2, "n2", state="SUSPENDED")
    rig.slurm.write(books(*both, nodes=(node("n1"), node("n2"))))
    rig.store.adopt(Memory(suspended=frozenset({A, B})))
    rig.store.fresh = False
    beats = []

    def beat() -> None:
        beats.append(None)
        if rig.slurm.actions():
            (rig.folder / "STOP").touch()

    rig.loop.beat = beat
    assert rig.loop.round()
    assert rig.slurm.actions() == ["Unsuspend 1"]
    assert len(beats) >= 5, "the start, the decision, each of the actions, and the end"
    with rig.reader() as reader:
        stopped = reader.job_record(2).actions[0]
    assert (stopped.kind, stopped.ok, stopped.error.partition(":")[0]) == ("Unsuspend", False, "kill switch")
    assert B in rig.store.memory().suspended, "it is still ours to undo"
    assert rig.loop.round()
    assert rig.slurm.actions() == ["Unsuspend 1"]
    (rig.folder / "STOP").unlink()
    rig.loop.beat = lambda: None
    assert rig.loop.round()
    assert rig.slurm.actions()[:2] == ["Unsuspend 1", "Unsuspend 2"]


def test_a_kill_switch_that_cannot_be_looked_up_is_set(rig: Rig) -> None:
    assert not guard_settings(rig.loop.settings).killed
    endless = rig.folder / "loop"
    endless.symlink_to(endless)
    expert = ExpertTable(kill_switch=str(endless / "STOP"))
    assert guard_settings(structs.replace(rig.loop.settings, expert=expert)).killed


def test_a_job_whose_data_makes_a_decision_fail_is_left_alone(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = job(7, command="/home/eve/\ud83d")
    monkeypatch.setattr(rig.slurm, "read", lambda: replace(books(*TWO, bad), time_s=SystemClock().now()))
    agent = rig.agent()
    heard(rig, agent, lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
    for _ in range(2):
        assert rig.loop.round()
    assert agent.receive(YieldOrder).job == 1  # type: ignore[union-attr]
    assert caplog.text.count("JOBID=7 left alone: because of its data") == 1
    with rig.reader() as reader:
        assert reader.job_record(7).reason.startswith("left alone: because of its data it makes a decision fail")


def test_news_starts_a_round_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_loop, "MAX_SPACING_S", 0.2)
    rig = Rig(tmp_path, poll_s=60)
    try:
        with running(rig.loop):
            eventually(lambda: rig.loop.last)
            agent = rig.agent()
            agent.report(lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
            assert agent.receive(YieldOrder, 20.0).job == 1  # type: ignore[union-attr]
    finally:
        for one in rig.peers:
            one.close()
        rig.close()


def test_errors_are_counted_and_survived(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.slurm.down.touch()
    assert not rig.loop.round()
    assert not rig.loop.round()
    assert rig.loop.failures == 2
    assert "SlurmDownError: slurmctld does not answer" in caplog.text
    rig.slurm.down.unlink()
    assert rig.loop.round()
    assert rig.loop.failures == 0


def test_bad_reload_keeps_the_old_settings(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    reload = lambda: load_settings(rig.config)  # noqa: E731
    with running(rig.loop, reload):
        good = rig.config.read_text(encoding="utf-8")
        rig.config.write_text(good.replace("slice_s = 1", "slice = 1"), encoding="utf-8")
        rig.loop.reload = True
        eventually(lambda: "the old settings stay in force" in caplog.text)
        assert rig.loop.settings.sharing.slice_s == 1
        rig.config.write_text(good.replace("slice_s = 1", "slice_s = 9"), encoding="utf-8")
        rig.loop.reload = True
        eventually(lambda: rig.loop.settings.sharing.slice_s == 9)


def test_settling_ends_when_the_known_agents_are_back(rig: Rig) -> None:
    agent = rig.agent()
    heard(rig, agent, lease(1))
    assert rig.loop.round()
    began = SystemClock().monotonic()
    rig.loop.settle()
    assert SystemClock().monotonic() - began < 0.3


def test_a_lost_store_adopts_what_must_be_ours(rig: Rig) -> None:
    rig.slurm.write(books(job(1), job(2, "n1-l1", state="SUSPENDED"), job(3, state="SUSPENDED")))
    agent = rig.agent()
    heard(rig, agent, lease(1, held_s=0.1), lease(2, "yielded"), lease(3, "held", gpus=(1,)))
    assert rig.loop.round()
    assert rig.store.memory().suspended == {B}
    assert rig.store.memory().factors.keys() == {1, 2, 3}, "jobs that may have been made to wait"


def test_an_orderly_end_lets_go(rig: Rig) -> None:
    rig.slurm.write(
        books(
            job(1, state="SUSPENDED"),
            job(2, state="SUSPENDED"),
            job(3, state="PENDING", slurm_priority=0),
        )
    )
    rig.store.adopt(Memory(suspended=frozenset({A}), factors={1: -500}))
    rig.loop.let_go()
    assert rig.slurm.actions() == ["Unsuspend 1"], "job 2 and job 3 are somebody else's"
    assert rig.store.memory().factors == {1: -500}, "it orders the queue until the next service is there"
    assert rig.store.memory().suspended == frozenset()
    with rig.reader() as reader:
        assert [row.kind for row in reader.job_record(1).actions] == ["Unsuspend"]


def test_an_orderly_end_lets_go_also_on_a_full_disk(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.slurm.write(books(job(1, state="SUSPENDED"), job(2, state="SUSPENDED")))
    rig.store.adopt(Memory(suspended=frozenset({A})))
    fill_up(rig.store)
    rig.loop.let_go()
    assert rig.slurm.actions() == ["Unsuspend 1"]
    assert "database or disk is full" in caplog.text


def lost_disk(rig: Rig, _: pytest.MonkeyPatch) -> None:
    fill_up(rig.store)


def lost_sense(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Let no snapshot be decided on, for a reason that is no single job's."""
    patch.setattr(rig.loop, "_decide", lambda *_: 1 // 0)


def lost_answers(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """Let Slurm act, but say nothing that can be read."""
    mute = SimpleNamespace(read=lambda: json.loads("{"))
    patch.setattr(rig.loop, "_slurm", mute)
    patch.setattr(rig.loop._gateway, "read", mute.read)


@pytest.mark.parametrize("lose", [lost_disk, lost_sense, lost_answers])
def test_whatever_keeps_rounds_from_succeeding_leaves_no_job_suspended_or_held(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Rig, pytest.MonkeyPatch], None]
) -> None:
    """Only once rounds have failed for as long as the service is trusted, and not against the kill switch."""
    rig.slurm.write(books(job(1, state="SUSPENDED"), job(2, state="SUSPENDED"), held_job(3)))
    memory = Memory(suspended=frozenset({A}), held={JobKey(3, 0): 0.0}, factors={1: -500})
    rig.store.begin(rig.slurm.read(), Decision((), memory), (), memory)
    rig.store.adopt(memory)
    rig.store.fresh = False
    lose(rig, monkeypatch)
    assert not rig.loop.round()
    assert rig.slurm.actions() == [], "the next round may succeed"
    rig.loop._good_s -= rig.loop.trust_s
    (rig.folder / "STOP").touch()
    assert not rig.loop.round()
    assert rig.slurm.actions() == []
    (rig.folder / "STOP").unlink()
    assert not rig.loop.round()
    assert rig.slurm.actions() == ["Unsuspend 1", "Release 3"]


def test_requests_that_cannot_be_read_cost_themselves(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.slurm.write(books(job(1)))
    heard(rig, rig.agent(), lease(1))
    (rig.folder / "cadenza.db.moves" / "1.json").mkdir()
    for _ in range(3):
        assert rig.loop.round()
    assert "no move that can be taken up" in caplog.text


def test_the_watchdog_releases_also_on_a_full_disk(rig: Rig) -> None:
    rig.slurm.write(books(job(1, state="SUSPENDED")))
    ours = Memory(suspended=frozenset({A}))
    rig.store.begin(rig.slurm.read(), Decision((), ours), (), ours)
    fill_up(rig.store)
    rig.store.close()
    assert stand_in(rig.store.path, lambda: FileSlurm(rig.slurm.path), 0.0, lambda _: pytest.fail("not at once"))
    assert rig.slurm.actions() == ["Unsuspend 1"]


def fill_up(store: SqliteStore) -> None:
    """Let no round be written any more, in this and every later process."""
    full = "CREATE TRIGGER full BEFORE INSERT ON rounds BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    store._link.execute(full)


# --- Pure parts ---


def held_job(number: int, *, ours: bool = True) -> object:
    return job(number, state="PENDING", slurm_priority=0, nodes=(), held_at_restart=ours)


def test_release_plan_undoes_ours_only() -> None:
    snapshot = books(job(1, state="SUSPENDED"), job(2, state="SUSPENDED"), held_job(3), held_job(4, ours=False))  # type: ignore[arg-type]
    memory = Memory(suspended=frozenset({A, JobKey(9, 0)}), placed=frozenset({JobKey(4, 0)}))
    assert release_plan(snapshot, memory, "end") == (Unsuspend(A, "end"), Release(JobKey(3, 0), "end"))


def test_a_release_is_repeatable(tmp_path: Path) -> None:
    slurm = FileSlurm(tmp_path / "books.json")
    slurm.write(books(job(1, state="SUSPENDED")))
    memory = Memory(suspended=frozenset({A}))
    assert [slurm.apply(action).ok for action in release_plan(slurm.read(), memory, "asked")] == [True]
    assert release_plan(slurm.read(), memory, "asked") == ()


def test_failed_releases_are_not_remembered_as_done() -> None:
    memory = Memory(suspended=frozenset({A, B}), placed=frozenset({A, B}))
    no, yes = Outcome(ok=False), Outcome(ok=True)
    outcomes: list[tuple[Action, Outcome]] = [
        (Release(A, ""), no),
        (Release(B, ""), no),
        (Unsuspend(A, ""), yes),
        (Unsuspend(B, ""), no),
    ]
    kept = settled(memory, Memory(placed=frozenset({B})), outcomes)
    assert (kept.suspended, kept.placed) == ({B}, {B})


def test_what_never_left_is_not_ours() -> None:
    in_, held = Outcome(ok=False, left=False), {JobKey(1, 1): 1.0, JobKey(2, 1): 1.0}
    memory = Memory(suspended=frozenset({A, B}), held=held, drained=frozenset({"n1-l1", "n2-l1"}))
    actions = [Suspend(A, ""), Suspend(B, ""), Requeue(A, hold=True, reason=""), DrainNode("n1-l1", "")]
    kept = settled(memory, Memory(suspended=frozenset({B})), [(action, in_) for action in actions])
    assert (kept.suspended, kept.held, kept.drained) == ({B}, {JobKey(2, 1): 1.0}, {"n2-l1"})


def test_a_factor_that_was_not_set_is_not_ours_and_one_that_stays_is() -> None:
    no, in_, yes = Outcome(ok=False), Outcome(ok=False, left=False), Outcome(ok=True)
    before = Memory(factors={1: -5, 4: -7})
    after = Memory(factors={2: -1, 3: -2, 4: -9, 5: -3})
    outcomes = [
        (SetFactor(A, 0, ""), no), (SetFactor(B, -1, ""), no), (SetFactor(JobKey(3, 0), -2, ""), yes),
        (MakeWay((JobKey(4, 0),), (-9,), A, ""), in_), (MakeWay((JobKey(5, 0),), (-3,), A, ""), no),
    ]  # fmt: skip
    assert settled(after, before, outcomes).factors == {1: -5, 3: -2, 4: -7, 5: -3}


def test_adopted_knows_our_drains() -> None:
    lanes = (
        node("n1-l1", 1, drained=True, drain_reason="cadenza: observe-only"),
        node("n2-l1", 1, drained=True, drain_reason="disk"),
    )
    assert adopted(ClusterSnapshot(0.0, lanes, ()), {"gpu"}).drained == {"n1-l1"}


def test_a_service_without_a_record_leaves_jobs_of_another_services_partitions_to_that_one() -> None:
    waits = job(1, state="PENDING", slurm_priority=0, state_reason="job requeued in held state", submit_s=90.0)
    found = ClusterSnapshot(100.0, (), (waits, replace(waits, key=B, partition="other")))
    memory = taken_over(Memory(), found, {"gpu"}, stale=True)
    assert (memory.held.keys(), memory.factors.keys()) == ({A}, {1})


def test_pace() -> None:
    rng = Random(7)  # noqa: S311
    assert 13.5 <= pause_s(15.0, 0.1, 0, rng) <= 16.5
    assert pause_s(1.0, 2.0, 0, rng) >= 36.0, "a slow slurmctld is asked less often"
    assert pause_s(1.0, 0.0, 3, rng) >= 7.2
    assert pause_s(1.0, 0.0, 1000, rng) <= 33.0
    first, second = Random(3), Random(3)  # noqa: S311
    assert pause_s(15.0, 0.1, 0, first) == pause_s(15.0, 0.1, 0, second)
    assert early_s(2.0, 0.01, 0) == 2.0
    assert early_s(2.0, 1.0, 0) == 20.0
    assert early_s(2.0, 0.0, 1) == float("inf")
    assert early_s(2.0, 0.1, 0, prompt=True) == 0.2
    assert early_s(2.0, 0.1, 1, prompt=True) == float("inf")


def test_notify_speaks_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert notify("READY=1")
        assert manager.recv(100) == b"READY=1"


# --- Large sites ---------------------------------------------------------------------------------------------------


class Arriving:
    """A hub whose agents connect one after another, on a clock of its own."""

    def __init__(self, arrivals_s: list[float]) -> None:
        self.arrivals_s, self.now_s, self.stop = arrivals_s, 0.0, False
        self.settings = Settings()
        self.beats = 0

    def monotonic(self) -> float:
        return self.now_s

    def agents(self) -> dict[str, Agent]:
        here = [at for at, when_s in enumerate(self.arrivals_s) if when_s <= self.now_s]
        return {f"n{at}": Agent(report(f"n{at}"), alive=True, silent_s=0.0) for at in here}

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s

    def beat(self) -> None:
        self.beats += 1

    def last_snapshot(self) -> ClusterSnapshot:
        hosts = tuple(Host(f"n{at}", agent_alive=True) for at in range(len(self.arrivals_s)))
        return replace(books(), hosts=hosts)

    @property
    def settled_s(self) -> float:
        self._hub = self._clock = self._store = self
        Loop.settle(self)  # type: ignore[arg-type]
        return self.now_s


def test_a_restart_waits_as_long_as_expected_agents_come() -> None:
    """It waited six seconds whatever their number, and then closed the lanes of all that had not come yet."""
    assert Arriving([0.4 * at for at in range(100)]).settled_s == pytest.approx(39.6, abs=0.5)
    assert Arriving([1.0, 2.0, 1e9]).settled_s == pytest.approx(8.0, abs=0.5), "one never comes"
    assert Arriving([5.0 * at for at in range(1000)]).settled_s <= 60.5
    assert Arriving([1e9]).settled_s == pytest.approx(6.0, abs=0.5)


def test_rounds_that_are_far_apart_are_trusted_for_longer(rig: Rig) -> None:
    assert rig.loop.trust_s == rig.loop.settings.trust_s
    rig.loop.pause_s = rig.loop.settings.trust_s
    assert rig.loop.trust_s == 4 * rig.loop.settings.trust_s
