"""Limits by control groups of version 2 (kernel documentation, admin-guide/cgroup-v2), in the job's own group.

Slurm never writes ``cpu.max`` and ``cpu.weight``. Whenever a step starts, it writes ``cpuset.cpus`` again and, with
ConstrainRAMSpace, ``memory.high`` and ``memory.max``, so the agent checks these regularly.
"""

from __future__ import annotations

from pathlib import Path

from cadenza.policies.core.text import ranges
from cadenza.sidecar.agent.ipc.cgroup_paths import below
from cadenza.sidecar.agent.ipc.processes import text_of
from cadenza.sidecar.agent.tuning.limits import (
    MB,
    PERIOD_US,
    Pids,
    Saved,
    megabytes,
    put,
    put_bandwidth,
    rebind,
)
from cadenza.sidecar.agent.tuning.planner import MILLI, Grant
from cadenza.sidecar.agent.tuning.topology import parse

BURST = "cpu.max.burst"
FILES = ("cpuset.cpus", "cpu.max", BURST, "cpu.weight", "memory.high", "memory.max")
UNLIMITED = f"max {PERIOD_US}"
WEIGHT = 100
"""The kernel's default, which all untuned jobs have."""


class CgroupV2:
    """The group of one job. ``saved`` holds the values before an earlier agent's first change, or is filled."""

    means = "cgroup v2"

    def __init__(self, job: Path, pids: Pids, saved: Saved, everywhere: frozenset[int]) -> None:
        self._job = job
        self._pids = pids
        self._saved = saved
        self._all = everywhere
        if not saved:
            saved.update({name: text_of(job / name) for name in FILES})
        self.own = parse(saved.get("cpuset.cpus", ""))
        self.ceiling_mb = megabytes(saved.get("memory.max", ""))
        self._given = parse(text_of(job / "cpuset.cpus"))

    def apply(self, grant: Grant, floor_milli: int) -> None:
        """Set weight, quota, memory.high, and the cpusets of the job and of steps that have all of it."""
        # Not memory.max: Slurm writes it again as a step starts, and a job that has grown beyond would be killed.
        if grant.memory_mb:
            put(self._job / "memory.high", str(grant.memory_mb * MB))
        if grant.milli:
            quota = grant.quota or not (self._job / "cpuset.cpus").exists()
            put(self._job / "cpu.weight", str(max(1, WEIGHT * min(floor_milli, grant.milli) // grant.milli)))
            quota_us = grant.milli * PERIOD_US // MILLI if quota else 0
            limit = f"{quota_us} {PERIOD_US}" if quota else UNLIMITED
            put_bandwidth(self._job / "cpu.max", self._job / BURST, limit, quota_us)
            self._bind(grant.cpus)

    def restore(self) -> None:
        """Write back the former values; the kernel's defaults where Slurm had set none."""
        put(self._job / "cpu.weight", self._saved.get("cpu.weight") or str(WEIGHT))
        burst = int(self._saved.get(BURST) or 0)
        put_bandwidth(self._job / "cpu.max", self._job / BURST, self._saved.get("cpu.max") or UNLIMITED, burst)
        put(self._job / "memory.high", self._saved.get("memory.high") or "max")
        self._bind(self.own)

    def _bind(self, cpus: frozenset[int]) -> None:
        """Give CPUs to the job's group, to groups below it that had all of its CPUs, and to their threads."""
        earlier = {self.own, self._given}
        # A step's group is bounded by the job's, but keeps its own list: one that had all of the job's CPUs follows,
        # one that Slurm bound to some of them (--cpu-bind) stays.
        for folder in below(self._job):
            path = folder / "cpuset.cpus"
            has = parse(text_of(path))
            if has != cpus and (folder == self._job or (has and has in earlier)):
                put(path, ranges(cpus))
        masks = {self.own or self._all, self._given or self._all}
        self._given = cpus
        rebind(self._pids(), cpus or self._all, masks)
