"""A job's processes as the host shows them: to which job they belong, and if Slurm's suspend holds them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from agent_rig import until
from cgroup_rig import SlurmTree, real_v1, slurm_tree

from cadenza.sidecar import orders
from cadenza.sidecar.agent.driver.channel import Channel
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.ipc import cgroup_paths, slurm_steps
from cadenza.sidecar.agent.jobs.host_state import AMISS_S, Host
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns.arbiter import Arbiter
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator
from cadenza.sidecar.agent_settings import AgentSettings


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process with a child of its own."""
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & wait"]) as process:
        until(lambda: len(slurm_steps.descendants([process.pid])) == 2, "the child's child")
        yield process
        for pid in slurm_steps.descendants([process.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def lease_of(pid: int, job: int = 1) -> Lease:
    lease = Lease(job, 0, os.getuid(), (0,), 0.0)
    membership.enroll(lease, pid)
    return lease


def test_a_job_is_its_registered_process_and_all_below(child: subprocess.Popen[bytes]) -> None:
    lease = lease_of(child.pid)
    below = membership.pids_of(lease) - {child.pid}
    assert len(below) == 1
    assert membership.belongs(*below, lease)
    assert not membership.belongs(os.getpid(), lease)
    assert not membership.belongs(*below, Lease(1, 0, 0, (0,), 0.0)), "no registration, no member"


def test_one_process_that_runs_decides(child: subprocess.Popen[bytes]) -> None:
    lease = lease_of(child.pid)
    assert membership.look_at(lease) == "running"
    pids = membership.pids_of(lease)
    os.kill(child.pid, signal.SIGSTOP)
    assert membership.look_at(lease) == "running", "its child runs on"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: membership.look_at(lease) == "frozen", "all stopped")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    child.wait()
    until(lambda: membership.look_at(lease) == "gone", "all gone")


@real_v1
def test_a_freezer_is_seen_although_no_process_shows_t() -> None:
    """Slurm suspends by the freezer with proctrack/cgroup (B17); membership is by Slurm's group."""
    with slurm_tree("frozen") as tree:
        process = tree.run(17, 0)
        lease = lease_of(process.pid, 17)
        assert lease.group == "freezer:slurm_frozen/uid_0/job_17"
        state = freezer_of(tree, 17)
        state.write_text("FROZEN")
        try:
            until(lambda: state.read_text() == "FROZEN\n", "a frozen step")
            assert membership.look_at(lease) == "frozen"
        finally:
            state.write_text("THAWED")
        until(lambda: membership.look_at(lease) == "running", "a thawed step")
        other = tree.run(18, 0)
        assert not membership.belongs(other.pid, lease)
        assert membership.belongs(tree.run(17, 1).pid, lease)


def freezer_of(tree: SlurmTree, job: int) -> Path:
    return tree.step(job, 0)["freezer"] / "freezer.state"


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("0::/system.slice/n1_slurmstepd.scope/job_7/step_0/user/task_0", ":system.slice/n1_slurmstepd.scope/job_7"),
        ("0::/system.slice/n1_slurmstepd.scope/s1HWG9/step_0/slurm", ":system.slice/n1_slurmstepd.scope/s1HWG9"),
        ("0::/system.slice/n1_slurmstepd.scope/system", ""),
        ("4:freezer:/slurm_n1/uid_5/job_7", "freezer:slurm_n1/uid_5/job_7"),
        ("4:freezer:/ab/slurm/uid_5/job_7/step_batch\n0::/system.slice/slurmd.service", "freezer:ab/slurm/uid_5/job_7"),
        ("0::/user.slice/user-5.slice/session-3.scope", ""),
    ],
)  # fmt: skip
def test_the_group_of_a_job_in_slurms_tree(tmp_path: Path, path: str, group: str) -> None:
    (tmp_path / "proc/3").mkdir(parents=True)
    (tmp_path / "proc/3/cgroup").write_text(path + "\n")
    assert cgroup_paths.of(3, tmp_path).slurm_job() == group


