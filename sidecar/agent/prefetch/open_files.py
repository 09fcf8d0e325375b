"""Which files the processes of a job use: what they have mapped, opened and imported (proc_pid_maps(5))."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from cadenza.sidecar import wire

MOST_FILES = 20_000
MOST_BYTES = 4 << 20
"""Bounds of what a job may say of itself."""
ELSEWHERE = ("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV", "/run/")


def files_of(pids: Iterable[int]) -> tuple[str, ...]:
    """Return the files of these processes and all that descend from them, each once, in the order of first use."""
    found: dict[str, None] = {}
    for pid in _family(pids):
        for path in (*_mapped(pid), *_open(pid)):
            if path.startswith("/") and not path.startswith(ELSEWHERE) and not path.endswith(" (deleted)"):
                found.setdefault(path)
                if len(found) >= MOST_FILES:
                    return tuple(found)
    return tuple(found)


def _family(pids: Iterable[int]) -> list[int]:
    found: dict[int, None] = {}
    for pid in pids:
        found.setdefault(pid)
        try:
            found.update((child.pid, None) for child in psutil.Process(pid).children(recursive=True))
        except psutil.Error:
            continue
    return list(found)


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
    """Yield the files that a process has open, and what it says itself of those it has read."""
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
            if target.startswith(f"/memfd:{wire.FILES_NAME} "):
                yield from _said(descriptor)
            elif os.path.isfile(target):  # noqa: PTH113 - one call instead of an object for each
                yield target
        except OSError:
            continue


def _said(descriptor: Path) -> Iterator[str]:
    """Yield the lines of a list that the process keeps for us; it may hold anything."""
    with descriptor.open("rb") as file:
        text = file.read(MOST_BYTES).decode("utf-8", errors="surrogateescape")
    yield from (line for line in text.split("\n") if line)
