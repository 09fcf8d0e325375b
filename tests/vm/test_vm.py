"""Turns, freezing, tuning and the shipped units under Debian's kernel with cgroup v2 and systemd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from virtual_machine import OUTAGE, PAGE, PATIENCE_S, Machine, phase

from cluster import SHARED, wait_for

pytestmark = [pytest.mark.vm, pytest.mark.timeout(3600)]

UNITS = ("slurmctld", "slurmd@node1", "slurmd@node1-l1", "cadenzad", "cadenza-web", "cadenza-agent")
LONG = 100_000
"""Iterations of jobs that run until they are canceled: in emulation a round may take longer than a job of a minute."""
OUTAGE_S = 20
"""Time without an agent; longer than a slice."""
EXPOSURE = 4.0
"""Most that `systemd-analyze security` may say of a unit that does not run as root."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    one = Machine("vm", console=tmp_path_factory.mktemp("vm") / "console.log")
    try:
        one.boot()
        yield one
    finally:
        one.down()


@pytest.fixture
def idle(machine: Machine) -> Machine:
    """The machine without jobs, with both lanes open."""
    for user in ("alice", "bob"):
        machine.ctl("scancel", f"--user={user}")
    wait_for("an empty queue", lambda: not machine.ctl("squeue", "-h").strip(), PATIENCE_S)
    wait_for("two idle nodes", lambda: machine.ctl("sinfo", "-hN", "-o", "%T").split() == ["idle"] * 2, PATIENCE_S)
    return machine


def test_systemd_boots_the_machine_with_every_unit_and_cgroup_v2_only(
    machine: Machine, measured: Callable[[str], None]
) -> None:
    assert machine.ctl("systemctl", "--failed", "--no-legend") == ""
    assert {machine.shows(unit, "ActiveState") for unit in UNITS} == {"active"}
    kinds = machine.ctl("findmnt", "--list", "--noheadings", "--output", "FSTYPE,TARGET").splitlines()
    assert [row.split() for row in kinds if row.startswith("cgroup")] == [["cgroup2", "/sys/fs/cgroup"]]
    assert "CgroupPlugin=cgroup/v2" in machine.ctl("scontrol", "show", "config").replace(" ", "")
    versions = "uname -rv; systemctl --version | head -1; slurmctld -V; systemd-detect-virt; systemd-analyze | head -1"
    measured(machine.ctl("sh", "-c", versions).replace("\n", "; "))


def test_two_jobs_take_turns_and_the_frozen_one_does_nothing_while_there_is_no_agent(
    idle: Machine, measured: Callable[[str], None]
) -> None:
    numbers = {"alice": LONG, "bob": LONG + 1}
    claims = f"--claim-dir {SHARED}/claims"
    jobs = {user: idle.paced(user, number, "--gres=gpu:4", claims=claims) for user, number in numbers.items()}

    def shown(user: str) -> tuple[str, str]:
        return phase(idle.groups(numbers[user])), idle.state(jobs[user])

    both = {("frozen", "SUSPENDED"), ("running", "RUNNING")}
    wait_for("one job runs and Slurm has frozen the other", lambda: set(map(shown, numbers)) == both, PATIENCE_S)
    before = idle.shows("cadenza-agent", "NRestarts")
    with idle.setting("cadenza-agent", f"RestartSec={OUTAGE_S}"):
        words = [idle.shows("cadenza-agent", "MainPID"), *map(idle.process, numbers.values())]
        samples = json.loads(idle.ctl("python3", "-c", OUTAGE, *words, timeout=2 * PATIENCE_S))
    since, states, used = zip(*samples, strict=True)
    held = states[0].index(1)
    assert since[-1] - since[0] >= OUTAGE_S - 3
    assert [state for state in states if state != states[0]] == []
    assert states[0][1 - held] == 0
    assert {pair[held] for pair in used} == {used[0][held]}, "it had CPU time while it was frozen"
    assert used[-1][1 - held] > used[0][1 - held], "the other one stood still"
    measured(f"{len(samples)} samples in {since[-1] - since[0]:.0f} s without an agent; the other job had"
             f" {(used[-1][1 - held] - used[0][1 - held]) / 1e6:.1f} s of CPU time")  # fmt: skip
    wait_for("systemd starts the agent again", lambda: idle.shows("cadenza-agent", "NRestarts") != before, PATIENCE_S)
    user = list(numbers)[held]
    wait_for("the frozen job runs again", lambda: shown(user) == ("running", "RUNNING"), PATIENCE_S)
    ((yields,),) = idle.sql("select count(*) from switches where kind = 'yield'")
    measured(f"{yields} yields")
    assert yields >= 2


