"""The authority table of the agent: of each fact, the sources that may set it, and those that may not.

Root is told by the kernel (SO_PEERCRED), and so is a job's process: by its control group or its ancestors. What a job
says of its training (rank, step, page, bytes, "yielded") is about its own fate: test_agent_hostile.py and
test_agent_neighbors.py have it. The service's own facts, files and orders are in test_agent_link.py, test_agent_book.py
and test_agent_prefetch.py; the service's table is in test_service_hostile.py and test_service_merge.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_rig import ROOT, USER, HostInMemory

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.leases.lease_table import Lease

GRANT: dict[str, Any] = {
    "uid": USER, "user": "u", "node": "n1", "lane": 1, "hosts": 1, "gpus": [0], "managed": True, "cpus": 4.0,
    "memory_mb": 1000, "options": "share", "late": False,
}  # fmt: skip
"""What root registers."""
CLAIMED: dict[str, Any] = {
    "uid": USER + 1, "user": "root", "node": "n9", "lane": 0, "hosts": 4, "gpus": [0, 1, 2, 3], "managed": False,
    "cpus": 64.0, "memory_mb": 10**6, "options": "max_gpus=4", "late": True,
}  # fmt: skip
"""Another value of each."""
OWN, STRANGER = 10, 99
"""Processes: a rank of the job, and one that is none of it."""

Source = Callable[[HostInMemory, dict[str, Any]], Session]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostInMemory]:
    """A host with job 1 of a user, on a further lane, and its rank; the kernel knows whose each process is."""
    module = "cadenza.sidecar.agent."
    monkeypatch.setattr(module + "leases.membership.belongs", lambda pid, lease: (pid, lease.job) == (OWN, 1))
    monkeypatch.setattr(module + "leases.membership.start_ticks", lambda _: 1)
    monkeypatch.setattr(module + "handlers.job_side.start_ticks", lambda _: 1)
    made = HostInMemory(tmp_path)
    made.register(1, **GRANT)
    made.attach(1, OWN)
    made.run_once()
    yield made
    made.close()


def says(kind: str, peer_uid: int, pid: int, **always: Any) -> Source:
    """Return a source: a process that sends one kind of message with the claim in it."""

    def send(rig: HostInMemory, claim: dict[str, Any]) -> Session:
        session = rig.session(peer_uid, pid)
        rig.jobs.handle(session, wire.encode(kind, **{"job": 1, **always, **claim}))
        return session

    return send


def rank_says(kind: str, **always: Any) -> Source:
    """Return a source: the job's attached rank, which sends a further message with the claim in it."""

    def send(rig: HostInMemory, claim: dict[str, Any]) -> Session:
        session = rig.attach(1, OWN)
        rig.jobs.handle(session, wire.encode(kind, **{"job": 1, **always, **claim}))
        return session

    return send


ROOTS = says("start", ROOT, 1)
OTHERS: dict[str, Source] = {
    "a start of the job's user": says("start", USER, OWN, **GRANT),
    "a start of another user": says("start", USER + 1, STRANGER, **GRANT),
    "an attach of the job's rank": says("attach", USER, OWN),
    "an attach of a process that is none of it": says("attach", USER, STRANGER),
    "an attach of another user": says("attach", USER + 1, OWN),
    "an attach of root outside of the job": says("attach", ROOT, STRANGER),
    "a process of the job that asks for the lease": says("ask", USER, OWN),
    "a process of another user that asks for the lease": says("ask", USER + 1, STRANGER),
    "a word of its rank on a stop": rank_says("arrived", order=1, step=3, bytes=0),
    "a word of its rank that it has yielded": rank_says("yielded"),
    "a word of its rank that it goes on": rank_says("resumed"),
    "a word of its rank on a checkpoint": rank_says("checkpointed", order=1, step=3, bytes=0),
    "a word of its rank on who requeues it": rank_says("requeued_by", owner="lightning"),
}


