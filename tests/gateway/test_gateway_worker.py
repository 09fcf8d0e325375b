"""The worker process and its supervisor, with a real child: verbs, hangs, crashes, nonsense."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_rig import MakeGateway

from cadenza.policies.core.actions import (
    DrainNode,
    OpenNode,
    Place,
    Release,
    Requeue,
    Resume,
    SetFactor,
    Size,
    Suspend,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.model import JobKey, Share
from cadenza.slurm_plugin.errors import (
    ActionRefused,
    GatewayError,
    NotAuthorized,
    NotForSlurm,
    SlurmUnavailable,
    StaleState,
    WorkerHung,
    WorkerLost,
)
from cadenza.slurm_plugin.gateway.slurm_errno import slurm_error
from cadenza.slurm_plugin.gateway.supervisor import Supervisor, WorkerSettings

RUNNING, SUSPENDED, HELD, WAITING, TERMINATED = (JobKey(number, 0) for number in (1, 2, 3, 5, 6))
RELEASE = 0xFFFFFFFF
"""The priority by which Slurm releases a job."""
Calls = Callable[[], list[str]]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (Suspend(RUNNING, "r"), "suspend 1"),
        (Unsuspend(SUSPENDED, "r"), "unsuspend 2"),
        (Requeue(RUNNING, hold=True, reason="r"), "requeue 1 True"),
        (Requeue(TERMINATED, hold=False, reason="r", repair=True), "requeue 6 False"),
        (SetFactor(RUNNING, 0, "r"), "scontrol update JobId=1 SiteFactor=0"),
        (Release(HELD, "r"), f"modify 3 {{'priority': {RELEASE}}}"),
        (DrainNode("n-l1", "observing"), "node n-l1 {'state': 'DRAIN', 'reason': 'cadenza: observing'}"),
        (DrainNode("n-l1", "cadenza: off"), "node n-l1 {'state': 'DRAIN', 'reason': 'cadenza: off'}"),
        (OpenNode("ours", "r"), "node ours {'state': 'UNDRAIN'}"),
    ],
)
def test_each_action_is_one_call(gateway_with: MakeGateway, calls: Calls, action: object, call: str) -> None:
    assert gateway_with().apply(action).ok  # type: ignore[arg-type]
    assert calls() == [call]


def test_place_changes_and_releases_by_one_request_after_one_look(
    gateway_with: MakeGateway, calls: Calls, tmp_path: Path
) -> None:
    place = Place(HELD, ("node2", "node3"), "r", cpus_per_task=3, memory_per_node_mb=700)
    assert gateway_with().apply(place).ok
    sizes = f"'memory_per_node': 700, 'cpus_per_task': 3, 'min_cpus_per_node': 6, 'priority': {RELEASE}"
    assert calls() == [f"modify 3 {{'required_nodes': ['node2', 'node3'], {sizes}}}"]
    assert (tmp_path / "calls.looks").read_text().splitlines() == ["3"]


def test_a_job_that_is_not_held_is_placed_without_a_release(gateway_with: MakeGateway, calls: Calls) -> None:
    gateway_with().act(Place(WAITING, ("node2",), "r"))
    assert calls() == ["modify 5 {'required_nodes': ['node2']}"]


def test_shares_are_totals_over_tasks_and_the_most_memory_of_a_node(gateway_with: MakeGateway, calls: Calls) -> None:
    shares = (Share("node2", 1, 3, 700), Share("node3", 1, 4, 900))
    assert gateway_with().apply(Place(HELD, ("node2", "node3"), "r", shares=shares)).ok
    sizes = f"'memory_per_node': 900, 'cpus_per_task': 4, 'min_cpus_per_node': 8, 'priority': {RELEASE}"
    assert calls() == [f"modify 3 {{'required_nodes': ['node2', 'node3'], {sizes}}}"]


def test_a_size_changes_a_pending_job_and_nothing_else(gateway_with: MakeGateway, calls: Calls) -> None:
    assert gateway_with().apply(Size(HELD, 6, 1001, "r")).ok
    assert calls() == ["modify 3 {'memory_per_node': 501, 'cpus_per_task': 3, 'min_cpus_per_node': 6}"]
    assert not gateway_with().apply(Size(RUNNING, 6, 1000, "r")).ok


def test_fewer_cpus_lower_the_least_on_a_node_first(gateway_with: MakeGateway, calls: Calls) -> None:
    gateway_with().act(Place(HELD, (), "r", cpus_per_task=1))
    assert calls() == [
        "scontrol update JobId=3 MinCPUsNode=1",
        f"modify 3 {{'cpus_per_task': 1, 'min_cpus_per_node': 2, 'priority': {RELEASE}}}",
    ]


def test_a_failed_change_is_never_followed_by_a_release(gateway_with: MakeGateway, calls: Calls) -> None:
    outcome = gateway_with().apply(Place(HELD, ("nowhere",), "r"))
    assert not outcome.ok
    assert "place job 3 on nowhere" in outcome.error
    assert "slurm.conf" in outcome.error
    assert calls() == []


def test_unpin_sends_an_empty_node_list(gateway_with: MakeGateway, calls: Calls) -> None:
    gateway_with().act(Release(HELD, "r", unpin=True))
    assert calls() == [f"modify 3 {{'required_nodes': '', 'priority': {RELEASE}}}"]


def test_a_job_that_is_not_held_is_not_released_again(gateway_with: MakeGateway, calls: Calls) -> None:
    assert gateway_with().apply(Release(WAITING, "r")).ok
    assert calls() == []


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (Suspend(JobKey(1, 1), "r"), "has been requeued"),
        (Requeue(TERMINATED, hold=True, reason="r"), "is FAILED, not RUNNING"),
        (Requeue(RUNNING, hold=True, reason="r", repair=True), "is RUNNING, not FAILED"),
        (Suspend(SUSPENDED, "r"), "is SUSPENDED, not RUNNING"),
        (Unsuspend(RUNNING, "r"), "is RUNNING, not SUSPENDED"),
        (Suspend(JobKey(9, 0), "r"), "Invalid job id"),
        (DrainNode("theirs", "r"), "drained already: bad fan"),
        (OpenNode("theirs", "r"), "drained by root: bad fan"),
        (OpenNode("theirs", "r", drain="Duplicate jobid"), "drained by root: bad fan"),
        (OpenNode("ours", "r", drain="Duplicate jobid"), "drained by root: cadenza: observing"),
    ],
)
def test_what_has_changed_is_left_alone(gateway_with: MakeGateway, calls: Calls, action: object, word: str) -> None:
    with pytest.raises(StaleState, match=re.escape(word)):
        gateway_with().act(action)  # type: ignore[arg-type]
    assert calls() == []


def test_a_drain_of_slurms_own_is_undone_while_it_is_the_one_that_was_read(
    gateway_with: MakeGateway, calls: Calls
) -> None:
    gateway_with().act(OpenNode("theirs", "r", drain="bad fan"))
    assert calls() == ["node theirs {'state': 'UNDRAIN'}"]


def test_opening_an_open_node_is_done_already(gateway_with: MakeGateway, calls: Calls) -> None:
    assert gateway_with().apply(OpenNode("open", "r")).ok
    assert calls() == []


def test_a_drain_without_rights_names_the_right(gateway_with: MakeGateway) -> None:
    with pytest.raises(NotAuthorized, match="AdminLevel=Administrator"):
        gateway_with().act(DrainNode("guarded", "r"))


@pytest.mark.parametrize("action", [Yield(RUNNING, "r"), Resume(RUNNING, "r")])
def test_the_agents_actions_are_refused(gateway_with: MakeGateway, action: Yield | Resume) -> None:
    gateway = gateway_with()
    with pytest.raises(NotForSlurm):
        gateway.act(action)
    assert not gateway.apply(action).ok
    assert gateway._source.started == 0


def test_a_read_drops_finished_jobs_but_those_that_were_terminated_and_survives_unreadable_ones(
    gateway_with: MakeGateway,
) -> None:
    gateway = gateway_with()
    raw = gateway.read_raw()
    assert [job["id"] for job in raw["jobs"]] == [1, 2, 3, 5, 6]
    assert raw["jobs"][0]["allocated_nodes"] == ["node1", "node2"]
    assert raw["jobs"][3]["unreadable"] == ["comment"]
    snapshot = gateway.read()
    assert [job.unmanageable for job in snapshot.jobs][3] == "the comment is not UTF-8"
    assert [(job.key.id, job.state) for job in snapshot.jobs if job.terminated_s] == [(6, "OTHER")]
    assert snapshot.time_s >= raw["time_s"] > 1.7e9


def test_a_hung_worker_is_ended_and_replaced(gateway_with: MakeGateway) -> None:
    gateway = gateway_with("hang", once=True, request_timeout_s=0.3)
    hung = gateway.greeting()["pid"]
    with pytest.raises(WorkerHung, match=r"over 0\.3 s to ping"):
        gateway.ping()
    assert not is_alive(hung)
    assert gateway.ping()["host"] == "ctl"
    assert gateway._source.started == 2


def test_a_read_survives_a_crash(gateway_with: MakeGateway) -> None:
    gateway = gateway_with("segv", once=True)
    crashed = gateway.greeting()["pid"]
    assert gateway.read().jobs
    assert not is_alive(crashed)
    assert gateway._source.started == 2


def test_a_crash_in_an_action_is_not_repeated(gateway_with: MakeGateway, calls: Calls) -> None:
    gateway = gateway_with("segv", once=True)
    outcome = gateway.apply(Suspend(RUNNING, "r"))
    assert not outcome.ok
    assert "SIGSEGV" in outcome.error
    assert "the next round will show" in outcome.error
    assert calls() == []
    assert gateway.apply(Suspend(RUNNING, "r")).ok


def test_a_worker_that_always_dies_is_slurm_unavailable(gateway_with: MakeGateway) -> None:
    gateway = gateway_with("exit")
    with pytest.raises(SlurmUnavailable, match="exit code 7"):
        gateway.read()
    assert gateway._source.started == 2


def test_a_machine_without_pyslurm_is_named(gateway_with: MakeGateway) -> None:
    with pytest.raises(EnvironmentLacks, match=r"libslurmfull\.so"):
        gateway_with("import").read()


def test_an_old_worker_is_replaced(gateway_with: MakeGateway) -> None:
    gateway = gateway_with(max_requests=2)
    first = gateway.greeting()["pid"]
    for _ in range(3):
        gateway.ping()
    assert gateway._source.started == 2
    assert not is_alive(first)


def test_closing_ends_the_worker(gateway_with: MakeGateway) -> None:
    with gateway_with() as gateway:
        pid = gateway.greeting()["pid"]
    assert not is_alive(pid)


CHILD = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.sendall(b'{"greeting": {}}\\n')
channel.recv(4096)
channel.sendall(%r)
channel.recv(4096)
"""


