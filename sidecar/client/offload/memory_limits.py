"""How much host memory this process's job may still take, by the limits of its control groups and by the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOST = "proc/meminfo"
"""Whose MemAvailable is what the host can give without swapping (proc_meminfo(5))."""
MARGIN = 1.1
"""Room that must be there, as a multiple of what a move takes: loaders and page tables go on growing."""


class Room(NamedTuple):
    """Bytes that can still be taken, and the file that says so."""

    nbytes: int
    limit: Path


class _Layout(NamedTuple):
    """How one version of the memory controller names its files (kernel documentation, cgroup v1 and v2)."""

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


V1 = _Layout(("sys/fs/cgroup/memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
V2 = _Layout(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"), ("memory.max", "memory.high"), "memory.current", "inactive_file"
)


def refusal(nbytes: int, ranks: int, root: Path = Path("/")) -> str:
    """Return why ``ranks`` processes of one job, alike, cannot take ``nbytes`` each, or "".

    Ranks arrive together and share the job's limit, so each counts for all of this node.
    """
    room = tightest(root)
    wanted = int(nbytes * ranks * MARGIN)
    if room is None or nbytes <= 0 or wanted <= room.nbytes:
        return ""
    whose = f"the state of {ranks} ranks takes" if ranks > 1 else "the state takes"
    by_host = room.limit == root / HOST
    whose_room, advice = ("the host", "") if by_host else ("the job's limit", ": ask for more with --mem")
    return (
        f"host memory: {whose} {nbytes * ranks >> 20} MiB and {whose_room} leaves {max(room.nbytes, 0) >> 20} MiB "
        f"(margin {MARGIN:g}; {room.limit}){advice}"
    )


def tightest(root: Path = Path("/")) -> Room | None:
    """Return the least room of the host and this process's memory control groups, its own and all above.

    None where none of them can be read.
    """
    rooms = [room for layout, group in _groups(root) for room in _rooms(root, layout, group)]
    if available := _line(root / HOST, "MemAvailable:"):
        rooms.append(Room(available << 10, root / HOST))
    return min(rooms, default=None)


def _groups(root: Path) -> Iterator[tuple[_Layout, str]]:
    """Yield the layout and path of the groups in /proc/self/cgroup that a memory controller may belong to."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield V1, group
            elif number == "0" and not controllers:
                yield V2, group


def _rooms(root: Path, layout: _Layout, group: str) -> Iterator[Room]:
    """Yield the room that each limit of a group and of its parents leaves.

    A path that is not under the mount is another namespace's: there only the mount itself can be read.
    """
    for mount in layout.mounts:
        top = root / mount
        own = top / group.strip("/")
        for folder in (own, *own.parents):
            yield from _limits(folder, layout)
            if folder == top:
                break


def _limits(folder: Path, layout: _Layout) -> Iterator[Room]:
    """Yield the room of one group; none when it has no limit or is not there."""
    usage = _number(folder / layout.usage)
    if usage is None:
        return
    free_again = _line(folder / "memory.stat", layout.reclaimable)
    for name in layout.limits:
        limit = _number(folder / name)
        if limit is not None:
            yield Room(limit - usage + free_again, folder / name)


def _number(path: Path) -> int | None:
    """Return a file's number; None for ``max`` and for what cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _line(path: Path, key: str) -> int:
    """Return the number after a key in a file of such lines; 0 for what is not there.

    Of ``memory.stat`` that is the page cache that the kernel gives up before it counts against the limit.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, value, *_ = line.split()
            if name == key:
                return int(value)
    return 0
