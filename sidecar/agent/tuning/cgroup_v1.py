"""Limits by control groups of version 1 (kernel documentation, admin-guide/cgroup-v1).

*cpuset*: the job's processes move to a group of the agent's next to Slurm's tree. *cpu*: ``cpu.cfs_quota_us`` and
``cpu.shares``, which Slurm never writes, in the job's group if Slurm has one (it counts CPU time there), otherwise in a
group of the agent's. *memory*: ``memory.soft_limit_in_bytes``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from cadenza.policies.core.text import ranges
from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.ipc.cgroup_paths import Groups
from cadenza.sidecar.agent.ipc.processes import text_of
from cadenza.sidecar.agent.tuning.limits import (
    MB,
    PERIOD_US,
    Pids,
    Saved,
    TuningError,
    megabytes,
    put,
    put_bandwidth,
    rebind,
)
from cadenza.sidecar.agent.tuning.planner import MILLI, Grant
from cadenza.sidecar.agent.tuning.topology import parse

SHARES = 1024
"""The weight of one task outside of any group."""
UNLIMITED = -1
"""The quota of a group that has none."""
SOFT = "memory.soft_limit_in_bytes"
MAX_PASSES = 4
"""Attempts to move all processes; those forked after the last one are moved at the next check."""


class CgroupV1:
    """The groups of one job; the agent's are called ``name``; ``saved`` as in :class:`.cgroup_v2.CgroupV2`."""

    means = "cgroup v1"

    def __init__(self, where: Groups, name: str, pids: Pids, saved: Saved, everywhere: frozenset[int]) -> None:
        self._root = where.root
        self._pids = pids
        self._saved = saved
        self._all = everywhere
        self._memory = where.job("memory")
        self._cpu_of_slurm = where.job("cpu")
        self._cpu = self._cpu_of_slurm or _ours(where, "cpu", name)
        # Slurm's own cpusets stay as they are: the kernel refuses to make a group smaller than one below it, so a step
        # of a job whose groups had been widened could not start.
        self._cpuset = _ours(where, "cpuset", name)
        slurm_cpuset = where.job("cpuset")
        if not saved:
            saved["shares"] = text_of(self._cpu_of_slurm / "cpu.shares") if self._cpu_of_slurm else ""
            saved[SOFT] = text_of(self._memory / SOFT) if self._memory else ""
            saved["cpus"] = text_of(slurm_cpuset / "cpuset.cpus") if slurm_cpuset else ""
        self.own = parse(saved["cpus"])
        self.ceiling_mb = megabytes(text_of(self._memory / "memory.limit_in_bytes")) if self._memory else None
        self._given = parse(text_of(self._cpuset / "cpuset.cpus")) if self._cpuset else frozenset()

    def apply(self, grant: Grant, floor_milli: int) -> None:
        """Set the limits, and move the job's processes to the agent's groups."""
        pids = self._pids() if grant.milli else frozenset()
        if self._cpuset is not None and grant.milli:
            self._bind(self._cpuset, grant.cpus, pids)
        if self._cpu is not None and grant.milli:
            quota = grant.quota or self._cpuset is None
            self._weigh(self._cpu, floor_milli, grant.milli * PERIOD_US // MILLI if quota else UNLIMITED, pids)
        # Version 1 has no throttle like memory.high, and a lower memory.limit_in_bytes would kill instead.
        if self._memory is not None and grant.memory_mb:
            put(self._memory / SOFT, str(grant.memory_mb * MB))

    def restore(self) -> None:
        """Move the processes back to Slurm's groups and remove the agent's."""
        if self._memory is not None:
            put(self._memory / SOFT, self._saved[SOFT] or "-1")
        if self._cpu_of_slurm is not None:
            self._limit(self._cpu_of_slurm, UNLIMITED)
            put(self._cpu_of_slurm / "cpu.shares", self._saved["shares"] or str(SHARES))
        elif self._cpu is not None:
            self._leave(self._cpu, "cpu")
        if self._cpuset is not None:
            masks = {self._given or self._all}
            self._leave(self._cpuset, "cpuset")
            rebind(self._pids(), self.own or self._all, masks)

    def _bind(self, folder: Path, cpus: frozenset[int], pids: frozenset[int]) -> None:
        """Bring the job's processes into the agent's cpuset."""
        masks = {self.own or self._all, self._given or self._all}
        _make(folder)
        # A new cpuset has neither CPUs nor memory nodes, and takes no process before it has both (cpusets.rst).
        if not text_of(folder / "cpuset.mems"):
            put(folder / "cpuset.mems", text_of(folder.parent / "cpuset.mems"))
        put(folder / "cpuset.cpus", ranges(cpus))
        _move(folder, pids, self._pids)
        rebind(pids, cpus, masks)
        self._given = cpus

    def _weigh(self, folder: Path, floor_milli: int, quota_us: int, pids: frozenset[int]) -> None:
        """Set quota and shares; the shares are those of as many tasks as the job's floor has CPUs."""
        if folder != self._cpu_of_slurm:
            _make(folder)
        # The kernel takes no shares below 2.
        put(folder / "cpu.shares", str(max(2, SHARES * floor_milli // MILLI)))
        put(folder / "cpu.cfs_period_us", str(PERIOD_US))
        self._limit(folder, quota_us)
        if folder != self._cpu_of_slurm:
            _move(folder, pids, self._pids)

    @staticmethod
    def _limit(folder: Path, quota_us: int) -> None:
        put_bandwidth(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_burst_us", str(quota_us), max(quota_us, 0))

    def _leave(self, folder: Path, controller: str) -> None:
        """Empty one of the agent's groups and remove it."""
        for _ in range(MAX_PASSES):
            left = [int(line) for line in text_of(folder / "cgroup.procs").split()]
            # A control group is removed only once no process is in it (rmdir(2) answers EBUSY).
            for pid in left:
                home = cgroup_paths.of(pid, self._root).home(controller) or folder.parent
                _add(home, pid)
            if not left:
                break
        with contextlib.suppress(OSError):
            folder.rmdir()


def sweep(root: Path, prefix: str, keep: frozenset[str]) -> None:
    """Remove the agent's empty groups whose job is no longer here."""
    for controller in ("cpu", "cpuset"):
        for folder in (root / cgroup_paths.MOUNT / controller).rglob(f"{prefix}*"):
            if folder.name not in keep:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _ours(where: Groups, controller: str, name: str) -> Path | None:
    """Return the path of the agent's group for a job; None if the controller cannot be used."""
    parent = where.outside(controller)
    return parent / name if parent is not None and (parent / "cgroup.procs").exists() else None


def _make(folder: Path) -> None:
    """Make a group; raise TuningError if it is not allowed."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise TuningError(f"{folder}: cannot be made: {error.strerror}") from None


def _move(folder: Path, pids: frozenset[int], again: Pids) -> None:
    """Move processes into a group until none is left outside."""
    inside = frozenset(int(line) for line in text_of(folder / "cgroup.procs").split())
    for _ in range(MAX_PASSES):
        missing = pids - inside
        if not missing:
            return
        for pid in missing:
            _add(folder, pid)
        inside, pids = inside | missing, again()  # a process may have forked before its own move


def _add(folder: Path, pid: int) -> None:
    """Put one process into a group; one that has ended is no error."""
    try:
        (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")
    except ProcessLookupError:
        return
    except OSError as error:
        raise TuningError(f"{folder}: process {pid} cannot be put there: {error.strerror}") from None
