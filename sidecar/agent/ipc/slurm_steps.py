"""Slurm's jobs among the host's processes, by traces that only root can leave: slurmstepd and the groups of its tree.

An environment proves nothing, because its process can rewrite it. A step's slurmstepd runs as root, carries job and
step in its title, and the node in its environment; a step's processes are in a group of Slurm's tree, or, without
control groups, its descendants.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from cadenza.sidecar.agent.ipc import cgroup_paths
from cadenza.sidecar.agent.ipc.processes import is_stepd, is_stopped, parent_of, start_ticks

Shown: TypeAlias = Literal["running", "frozen", "gone"]
"""State of a job's processes as the host shows it."""

_TITLE = re.compile(rb"\[(?:StepId=)?(\d+)(?:[+_]\d+)*\.")
"""``slurmstepd: [7.batch]``, ``slurmstepd: [7+1.0]`` (slurmstepd.c, setproctitle)."""
_DEVICE = re.compile(r"/dev/nvidia(\d{1,4})")
HALTED = frozenset({"__refrigerator", "do_freezer_trap", "do_signal_stop"})
"""Kernel functions in which a process waits that a freezer or a signal has stopped."""
MAX_DEPTH = 4096
"""Longest chain of parents that is followed: pids may be reused while it is read."""


class Step(NamedTuple):
    """One step of a job on this host: its slurmstepd, the Slurm node, and the job's group ("" without any)."""

    job: int
    node: str
    pid: int
    start_ticks: int
    group: str


def steps() -> tuple[Step, ...]:
    """Return all steps of Slurm on this host, of all its lanes."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return tuple(step for pid in pids if (step := step_of(pid)) is not None)


def step_of(pid: int) -> Step | None:
    """Return the step of a slurmstepd; None for any other process, and for one that is not root's."""
    try:
        if not is_stepd(pid) or Path(f"/proc/{pid}").stat().st_uid != 0:
            return None
        title = _TITLE.search(Path(f"/proc/{pid}/cmdline").read_bytes())
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ticks = start_ticks(pid)
    if title is None or ticks is None:
        return None
    node = next((item[16:] for item in environment if item.startswith(b"SLURMD_NODENAME=")), b"")
    return Step(int(title[1]), node.decode(errors="replace"), pid, ticks, cgroup_paths.of(pid).slurm_job())


def ancestors(pid: int) -> Iterator[int]:
    """Yield a process and its parents up to init."""
    for _ in range(MAX_DEPTH):
        yield pid
        parent = parent_of(pid)
        if parent is None or parent <= 1:
            return
        pid = parent


def descendants(pids: Iterable[int]) -> frozenset[int]:
    """Return processes and all their descendants that still live under them."""
    family: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in family:
            family.add(pid)
            waiting += _children(pid)
    return frozenset(family)


def is_halted(pid: int) -> bool:
    """Return True if Slurm's suspend holds the process: by a signal (state T) or by the freezer."""
    return is_stopped(pid) or cgroup_paths.of(pid).frozen() or _waits_in(pid) in HALTED


def shown(pids: Iterable[int]) -> Shown:
    """Return the state that a job's processes show together: one that runs decides."""
    alive = [pid for pid in pids if start_ticks(pid) is not None]
    if not alive:
        return "gone"
    return "frozen" if all(map(is_halted, alive)) else "running"


def devices_of(pids: Iterable[int]) -> frozenset[int]:
    """Return the GPUs whose device files are open in any of these processes, by number (gres.conf(5), File)."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if device := _DEVICE.fullmatch(str(entry.readlink())):
                        found.add(int(device[1]))
    return frozenset(found)


def _waits_in(pid: int) -> str:
    """Return the kernel function in which a process waits (proc_pid_wchan(5)); "" if it is not told."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process (proc_pid_task(5), children)."""
    children: list[int] = []
    try:
        # Each thread lists the children that it has started itself, and no others.
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text(encoding="ascii").split())
    except OSError:
        return children
    return children
