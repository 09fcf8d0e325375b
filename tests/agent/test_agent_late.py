"""Jobs that start without their lease: they take no turns until they ask, and use of a GPU before ends that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from host_rig import HostInMemory
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.model import JobKey
from cadenza.policies.sharing.turns.fair_queue import Contender, Turn
from cadenza.sidecar import wire
from cadenza.sidecar.agent.handlers import job_side
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable
from cadenza.sidecar.agent.telemetry.gpu_watch import GpuWatch, Look
from cadenza.sidecar.agent.turns import arbiter, early_use
from cadenza.sidecar.agent.turns.early_use import EarlyUse


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostInMemory]:
    """A host on which a process belongs to the job of its pid's tens."""
    monkeypatch.setattr(membership, "belongs", lambda pid, lease: pid // 10 == lease.job)
    monkeypatch.setattr(membership, "pids_of", lambda _: frozenset())  # none outlives its job
    for module in (membership, job_side, early_use):
        monkeypatch.setattr(module, "start_ticks", lambda _: 1)
    monkeypatch.setattr(early_use, "pids_of", lambda lease: frozenset(range(lease.job * 10, lease.job * 10 + 10)))
    made = HostInMemory(tmp_path)
    made.host.look = lambda _: "running"
    made.host.release_taken = lambda: None  # type: ignore[method-assign]
    yield made
    made.close()


class Driver:
    """What the driver shows at each look."""

    sees = True

    def __init__(self, on_gpu: Mapping[int, Mapping[int, int | None] | None]) -> None:
        self.on_gpu, self.began_s, self.asked, self.asked_s = on_gpu, 0.0, 0, float("-inf")

    @property
    def last(self) -> Look:
        self.began_s += 1.0
        return Look(self.began_s, self.on_gpu, {}, {})

    def ask(self) -> None:
        self.asked, self.asked_s = self.asked + 1, 100.0


def watch(rig: HostInMemory, driver: Driver) -> EarlyUse:
    return EarlyUse(rig.host, cast("GpuWatch", driver))


def start(rig: HostInMemory, job: int, gpus: list[int], **fields: object) -> list[dict[str, object]]:
    """Register a job by the plugin, and return the answers that it has got by then."""
    session = rig.session(0)
    fields = {"uid": 1000, "user": "u", "node": "n1", "managed": True, "hosts": 1, **fields}
    rig.jobs.handle(session, wire.encode("start", job=job, gpus=gpus, **fields))
    rig.run_once()
    return [message for message in rig.said(session) if message["type"] == "lease"]


def ask(rig: HostInMemory, job: int) -> Session:
    session = rig.session(pid=job * 10 + 1)
    rig.jobs.handle(session, wire.encode("ask", job=job))
    return session


def answers(rig: HostInMemory, session: Session) -> list[object]:
    return [message.get("state", message["type"]) for message in rig.said(session)]


def test_a_late_job_starts_at_once_and_leaves_its_gpus_to_others(rig: HostInMemory) -> None:
    assert [answer["state"] for answer in start(rig, 1, [0, 1], late=True)] == ["late"]
    assert [answer["state"] for answer in start(rig, 2, [0])] == ["granted"]
    late = rig.of(1)
    assert (late.state, late.unasked, rig.of(2).state) == ("waiting", True, "held")
    rig.run_once(100.0)
    assert rig.of(2).state == "held", "a job that wants no GPU displaces none"
    assert rig.arbiter.reasons[late.key] == "it has not asked for its lease yet"
    reports = {one.job: one for one in rig.run_once().leases}
    assert reports[1].late
    assert not reports[2].late


def test_it_counts_for_no_turn(rig: HostInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for the wait after which another job is overdue."""
    seen: list[JobKey] = []
    real = arbiter.next_turn

    def next_turn(contenders: list[Contender], **rules: Any) -> Turn:
        seen[:] = [contender.key for contender in contenders]
        return real(contenders, **rules)

    monkeypatch.setattr(arbiter, "next_turn", next_turn)
    start(rig, 1, [0], late=True)
    start(rig, 2, [0])
    assert [key.id for key in seen] == [2]
    ask(rig, 1)
    rig.run_once()
    assert [key.id for key in seen] == [1, 2]


def test_it_gets_free_gpus_at_once_when_it_asks(rig: HostInMemory) -> None:
    start(rig, 1, [0], late=True)
    session = ask(rig, 1)
    rig.run_once()
    assert answers(rig, session) == ["granted"]
    assert (rig.of(1).state, rig.of(1).late) == ("held", False)
    assert [answer["state"] for answer in start(rig, 1, [0], late=True)] == ["granted"], "its next step"


def test_it_waits_like_one_that_has_just_come(rig: HostInMemory) -> None:
    start(rig, 1, [0], late=True)
    start(rig, 2, [0])
    rig.run_once(500.0)
    session = ask(rig, 1)
    rig.run_once()
    rig.jobs.reply_to_waiters()
    rig.host.outbox.flush()
    answer = rig.said(session)[0]
    assert answer["state"] == "wait"
    assert "job 2" in answer["reason"]
    assert rig.of(1).since_s == pytest.approx(rig.host.clock.now(), abs=1.0)
    assert rig.of(1).vtime_s >= 500.0, "the time before it asked is no credit"
    rig.jobs.drop(rig.of(2), "ended")
    rig.run_once()
    assert answers(rig, session)[-1] == "granted"


def test_attach_asks_too_and_says_who_has_the_gpus(rig: HostInMemory) -> None:
    start(rig, 1, [0], late=True)
    start(rig, 2, [0])
    session = rig.attach(1, 11)
    rig.run_once()
    attached = rig.said(session)[0]
    assert (attached["type"], attached["state"]) == ("attached", "yielded")
    assert "job 2" in attached["reason"]
    assert not rig.of(1).late


@pytest.mark.parametrize("fields", [{"managed": False}, {"hosts": 2}, {"late": False}])
def test_all_other_jobs_wait_at_the_start(rig: HostInMemory, fields: dict[str, object]) -> None:
    start(rig, 2, [0])
    assert "late" not in [answer["state"] for answer in start(rig, 1, [0], **{"late": True, **fields})]
    assert not rig.of(1).late


def test_only_processes_of_the_job_may_ask(rig: HostInMemory) -> None:
    start(rig, 1, [0], late=True)
    for uid, pid in ((1000, 21), (1001, 11)):
        session = rig.session(uid, pid)
        rig.jobs.handle(session, wire.encode("ask", job=1))
        rig.run_once()
        assert answers(rig, session) == ["error"]
    assert rig.of(1).late


def test_the_processes_that_wait_are_bounded(rig: HostInMemory) -> None:
    start(rig, 2, [0])
    start(rig, 1, [0], late=True)
    repeated = ask(rig, 1)
    rig.jobs.handle(repeated, wire.encode("ask", job=1))
    assert len(rig.host.run(JobKey(1, 0)).waiters) == 1
    sessions = [ask(rig, 1) for _ in range(job_side.MIN_RANKS)]
    rig.run_once()
    assert len(rig.host.run(JobKey(1, 0)).waiters) == job_side.MIN_RANKS
    assert answers(rig, sessions[-1]) == ["error"]


def test_a_job_that_uses_a_gpu_early_takes_turns_and_waits_at_its_next_start(rig: HostInMemory) -> None:
    start(rig, 1, [0, 1], late=True)
    watching = watch(rig, Driver({1: {12: 5 << 30}}))
    watching.tick()
    report = rig.run_once().leases[0]
    assert not report.late
    assert report.early == "pid 12 used GPU 1 before the job had asked for its lease"
    assert rig.of(1).state == "held", "nothing else wanted its GPUs"
    rig.jobs.handle(rig.session(0), wire.encode("end", job=1))
    start(rig, 2, [0])
    assert start(rig, 1, [0], late=True, restart=1)[-1:] != [{"state": "late"}]
    again = rig.host.leases.get(JobKey(1, 1))
    assert again is not None
    assert (again.state, again.late) == ("waiting", False)


def test_the_gpu_of_an_early_process_goes_to_its_own_job_only(rig: HostInMemory) -> None:
    start(rig, 3, [0])
    start(rig, 1, [0], late=True)
    watch(rig, Driver({0: {12: None, 31: None}})).tick()
    start(rig, 2, [0])
    rig.of(1).vtime_s = rig.of(2).vtime_s + 100.0
    rig.jobs.drop(rig.of(3), "ended")
    rig.run_once()
    assert (rig.of(1).state, rig.of(2).state) == ("held", "waiting")
    assert not rig.host.taken, "it has its lease now"


def test_other_processes_on_the_gpus_do_not_count(rig: HostInMemory) -> None:
    start(rig, 1, [0, 1], late=True)
    driver = Driver({0: {99: 1 << 30}, 1: None, 3: {12: 1 << 30}})
    watching = watch(rig, driver)
    for _ in range(3):
        watching.tick()
    assert rig.of(1).late
    assert driver.asked == 1, "not more often than once in LOOK_S"


def test_without_late_jobs_the_driver_is_left_alone(rig: HostInMemory) -> None:
    start(rig, 1, [0])
    driver = Driver({0: {12: 1 << 30}})
    watch(rig, driver).tick()
    assert driver.asked == 0
    assert not rig.of(1).early


@given(gpus=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5), asked=st.integers(0, 31))
def test_jobs_that_have_not_asked_give_no_one_credit(gpus: list[set[int]], asked: int) -> None:
    """The virtual time at which a job begins to wait is the least of those that take turns with it."""
    table = LeaseTable()
    for number, own in enumerate(gpus):
        lease = table.register(Lease(number, 0, 1, tuple(sorted(own)), 0.0), 0.0)
        lease.late, lease.vtime_s = True, float(number + 1)
    for number in range(len(gpus)):
        if asked >> number & 1:
            lease = table.get(JobKey(number, 0))
            assert lease is not None
            rivals = [other.vtime_s for other in table.rivals(lease) if not other.late]
            table.ask(lease, 7.0)
            assert (lease.vtime_s, lease.since_s, lease.late) == (min(rivals, default=0.0), 7.0, False)
