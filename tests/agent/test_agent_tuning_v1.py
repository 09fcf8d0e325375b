"""Limits on real processes in real control groups of version 1, and by affinity."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rig import until
from cgroup_rig import MOUNT, SlurmTree, group_of, real_v1, slurm_tree

from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.tuning import topology
from cadenza.sidecar.agent.tuning.cgroup_v1 import sweep
from cadenza.sidecar.agent.tuning.detect import limits_of
from cadenza.sidecar.agent.tuning.limits import Limits, Saved
from cadenza.sidecar.agent.tuning.planner import Grant

ALL = frozenset(os.sched_getaffinity(0))
NAME = f"t{os.getpid()}"
OURS = f"cadenza_{NAME}_17"
ONE = Grant(1000, 300, frozenset({1}), quota=False)
BOTH = Grant(2000, 400, frozenset({0, 1}), quota=False)

two_cpus = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")
pytestmark = [real_v1, two_cpus]


@pytest.fixture(params=[False, True], ids=["free", "constrained"])
def tree(request: pytest.FixtureRequest) -> Iterator[SlurmTree]:
    with slurm_tree(NAME, constrained=request.param) as made:
        yield made


def limits(*pids: int, saved: Saved | None = None, cgroups: bool = True) -> Limits:
    found = limits_of(lambda: pids, OURS, {} if saved is None else saved, ALL, cgroups=cgroups)
    assert found is not None
    return found


def value(controller: str, file: str) -> str:
    return (MOUNT / controller / OURS / file).read_text().strip()


def test_a_job_gets_cpus_beyond_its_steps_and_goes_back(tree: SlurmTree) -> None:
    job = tree.run(17, 0, threads=1, cpus="0")
    before = {controller: group_of(job.pid, controller) for controller in ("cpuset", "cpu", "freezer", "memory")}
    bound = os.sched_getaffinity(job.pid)
    one = limits(job.pid)
    assert one.means == "cgroup v1"
    assert one.own == ({0} if "cpuset" in tree.controllers else set())
    one.apply(BOTH, floor_milli=1000)
    assert os.sched_getaffinity(job.pid) == {0, 1}
    assert (value("cpu", "cpu.shares"), value("cpu", "cpu.cfs_quota_us")) == ("1024", "-1")
    soft = MOUNT / "memory" / f"slurm_{NAME}/uid_0/job_17/memory.soft_limit_in_bytes"
    assert int(soft.read_text()) == 400 << 20
    one.apply(ONE, floor_milli=1000)
    assert os.sched_getaffinity(job.pid) == {1}
    one.restore()
    assert {controller: group_of(job.pid, controller) for controller in before} == before
    assert os.sched_getaffinity(job.pid) == bound
    assert int(soft.read_text()) > 1 << 60
    assert not (MOUNT / "cpuset" / OURS).exists()


def test_a_new_step_starts_as_slurm_says_and_is_brought_in(tree: SlurmTree) -> None:
    job = tree.run(17, 0, cpus="0")
    one = limits(job.pid)
    one.apply(BOTH, floor_milli=1000)
    later = tree.run(17, 1, cpus="0")  # writes the job's cpuset again, which must not fail
    assert group_of(later.pid, "cpuset") != f"/{OURS}"
    one.apply(BOTH, floor_milli=1000)
    assert group_of(later.pid, "cpuset") == f"/{OURS}"
    assert os.sched_getaffinity(later.pid) == {0, 1}
    one.restore()
    home = group_of(later.pid, "freezer") if "cpuset" in tree.controllers else "/"
    assert group_of(later.pid, "cpuset") == home


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_quota_gives_a_part_of_a_cpu(tree: SlurmTree) -> None:
    job = tree.run(17, 0, threads=1, cpus="0-1")
    limits(job.pid).apply(Grant(250, 0, frozenset({0, 1}), quota=True), floor_milli=500)
    assert (value("cpu", "cpu.shares"), value("cpu", "cpu.cfs_quota_us")) == ("512", "25000")
    throttled = MOUNT / "cpu" / OURS / "cpu.stat"
    until(lambda: "nr_throttled 0" not in throttled.read_text(), "the kernel to hold the job back")


@pytest.mark.skipif(not (MOUNT / "cpu/cpu.cfs_burst_us").exists(), reason="this kernel knows no bursts")
def test_what_a_quota_leaves_of_one_period_may_be_used_in_the_next(tree: SlurmTree) -> None:
    job = tree.run(17, 0, cpus="0-1")
    one, cpus = limits(job.pid), frozenset({0, 1})
    for milli in (500, 250, 750):
        one.apply(Grant(milli, 0, cpus, quota=True), floor_milli=500)
        assert value("cpu", "cpu.cfs_burst_us") == value("cpu", "cpu.cfs_quota_us") == str(milli * 100)
    one.apply(Grant(2000, 0, cpus, quota=False), floor_milli=500)
    assert (value("cpu", "cpu.cfs_burst_us"), value("cpu", "cpu.cfs_quota_us")) == ("0", "-1")


def test_threads_that_chose_their_cpu_keep_it(tree: SlurmTree) -> None:
    job = tree.run(17, 0, threads=2, cpus="0-1")
    own = max(int(task.name) for task in Path(f"/proc/{job.pid}/task").iterdir())
    os.sched_setaffinity(own, {0})
    one = limits(job.pid)
    one.apply(BOTH, floor_milli=2000)
    one.apply(ONE, floor_milli=2000)
    one.apply(BOTH, floor_milli=2000)
    assert os.sched_getaffinity(job.pid) == {0, 1}
    assert os.sched_getaffinity(own) == {0}


def test_another_agent_goes_on_where_the_first_stopped(tree: SlurmTree) -> None:
    job = tree.run(17, 0, cpus="0")
    before, saved = group_of(job.pid, "cpuset"), Saved()
    limits(job.pid, saved=saved).apply(BOTH, floor_milli=1000)
    second = limits(job.pid, saved=saved)
    assert second.own == ({0} if "cpuset" in tree.controllers else set())
    second.apply(ONE, floor_milli=1000)
    assert os.sched_getaffinity(job.pid) == {1}
    second.restore()
    assert group_of(job.pid, "cpuset") == before


def test_groups_that_a_dead_agent_left_are_removed(tree: SlurmTree) -> None:
    job = tree.run(17, 0)
    limits(job.pid).apply(BOTH, floor_milli=1000)
    sweep(Path("/"), f"cadenza_{NAME}_", frozenset())
    assert (MOUNT / "cpuset" / OURS).exists(), "a group in use stays"
    job.kill()
    job.wait()
    sweep(Path("/"), f"cadenza_{NAME}_", frozenset())
    assert not (MOUNT / "cpuset" / OURS).exists()


def test_other_jobs_of_slurm_are_seen(tree: SlurmTree) -> None:
    job = tree.run(17, 0)
    tree.run(18, 0)
    seen = [folder for folder in cgroup_paths.of(job.pid).all_jobs() if f"slurm_{NAME}" in folder.parts]
    assert {folder.name for folder in seen} == {"job_17", "job_18"}, "those of a real Slurm on this machine aside"


def test_affinity_where_groups_are_not_to_be_had() -> None:
    worker = "import os, sys; os.fork(); os.write(1, b'ready\\n'); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        saved = Saved()
        one = limits(job.pid, saved=saved, cgroups=False)
        assert one.means == "affinity"
        one.apply(ONE, floor_milli=1000)
        for pid in (job.pid, *children):
            assert os.sched_getaffinity(pid) == {1}
        limits(job.pid, saved=saved, cgroups=False).restore()
        for pid in (job.pid, *children):
            assert os.sched_getaffinity(pid) == ALL
        job.stdin.close()


def test_this_machines_topology() -> None:
    here = topology.read()
    assert {cpu.id for cpu in here.cpus} >= ALL
    assert here.memory_mb > 100
