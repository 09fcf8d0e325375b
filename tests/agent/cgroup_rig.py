"""Real control groups of version 1 as Slurm would make them, for jobs that are real child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_rig import until

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "memory", "cpuset", "cpu")

real_v1 = pytest.mark.skipif(
    os.geteuid() != 0 or not all(os.access(MOUNT / one / "cgroup.procs", os.W_OK) for one in CONTROLLERS),
    reason="control groups of version 1 need root and their mounts",
)

BUSY = """
import os, sys, threading, time
for _ in range(int(sys.argv[1])):
    threading.Thread(target=lambda: [sum(range(10_000)) for _ in iter(int, 1)], daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


class SlurmTree:
    """A node's tree; ``constrained`` adds cpusets, as ConstrainCores=yes does."""

    def __init__(self, name: str, *, constrained: bool = False) -> None:
        self.name = name
        self.controllers = ("freezer", "memory", "cpuset") if constrained else ("freezer", "memory")
        self._children: list[subprocess.Popen[Any]] = []

    def step(self, job: int, step: int, cpus: str = "") -> dict[str, Path]:
        """Make a step's groups as slurmstepd does, and return them by controller."""
        found = {}
        for controller in self.controllers:
            folder = MOUNT / controller
            parts = (f"slurm_{self.name}", "uid_0", f"job_{job}", f"step_{step}")
            for part in parts:
                folder /= part
                folder.mkdir(exist_ok=True)
                if controller == "cpuset":
                    (folder / "cpuset.mems").write_text((folder.parent / "cpuset.mems").read_text())
                    narrow = cpus and part.startswith(("job_", "step_"))
                    (folder / "cpuset.cpus").write_text(cpus if narrow else (MOUNT / "cpuset/cpuset.cpus").read_text())
            found[controller] = folder
        return found

    def run(self, job: int, step: int, *, threads: int = 0, cpus: str = "") -> subprocess.Popen[str]:
        """Start a real process in a step."""
        groups = self.step(job, step, cpus)
        process = subprocess.Popen(
            [sys.executable, "-c", BUSY, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURM_JOB_ID": str(job)},
        )
        self._children.append(process)
        self.enter(groups, process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def launch(self, job: int, command: list[str], *, cpus: str = "", **environment: str) -> subprocess.Popen[bytes]:
        """Start a program that is in its step's groups from its first instruction on, with a pipe as its input."""
        files = " ".join(str(folder / "cgroup.procs") for folder in self.step(job, 0, cpus).values())
        script = f'for group in {files}; do echo $$ >"$group"; done; exec "$@"'
        process = subprocess.Popen(
            ["sh", "-c", script, "sh", *command],
            stdin=subprocess.PIPE,
            env={**os.environ, "SLURM_JOB_ID": str(job), **environment},
        )
        self._children.append(process)
        return process

    @staticmethod
    def enter(groups: dict[str, Path], pid: int) -> None:
        for folder in groups.values():
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)
            child.communicate()
        for controller in CONTROLLERS:
            ours = MOUNT.glob(f"{controller}/cadenza_{self.name}_*")
            for folder in (MOUNT / controller / f"slurm_{self.name}", *ours):
                until(lambda folder=folder: _removed(folder), f"{folder} to be empty")


def _removed(folder: Path) -> bool:
    for path in sorted(folder.rglob("*/"), key=lambda one: -len(one.parts)):
        if path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _remove_leftovers() -> None:
    """Remove the trees of test processes that were killed: an agent counts their jobs' CPUs as taken."""
    for folder in MOUNT.glob("*/slurm_[tf]*"):
        owner = folder.name.removeprefix("slurm_")[1:]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            _removed(folder)


@contextlib.contextmanager
def slurm_tree(name: str, *, constrained: bool = False) -> Iterator[SlurmTree]:
    _remove_leftovers()
    tree = SlurmTree(name, constrained=constrained)
    try:
        yield tree
    finally:
        tree.close()


def group_of(pid: int, controller: str) -> str:
    """Return the group of a process in one controller, as the kernel names it."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if controller in line.split(":", 2)[1].split(","))
