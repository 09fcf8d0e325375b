"""Memory of the host and of control groups, as the kernel counts it (cgroup-v1/memory.txt, cgroup-v2.txt, psi.txt).

Page cache that the kernel can drop counts as free: a job that reads its data fills its limit with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.ipc.processes import text_of

CGROUPS = Path("/sys/fs/cgroup")
PRESSURE = Path("/proc/pressure/memory")


class MemoryFiles(NamedTuple):
    """File names of one version of the memory controller, and the controller's folder below the mount."""

    mount: str
    limit: str
    usage: str
    cache: str

    def limit_of(self, group: Path) -> int | None:
        """Return a group's limit in bytes; None without one."""
        return _number(group / self.limit)

    def used_in(self, group: Path) -> int | None:
        """Return the bytes in use in a group and all below it; None where that is not counted."""
        used = _number(group / self.usage)
        lines = (line.split() for line in text_of(group / "memory.stat").splitlines()) if used is not None else ()
        cache = next((int(line[1]) for line in lines if line[:1] == [self.cache] and line[1].isdigit()), 0)
        return None if used is None else max(0, used - cache)


V1 = MemoryFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = MemoryFiles("", "memory.max", "memory.current", "inactive_file")


class HostMemory(NamedTuple):
    """Bytes of the host, or of the container that the agent runs in."""

    total: int
    available: int


def host_memory(cgroups: Path = CGROUPS) -> HostMemory:
    """Return the memory that exists and the part that can be taken without swapping (proc_meminfo(5))."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    # In a container /proc/meminfo shows the host, and the limit of its group what it may have.
    for files in (V1, V2):
        top = cgroups / files.mount
        limit, used = files.limit_of(top), files.used_in(top)
        if limit is not None and used is not None and limit < total:
            total, available = limit, min(available, limit - used)
    return HostMemory(total, max(0, available))


def job_bytes(pids: Iterable[int], root: Path = Path("/")) -> int:
    """Return the memory of a job's processes: that of its control group, else of their resident sets.

    Of these the pages of files, which the kernel can drop, are left out, and shared memory counts once
    (proc_pid_status(5)).
    """
    private, shared = 0, 0
    for pid in pids:
        groups = cgroup_paths.of(pid, root)
        folder, files = (groups.job("memory"), V1) if "memory" in groups.paths else (groups.job(""), V2)
        group = files.used_in(folder) if folder is not None else None
        if group is not None:
            return group
        lines = (line.split() for line in text_of(root / f"proc/{pid}/status").splitlines())
        kilobytes = {line[0]: int(line[1]) for line in lines if line and line[0] in ("RssAnon:", "RssShmem:")}
        private += kilobytes.get("RssAnon:", 0) << 10
        shared = max(shared, kilobytes.get("RssShmem:", 0) << 10)
    return private + shared


def pressure_percent(path: Path = PRESSURE) -> float:
    """Return the share of the last ten seconds in which some process waited for memory; 0 where nothing counts it."""
    for line in text_of(path).splitlines():
        kind, _, rest = line.partition(" avg10=")
        if kind == "some":
            return float(rest.split(maxsplit=1)[0])
    return 0.0


def _number(path: Path) -> int | None:
    """Return a file's number; None for ``max`` and for a file that cannot be read."""
    text = text_of(path)
    return int(text) if text.isdigit() else None
