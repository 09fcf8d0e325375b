"""Host memory that this process's job may still take, by the limits of its control groups and by the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOST = "proc/meminfo"
"""Its MemAvailable is the memory that the host can give without swapping (proc_meminfo(5))."""
MARGIN = 1.1
"""Free memory required, as a multiple of a move's size: loaders and page tables keep growing."""


class Headroom(NamedTuple):
    """Bytes that can still be taken, and the file of the limit."""

    nbytes: int
    limit: Path


class _Layout(NamedTuple):
    """File names of one version of the memory controller (kernel documentation, cgroup v1 and v2)."""

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


V1 = _Layout(("sys/fs/cgroup/memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
V2 = _Layout(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"), ("memory.max", "memory.high"), "memory.current", "inactive_file"
)


def refusal(nbytes: int, ranks: int, root: Path = Path("/")) -> str | None:
    """Return the reason why ``ranks`` equal processes of one job cannot take ``nbytes`` each, if they cannot.

    Ranks arrive together and share the job's limit, so each of them counts all ranks of this node.
    """
    least = headroom(root)
    if least is None or nbytes <= 0 or int(nbytes * ranks * MARGIN) <= least.nbytes:
        return None
    taker = f"the state of {ranks} ranks takes" if ranks > 1 else "the state takes"
    by_host = least.limit == root / HOST
    giver, advice = ("the host", "") if by_host else ("the job's limit", ": ask for more with --mem")
    return (
        f"host memory: {taker} {nbytes * ranks >> 20} MiB and {giver} leaves {max(least.nbytes, 0) >> 20} MiB "
        f"(margin {MARGIN:g}; {least.limit}){advice}"
    )


def headroom(root: Path = Path("/")) -> Headroom | None:
    """Return the least headroom of the host, this process's memory control groups and all their parents.

    None if none of them can be read.
    """
    rooms = [room for layout, group in _groups(root) for room in _group_headrooms(root, layout, group)]
    if available := _line(root / HOST, "MemAvailable:"):
        rooms.append(Headroom(available << 10, root / HOST))
    return min(rooms, default=None)


def _groups(root: Path) -> Iterator[tuple[_Layout, str]]:
    """Yield layout and path of the groups in /proc/self/cgroup that may have a memory controller."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield V1, group
            elif number == "0" and not controllers:
                yield V2, group


def _group_headrooms(root: Path, layout: _Layout, group: str) -> Iterator[Headroom]:
    """Yield the headroom that each limit of a group and of its parents leaves; groups without a limit have none.

    A path that is not under the mount belongs to another namespace: then only the mount itself can be read.
    """
    for mount in layout.mounts:
        top = root / mount
        own = top / group.strip("/")
        for folder in (own, *own.parents):
            usage = _number(folder / layout.usage)
            for name in layout.limits if usage is not None else ():
                limit = _number(folder / name)
                if usage is not None and limit is not None:
                    reclaimable = _line(folder / "memory.stat", layout.reclaimable)
                    yield Headroom(limit - usage + reclaimable, folder / name)
            if folder == top:
                break


def _number(path: Path) -> int | None:
    """Return a file's number; None for ``max`` and for a file that cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _line(path: Path, key: str) -> int:
    """Return the number after a key in a file of lines ``KEY NUMBER``, 0 without one.

    In ``memory.stat`` it is page cache, which the kernel reclaims before it enforces the limit.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, value, *_ = line.split()
            if name == key:
                return int(value)
    return 0
