"""Choice of a job's limits on this host: its control groups if they can be written, otherwise CPU affinity."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.tuning.cgroup_v1 import CgroupV1
from cadenza.sidecar.agent.tuning.cgroup_v2 import CgroupV2
from cadenza.sidecar.agent.tuning.limits import Affinity, Limits, Pids, Saved

PROBES = ("cpu.max", "cpuset.cpus", "cgroup.procs")


def limits_of(
    pids: Callable[[], Iterable[int]],
    name: str,
    saved: Saved,
    everywhere: frozenset[int],
    *,
    cgroups: bool = True,
    root: Path = Path("/"),
) -> Limits | None:
    """Return the limits of a job; None while none of its processes lives.

    ``pids`` returns the processes known to the agent, ``name`` is for the agent's groups. The means are chosen once:
    ``saved`` has those of an earlier agent.
    """
    alive = next((pid for pid in pids() if (root / f"proc/{pid}").exists()), None)
    if alive is None:
        return None
    where = cgroup_paths.of(alive, root)
    members = _members(pids, root)
    means = saved.pop("means", "") or _means(where, cgroups=cgroups)
    if means == CgroupV2.means and (job := where.job("")) is not None:
        limits: Limits = CgroupV2(job, members, saved, everywhere)
    elif means == CgroupV1.means:
        limits = CgroupV1(where, name, members, saved, everywhere)
    else:
        limits = Affinity(members, saved, _affinity(alive, everywhere), everywhere)
    saved["means"] = limits.means
    return limits


def writable_groups(root: Path = Path("/")) -> bool:
    """Return True if control groups of either version can be written on this host at all."""
    mount = root / cgroup_paths.MOUNT
    return any(_writable(mount / name / PROBES[2]) for name in ("", "unified", "cpuset", "cpu"))


def _means(where: cgroup_paths.Groups, *, cgroups: bool) -> str:
    """Return the most reliable means that works here."""
    job = where.job("")
    if cgroups and job is not None and any(_writable(job / probe) for probe in PROBES[:2]):
        return CgroupV2.means
    for controller in ("cpuset", "cpu"):
        parent = where.outside(controller) if controller in where.paths else None
        if cgroups and parent is not None and os.access(parent, os.W_OK) and _writable(parent / PROBES[2]):
            return CgroupV1.means
    return Affinity.means


def _writable(path: Path) -> bool:
    """Return True if a control file exists and can be written; a read-only mount refuses even root."""
    return path.exists() and os.access(path, os.W_OK)


def _affinity(pid: int, everywhere: frozenset[int]) -> frozenset[int]:
    """Return the CPUs that a process may run on."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return everywhere


def _members(pids: Callable[[], Iterable[int]], root: Path) -> Pids:
    """Return a function that finds a job's processes: by its groups, or the known ones and their descendants."""

    def members() -> frozenset[int]:
        roots = tuple(pids())
        for pid in roots:
            if group := cgroup_paths.of(pid, root).members():
                return group
        return _descendants(roots)

    return members


def _descendants(pids: Iterable[int]) -> frozenset[int]:
    """Return processes and all their descendants."""
    family: set[int] = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family |= {pid, *(child.pid for child in process.children(recursive=True))}
        except psutil.Error:
            continue
    return frozenset(family)