def test_a_freezer_of_version_2_is_read_from_its_events(tmp_path: Path) -> None:
    step = tmp_path / "sys/fs/cgroup/n1_slurmstepd.scope/job_7/step_0"
    for name, frozen, pid in (("slurm", 0, 4), ("user/task_0", 1, 5)):
        (step / name).mkdir(parents=True)
        (step / name / "cgroup.events").write_text(f"populated 1\nfrozen {frozen}\n")
        (step / name / "cgroup.procs").write_text(f"{pid}\n")
    assert list(cgroup_paths.thawed_members_of(":n1_slurmstepd.scope/job_7", tmp_path)) == [4]


def test_only_a_root_process_is_a_slurmstepd() -> None:
    """A user's process may call itself slurmstepd; here the name alone is missing."""
    assert slurm_steps.step_of(os.getpid()) is None


class Time:
    """A clock that stands still until a test moves it."""

    passed = 100.0

    def now(self) -> float:
        return 1_700_000_000.0 + self.passed

    def monotonic(self) -> float:
        return self.passed


class Seen:
    """A host whose jobs 1, 2, … want GPU 0, and show what a test says."""

    def __init__(self, service: str = "") -> None:
        self.time = Time()
        self.states: dict[int, slurm_steps.Shown] = {}
        self.host = Host(
            AgentSettings(service=service), self.time, "n1", look=lambda lease: self.states.get(lease.job, "running")
        )
        channel = Channel(self.time, Path("lock"), lambda *_: None)
        coordinator = StopCoordinator(self.host, lambda: 1 << 40, DriverController(self.host, lambda: 0, channel))
        self.arbiter = Arbiter(self.host, coordinator)

    def job(self, number: int, **facts: bool) -> Lease:
        return self.host.leases.register(Lease(number, 0, 0, (0,), 0.0), self.time.now())

    def facts(self, **suspended: bool) -> None:
        jobs = tuple(
            orders.JobFacts(int(name[1:]), 0, True, 1.0, 0, "", 1, suspended=flag) for name, flag in suspended.items()
        )
        self.host.facts = orders.Facts(orders.VERSION, jobs, 60.0, share_between_users=True, enforce=True)
        self.host.heard_at = self.time.passed

    def after(self, seconds: float) -> None:
        self.time.passed += seconds
        self.arbiter.settle()


def test_a_frozen_job_gets_no_turn_without_the_service() -> None:
    seen = Seen()
    frozen, other = seen.job(1), seen.job(2)
    seen.states[1] = "frozen"
    seen.after(1.0)
    assert (frozen.state, other.state) == ("waiting", "held")


@pytest.mark.parametrize(("shown", "state"), [("frozen", "waiting"), ("gone", "waiting"), ("running", "held")])
def test_of_a_job_that_the_last_facts_call_suspended_the_processes_are_looked_at(
    shown: slurm_steps.Shown, state: str
) -> None:
    """The service may have died before its suspend, or a watchdog have resumed the job since."""
    assert shown in get_args(slurm_steps.Shown)
    seen = Seen("tcp://ctl:6820")
    lease = seen.job(1)
    seen.facts(j1=True)
    seen.states[1] = shown
    seen.after(1.0)
    assert lease.state == "waiting", "the service is there and has not resumed it"
    seen.after(seen.host.settings.service_timeout_s + 1)
    assert lease.state == state


@pytest.mark.parametrize(("suspended", "shown"), [(False, "frozen"), (True, "running")])
def test_processes_that_contradict_slurm_are_reported_once_that_lasts(
    suspended: bool, shown: slurm_steps.Shown
) -> None:
    seen = Seen("tcp://ctl:6820")
    lease = seen.job(1)
    seen.facts(j1=suspended)
    seen.states[1] = shown
    report = seen.host.lease_report(lease)
    assert (report.shown, report.amiss) == (shown, "")
    seen.time.passed += AMISS_S
    assert "Slurm calls it" in seen.host.lease_report(lease).amiss
    seen.facts(j1=not suspended)
    assert seen.host.lease_report(lease).amiss == ""
    seen.facts(j1=suspended)
    seen.time.passed += seen.host.settings.service_timeout_s + 1
    assert seen.host.lease_report(lease).amiss == "", "old facts are no word of Slurm's"