@pytest.mark.parametrize(
    ("answer", "word"),
    [(b"Segmentation fault\n", "nonsense"), (b"[1]\n", "nonsense"), (b'{"id": 7}\n', "instead of 1")],
)
def test_nonsense_is_an_error_and_ends_the_worker(answer: bytes, word: str) -> None:
    supervisor = Supervisor(WorkerSettings(command=(sys.executable, "-c", CHILD % answer)))
    with pytest.raises(WorkerLost, match=word):
        supervisor.ask("suspend job 1", "suspend", job=1, restart=0)
    supervisor.close()


def test_a_command_that_is_no_worker_is_an_error() -> None:
    supervisor = Supervisor(WorkerSettings(command=("true",)))
    with pytest.raises(WorkerLost, match="exit code 0"):
        supervisor.greeting()


@pytest.mark.parametrize(
    ("errno", "kind", "word"),
    [
        (1800, SlurmUnavailable, "scontrol ping"),
        (6000, SlurmUnavailable, "slurm.key"),
        (2002, NotAuthorized, "AdminLevel=Operator"),
        (2017, StaleState, "next round"),
        (2037, ActionRefused, "--no-requeue"),
        (None, ActionRefused, "odd"),
    ],
)
def test_slurms_errors_say_who_must_act(errno: int | None, kind: type[GatewayError], word: str) -> None:
    error = slurm_error("suspend job 1", errno, "odd")
    assert type(error) is kind
    assert str(error).startswith("suspend job 1: odd")
    assert word in str(error)


def test_an_unknown_request_is_refused_and_the_worker_lives(gateway_with: MakeGateway) -> None:
    gateway = gateway_with()
    with pytest.raises(ActionRefused, match="unknown request 'reboot'"):
        gateway._source.ask("reboot", "reboot")
    assert gateway.ping()["responding"]
    assert gateway._source.started == 1