def of(lease: Lease) -> dict[str, Any]:
    return {name: getattr(lease, name) for name in GRANT}


def as_kept(facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {"gpus": tuple(facts["gpus"])}


@pytest.mark.parametrize("fact", GRANT)
def test_root_s_registration_sets_each_fact_of_a_lease(rig: HostInMemory, fact: str) -> None:
    wanted = GRANT | {fact: CLAIMED[fact]}
    if fact in {"gpus", "late"}:  # of one incarnation they never widen: Slurm gives others to the next one
        ROOTS(rig, {**wanted, "restart": 1})
        found = rig.host.leases.get(JobKey(1, 1))
        assert found is not None
    else:
        if fact == "managed":
            wanted |= {"lane": 0}  # exclusive use needs lane 0
        ROOTS(rig, wanted)
        found = rig.of(1)
    assert of(found) == as_kept(wanted)


def test_a_step_that_has_the_restart_of_the_start_before_is_the_later_start_s(rig: HostInMemory) -> None:
    """Its prolog did not run, so that the step has what the last one wrote."""
    rig.register(5, [2], restart=1)
    rig.register(5, [3], restart=0)
    assert [(one.key, one.gpus) for one in rig.host.leases if one.job == 5] == [(JobKey(5, 1), (2,))]
    rig.register(5, [3], restart=2)
    assert [one.key.restart for one in rig.host.leases if one.job == 5] == [1, 2], "the next start is one of its own"


@pytest.mark.parametrize("source", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("fact", GRANT)
def test_no_other_source_sets_a_fact_of_a_lease(rig: HostInMemory, fact: str, source: Source) -> None:
    told = rig.run_once().leases
    source(rig, {fact: CLAIMED[fact]})
    assert of(rig.of(1)) == as_kept(GRANT)
    assert [lease.key for lease in rig.host.leases] == [JobKey(1, 0)], "and none makes a lease"
    after = rig.run_once().leases
    assert [(one.job, one.gpus, one.managed, one.hosts) for one in after] == [
        (one.job, one.gpus, one.managed, one.hosts) for one in told
    ]


@pytest.mark.parametrize(
    ("uid", "pid", "ends"), [(ROOT, 1, True), (USER, OWN, False), (USER + 1, STRANGER, False)], ids=str
)
def test_only_root_says_that_a_job_has_ended(rig: HostInMemory, uid: int, pid: int, *, ends: bool) -> None:
    session = says("end", uid, pid)(rig, {})
    assert (rig.host.leases.get(JobKey(1, 0)) is None) == ends
    rig.run_once()
    assert [answer["type"] for answer in rig.said(session)] == ([] if ends else ["error"])


@pytest.mark.parametrize("restart", [1, 2, 2**31 - 1])
def test_a_process_speaks_of_the_incarnation_that_root_registered_or_is_refused(
    rig: HostInMemory, restart: int
) -> None:
    for pid, uid in ((OWN, USER), (STRANGER, USER)):
        session = says("attach", uid, pid)(rig, {"restart": restart})
        rig.run_once()
        assert "is not registered on this host" in rig.said(session)[0]["error"]


def test_an_environment_says_nothing(rig: HostInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real look at a process: this one's environment names the job, and it is none of it."""
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with subprocess.Popen(["sleep", "30"]) as child:
        session = says("attach", USER, child.pid)(rig, {})
        rig.run_once()
        child.kill()
    assert "is no process of job 1" in rig.said(session)[0]["error"]


def test_a_job_on_a_further_lane_shares_whatever_the_service_says_of_its_comment(rig: HostInMemory) -> None:
    """It has the lane because it opted in (B5): its owner may have changed the comment since."""
    fact = orders.JobFacts(1, 0, managed=False, weight=1.0, priority=0, user="u", hosts=1)
    rig.service.obey(orders.Facts(orders.VERSION, (fact,), 60.0, share_between_users=True, enforce=True))
    assert rig.of(1).managed
