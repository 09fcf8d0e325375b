"""Files used by the processes of a job: mapped, open and imported ones (proc_pid_maps(5))."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from cadenza.sidecar import wire

MAX_FILES = 20_000
MAX_LIST_BYTES = 4 << 20
"""Limits on a job's own list of files."""
PSEUDO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV", "/run/")


def files_of(pids: Iterable[int]) -> tuple[str, ...]:
    """Return the files of these processes and all that descend from them, each once, in the order of first use."""
    files: dict[str, None] = {}
    for pid in _family(pids):
        for path in (*_mapped(pid), *_open(pid)):
            if path.startswith("/") and not path.startswith(PSEUDO_FILES) and not path.endswith(" (deleted)"):
                files.setdefault(path)
                if len(files) >= MAX_FILES:
                    return tuple(files)
    return tuple(files)


def _family(pids: Iterable[int]) -> list[int]:
    family: dict[int, None] = {}
    for pid in pids:
        family.setdefault(pid)
        try:
            family.update((child.pid, None) for child in psutil.Process(pid).children(recursive=True))
        except psutil.Error:
            continue
    return list(family)


def _mapped(pid: int) -> Iterator[str]:
    """Yield the files in a process's address space: its program, libraries, mapped data."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6:  # noqa: PLR2004 - the sixth is the path
            yield fields[5]


def _open(pid: int) -> Iterator[str]:
    """Yield the files that a process has open, and those on its own list."""
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
            if target.startswith(f"/memfd:{wire.FILES_NAME} "):
                # It may hold anything, and be a pipe of that name in a mount of the job's own: opening one waits.
                with os.fdopen(os.open(descriptor, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                    text = (file.read(MAX_LIST_BYTES) or b"").decode("utf-8", errors="surrogateescape")
                yield from filter(None, text.split("\n"))
            elif os.path.isfile(target):  # noqa: PTH113 - one call instead of an object for each
                yield target
        except OSError:
            continue