def test_cpus_follow_the_profile_in_the_cpuset_of_the_jobs_group_and_come_back_for_another_job(idle: Machine) -> None:
    number = LONG + 2
    idle.paced("alice", number, "--gres=gpu:1", "--cpus-per-task=1", "--nodelist=node1", model="steep")

    def has(cpuset: str) -> dict[str, Any]:
        groups = idle.groups(number)
        return groups if groups and groups["files"]["cpuset.cpus"] == [cpuset] else {}

    groups = wait_for("both CPUs while it is alone", lambda: has("0-1"), PATIENCE_S)
    assert groups["job"].startswith("/sys/fs/cgroup/system.slice/"), "the scope that systemd delegates to Slurm"
    assert groups["files"]["memory.max"] == [str(200 << 20)], "Slurm's limit stays"
    assert groups["files"]["memory.high"] != ["max"]
    other = idle.sbatch("--mem=100", "--cpus-per-task=1", "--gres=gpu:1", "--nodelist=node1", command="sleep 600")
    idle.wait_state(other, "RUNNING", timeout=PATIENCE_S)
    wait_for("one CPU beside another job", lambda: has("0") or has("1"), PATIENCE_S)
    idle.ctl("scancel", str(other))
    wait_for("both CPUs again", lambda: has("0-1"), PATIENCE_S)
    idle.service("", "stop", "cadenza-agent")
    wait_for("Slurm's values without an agent", lambda: has("0") or has("1"), PATIENCE_S)
    idle.service("", "start", "cadenza-agent")


def test_the_web_unit_shows_users_their_own_jobs_and_the_group_of_the_store_all(idle: Machine) -> None:
    job = idle.sbatch("--mem=100", "--gres=gpu:1", "--job-name=of-alice", command="sleep 600")

    def page(path: str, user: str) -> str:
        return idle.ctl("python3", "-c", PAGE, path, user=user)

    wait_for("the job on the page", lambda: "of-alice" in page("/", "alice"), PATIENCE_S)
    assert "alice, own jobs" in page(f"/jobs/{job}", "alice")
    assert "nothing on record of a job of yours" in page(f"/jobs/{job}", "bob")
    for user in ("root", "cadenza"):
        assert f"{user}, all jobs" in page("/", user)
        assert "of-alice" in page(f"/jobs/{job}", user)


def test_systemd_starts_an_agent_again_that_hangs(idle: Machine) -> None:
    before = idle.shows("cadenza-agent", "MainPID")
    idle.ctl("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "cadenza-agent")
    wait_for("another agent", lambda: idle.shows("cadenza-agent", "MainPID") not in (before, "0"), PATIENCE_S)
    wait_for("it is up", lambda: idle.shows("cadenza-agent", "ActiveState") == "active", PATIENCE_S)
    assert "Watchdog timeout" in idle.ctl("journalctl", "--no-pager", "-u", "cadenza-agent")


@pytest.mark.parametrize("unit", ["cadenzad", "cadenza-web", "cadenza-agent"])
def test_a_unit_stops_starts_and_restarts(idle: Machine, unit: str) -> None:
    idle.service("", "stop", unit)
    assert idle.shows(unit, "ActiveState") == "inactive"
    assert idle.shows(unit, "Result") == "success"
    idle.service("", "start", unit)
    before = idle.shows(unit, "MainPID")
    idle.service("", "restart", unit)
    assert idle.shows(unit, "ActiveState") == "active"
    assert idle.shows(unit, "MainPID") != before


def test_units_are_confined(machine: Machine, measured: Callable[[str], None]) -> None:
    exposure = {}
    for unit in ("cadenzad", "cadenza-web", "cadenza-agent"):
        lines = machine.ctl("systemd-analyze", "security", "--no-pager", f"{unit}.service").splitlines()
        exposure[unit] = float(lines[-1].partition(": ")[2].split()[0])
    measured(f"exposure by systemd-analyze security: {exposure}")
    assert max(exposure["cadenzad"], exposure["cadenza-web"]) <= EXPOSURE
