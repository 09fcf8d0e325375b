"""Limits of control groups version 2 against the files that the kernel shows, with Slurm's layouts and names."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.tuning.detect import limits_of
from cadenza.sidecar.agent.tuning.limits import Limits, Saved, TuningError, put
from cadenza.sidecar.agent.tuning.planner import Grant

PID = 4_194_300
MB = 1 << 20
ALL = frozenset(range(8))
SCOPE = Path("sys/fs/cgroup/system.slice/n1_slurmstepd.scope")
FILES = {
    "cpu.max": "max 100000", "cpu.max.burst": "0", "cpu.weight": "100", "memory.high": "max", "memory.max": "max",
    "cgroup.procs": "",
}  # fmt: skip


def group(root: Path, path: Path, cpus: str, **files: str) -> Path:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**FILES, "cpuset.cpus": cpus, **files}.items():
        (folder / name).write_text(text + "\n")
    return folder


def slurm_job(root: Path, name: str = "job_17", cpus: str = "2-3", **files: str) -> Path:
    """Make the layout of a job with one step on all its CPUs, and let the process be in it."""
    job = group(root, SCOPE / name, cpus, **files)
    group(root, SCOPE / name / "step_0", cpus)
    group(root, SCOPE / name / "step_0/user", "")
    task = group(root, SCOPE / name / "step_0/user/task_0", "")
    (task / "cgroup.procs").write_text(f"{PID}\n")
    (root / f"proc/{PID}").mkdir(parents=True, exist_ok=True)
    inside = "/" + str(task.relative_to(root / "sys/fs/cgroup"))
    (root / f"proc/{PID}/cgroup").write_text(f"0::{inside}\n")
    return job


def limits(root: Path, saved: Saved | None = None) -> Limits:
    found = limits_of(lambda: (PID,), "cadenza_n1_17", {} if saved is None else saved, ALL, root=root)
    assert found is not None
    return found


def values(folder: Path, *names: str) -> list[str]:
    return [(folder / name).read_text().strip() for name in names]


@pytest.mark.parametrize("name", ["job_17", "sFJZ3X5YW1R800"])
def test_the_jobs_group_is_found_by_either_name(tmp_path: Path, name: str) -> None:
    job = slurm_job(tmp_path, name)
    found = cgroup_paths.of(PID, tmp_path)
    assert found.job("") == job
    assert found.members() == {PID}
    assert list(found.all_jobs()) == [job]


@pytest.mark.parametrize(
    "path",
    ["/", "/user.slice/user-1000.slice/session-1.scope", "/system.slice/slurmd.service", "/x/step_0/user"],
)
def test_other_groups_are_no_jobs(tmp_path: Path, path: str) -> None:
    (tmp_path / f"proc/{PID}").mkdir(parents=True)
    (tmp_path / f"proc/{PID}/cgroup").write_text(f"0::{path}\n")
    (tmp_path / "sys/fs/cgroup" / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    assert cgroup_paths.of(PID, tmp_path).job("") is None
    assert limits(tmp_path).means == "affinity"


def test_limits_and_back(tmp_path: Path) -> None:
    job = slurm_job(tmp_path, **{"memory.high": str(900 * MB)})
    one = limits(tmp_path)
    assert (one.means, one.own, one.ceiling_mb) == ("cgroup v2", {2, 3}, None)
    one.apply(Grant(4000, 500, frozenset({2, 3, 4, 5}), quota=False), floor_milli=2000)
    names = ("cpu.max", "cpu.max.burst", "cpu.weight", "memory.high", "cpuset.cpus")
    assert values(job, *names) == ["max 100000", "0", "50", str(500 * MB), "2-5"]
    assert values(job / "step_0", "cpuset.cpus", "cpu.max") == ["2-5", "max 100000"]
    assert values(job / "step_0/user", "cpuset.cpus") == [""]
    one.apply(Grant(1500, 500, frozenset({2, 4}), quota=True), floor_milli=2000)
    assert values(job, *names) == ["150000 100000", "150000", "100", str(500 * MB), "2,4"]
    one.restore()
    assert values(job, *names) == ["max 100000", "0", "100", str(900 * MB), "2-3"]
    assert values(job / "step_0", "cpuset.cpus") == ["2-3"]


def test_a_new_step_and_slurms_rewrites_are_brought_in(tmp_path: Path) -> None:
    job = slurm_job(tmp_path)
    one, grant = limits(tmp_path), Grant(4000, 0, frozenset({2, 3, 4, 5}), quota=False)
    one.apply(grant, floor_milli=2000)
    (job / "cpuset.cpus").write_text("2-3\n")
    group(tmp_path, job.relative_to(tmp_path) / "step_1", "2-3")
    part = group(tmp_path, job.relative_to(tmp_path) / "step_2", "2")
    one.apply(grant, floor_milli=2000)
    assert values(job, "cpuset.cpus") == values(job / "step_1", "cpuset.cpus") == ["2-5"]
    assert values(part, "cpuset.cpus") == ["2"], "a step that was to have a part of the job keeps it"


def test_another_agent_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    job, saved = slurm_job(tmp_path), Saved()
    limits(tmp_path, saved).apply(Grant(4000, 0, frozenset({2, 3, 4, 5}), quota=False), floor_milli=2000)
    second = limits(tmp_path, saved)
    assert second.own == {2, 3}
    second.restore()
    assert values(job, "cpuset.cpus") == values(job / "step_0", "cpuset.cpus") == ["2-3"]


def test_jobs_without_cpusets_get_a_quota(tmp_path: Path) -> None:
    job = slurm_job(tmp_path, cpus="")
    for path in job.rglob("cpuset.cpus"):
        path.unlink()
    one = limits(tmp_path)
    assert one.own == frozenset()
    one.apply(Grant(2000, 0, frozenset({0, 1}), quota=False), floor_milli=1000)
    assert values(job, "cpu.max") == ["200000 100000"]


def test_a_hard_limit_of_slurm_is_a_ceiling(tmp_path: Path) -> None:
    slurm_job(tmp_path, **{"memory.max": str(700 * MB)})
    assert limits(tmp_path).ceiling_mb == 700


def test_a_job_that_ends_meanwhile_is_no_error(tmp_path: Path) -> None:
    job = slurm_job(tmp_path)
    one = limits(tmp_path)
    for path in sorted(job.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    one.apply(Grant(4000, 500, frozenset({2}), quota=True), floor_milli=2000)
    one.restore()


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match=r"cpu\.max.*'max'"):
        put(Path("/proc/self/mounts/cpu.max"), "max")
