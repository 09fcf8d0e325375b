"""Gives the processes of a command so many CPUs, in place: by affinity, and for fractions of a CPU by a cgroup.

Quotas: cgroup v2 ``cpu.max`` (Linux, *Control Group v2*) or v1 ``cpu.cfs_quota_us`` (*CFS Bandwidth Control*), as the
agent gives them to a running job, bursts included: a profile is to say what the job does under those.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.tuning.limits import PERIOD_US, put_bandwidth

CGROUPS = Path("/sys/fs/cgroup")
V1, V2 = "cpu.cfs_quota_us", "cpu.max"
WEIGHTS = {"cpu.shares": "262144", "cpu.weight": "10000"}
"""The maximum of v1 and v2: other processes below the same cgroup get the time that the command leaves."""
CLOSE_TRIES, CLOSE_S = 40, 0.05
"""A process that was waited for leaves its cgroup a moment later."""


class Quota:
    """A cgroup of its own, below the caller's so that whatever limits the caller has stay in force."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._v2 = (path / V2).exists()
        for name, most in WEIGHTS.items():
            if (path / name).exists():
                (path / name).write_text(most)

    @property
    def entry(self) -> Path:
        """Return the file into which a process writes 0 to join."""
        return self.path / "cgroup.procs"

    def set(self, cpus: float | None) -> None:
        """Allow so many CPUs' time, None: all."""
        most_us = 0 if cpus is None else round(cpus * PERIOD_US)
        if self._v2:
            put_bandwidth(self.path / V2, self.path / "cpu.max.burst", f"{most_us or 'max'} {PERIOD_US}", most_us)
        else:
            put_bandwidth(self.path / V1, self.path / "cpu.cfs_burst_us", str(most_us or -1), most_us)

    def pids(self) -> tuple[int, ...]:
        """Return the processes inside."""
        with contextlib.suppress(OSError):
            return tuple(map(int, self.entry.read_text().split()))
        return ()

    def close(self) -> None:
        """Remove the cgroup as soon as its last process is gone; it stays when one does not end."""
        for _ in range(CLOSE_TRIES):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                threading.Event().wait(CLOSE_S)


def open_quota(name: str, root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Quota | None:
    """Make a cgroup of this name with a CPU controller; None where that is not allowed."""
    for parent in parents(own.read_text(encoding="utf-8"), root):
        path = parent / name
        with contextlib.suppress(OSError):
            path.mkdir(exist_ok=True)
            if any(os.access(path / file, os.W_OK) for file in (V1, V2)):
                return Quota(path)
            path.rmdir()
    return None


def parents(own: str, root: Path) -> list[Path]:
    """Return possible parents of a cgroup next to or below the caller's, from the text of ``/proc/self/cgroup``.

    In v1 the caller's own; in v2 the one above, since there a cgroup with processes has no controllers below it.
    """
    found = []
    for line in own.split():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            found.append(root / controllers / path.lstrip("/"))
            # Distributions mount cpu and cpuacct together, with a link of one name to both.
            found.append(root / "cpu" / path.lstrip("/"))
        elif not controllers:
            found.append((root / path.lstrip("/")).parent if path != "/" else root)
    return [path for path in found if path.is_dir()]


class Limit:
    """The CPUs of one command: ``ids`` are those that it may have, in the order in which they are given."""

    def __init__(self, ids: Sequence[int], quota: Quota | None) -> None:
        self.ids = tuple(ids)
        self.quota = quota

    def check(self, points: Iterable[float]) -> None:
        """Raise EnvironmentLacks when a point cannot be given."""
        for cpus in points:
            if cpus > len(self.ids):
                raise EnvironmentLacks(f"{cpus:g} CPUs cannot be given: this process may use {len(self.ids)}")
            if cpus % 1 and self.quota is None:
                raise EnvironmentLacks(
                    f"{cpus:g} CPUs need a cgroup with a CPU quota, which this user may not make: "
                    "give whole numbers, or run as root or in a delegated cgroup (systemd-run --user -p Delegate=cpu)"
                )

    def set(self, cpus: float, pids: Iterable[int]) -> None:
        """Give the processes, and what they start from now on, so many CPUs."""
        if self.quota is not None:
            self.quota.set(cpus if cpus % 1 else None)
        allowed = self.ids[: math.ceil(cpus)]
        for pid in pids:
            pin(pid, allowed)


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Bind every thread of a process to CPUs; one that has just ended is passed over."""
    allowed = set(cpus)
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                # The call binds one thread; what the thread starts from now on inherits it.
                os.sched_setaffinity(int(thread), allowed)


def own_cpus(topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return the CPUs of this process by socket, the threads of a core next to each other, as Slurm does."""

    def place(cpu: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{cpu}" / "topology"
        try:
            socket = int((folder / "physical_package_id").read_text())
            core = int((folder / "core_id").read_text())
        except (OSError, ValueError):
            return (0, cpu, cpu)
        return (socket, core, cpu)

    return sorted(os.sched_getaffinity(0), key=place)
